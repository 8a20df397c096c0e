"""The policies: which requests compute what next, and in which mode (VaLoRA §4.4.3).

All of them fill their batch through `batching.Batch`, which keeps the limits; what differs is who
may take part, in which order, and where the weights go. `cost` has a file of its own.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from itertools import chain, islice
from typing import TYPE_CHECKING

from valora_serve.orchestrator.batching import FOREVER, LOOK_AHEAD, Batch, Plan, by_arrival
from valora_serve.orchestrator.cost_model import StepShape, step_shape
from valora_serve.orchestrator.decision import POLICIES, Decision
from valora_serve.orchestrator.early_abort import EarlyAbort
from valora_serve.types import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from valora_serve.orchestrator.cost_model import CostModel
    from valora_serve.orchestrator.decision import Policy, PolicySettings, RequestView, View


class BasePolicy:
    """What the policies share.

    Args:
        cost_model: What steps, switches and loads cost.
        settings: Knobs.
    """

    def __init__(self, cost_model: CostModel, settings: PolicySettings) -> None:
        self.cost = cost_model
        self.settings = settings
        self._steady: Sequence[RequestView] = ()
        self._admission = EarlyAbort(settings) if settings.early_abort else None

    def decide(self, view: View) -> Decision:
        """Say what the next step does."""
        for request in self._steady:
            request.served = view.now
        self._steady = ()
        if not view.running and not view.waiting:
            return Decision(view.mode, view.merged, reason="idle", until=FOREVER)
        waiting, abort = self._admit(view)
        plan = self._plan(view, waiting)
        if self.settings.clusters and plan.waiting:
            plan.waiting = _cluster(view, plan.waiting, self.settings.clusters)
        return self._pack(view, plan, abort)

    def finished(self, request_id: str) -> None:
        """Be told that a request has ended."""

    def _plan(self, view: View, waiting: Sequence[RequestView]) -> Plan:
        raise NotImplementedError

    def _admit(self, view: View) -> tuple[Sequence[RequestView], tuple[tuple[str, str], ...]]:
        """Who may still wait, and who is given up on."""
        if self._admission is None:
            return view.waiting, ()
        return self._admission(view)

    def _pack(self, view: View, plan: Plan, abort: tuple[tuple[str, str], ...]) -> Decision:
        now = view.now
        starved = now - self.settings.patience
        batch = Batch(view, plan, starved)
        if batch.pages < 0:
            plan = Plan(
                Mode.UNMERGED, None, view.running, plan.waiting, f"no room to keep {plan.merged}"
            )
            batch = Batch(view, plan, starved)
        batch.run()
        stuck = not batch.items and not batch.preempt
        taken = (plan.merged or view.merged) is not None and bool(plan.running or plan.waiting)
        if stuck and (taken or len(plan.running) < len(view.running)):
            # The adapter in the weights, or requests that run and were left out, take the pages or
            # the place of those that wait.
            reason = "the merged adapter makes room" if taken else "what runs makes room"
            plan = Plan(Mode.UNMERGED, None, view.running, plan.waiting, reason)
            batch = Batch(view, plan, starved)
            batch.run()
        else:
            stuck = False
        for request in batch.requests:
            request.served = now
        mode, merged = plan.mode, plan.merged
        if not batch.items and not stuck:
            # Nothing to compute: leave the weights alone.
            mode, merged = view.mode, view.merged
        elif mode is Mode.MIXTURE and all(r.adapter == merged for r in batch.requests):
            mode = Mode.MERGED
        until = plan.until
        if batch.prompt_tokens or batch.rotating or batch.preempt or abort:
            until = 0.0
        if until > now:
            self._steady = batch.requests
        if self._admission is not None:
            self._admission.note(batch.requests, now)
        return Decision(
            mode,
            merged,
            tuple(batch.items),
            tuple(batch.prefetch),
            abort,
            tuple(r.id for r in batch.preempt),
            plan.reason,
            until,
        )


def can_merge(view: View, adapter: str | None) -> bool:
    """Whether an adapter is merged or can be."""
    if adapter is None or adapter not in view.resident:
        return False
    return adapter == view.merged or view.switchable is None or adapter in view.switchable


def _counts(view: View, waiting: Iterable[RequestView]) -> Counter[str | None]:
    """Requests by adapter, the base model under None."""
    counts = Counter([r.adapter for r in view.running])
    counts.update([r.adapter for r in waiting])
    return counts


def _of(requests: Iterable[RequestView], adapter: str | None) -> list[RequestView]:
    return [r for r in requests if r.adapter == adapter]


def _cluster(view: View, waiting: Sequence[RequestView], most: int) -> list[RequestView]:
    """S-LoRA's adapter clustering: once `most` adapters are in, their requests go first (§A.2)."""
    inside = {r.adapter for r in view.running}
    first, later = [], []
    for request in waiting:
        if request.adapter in inside or len(inside) < most:
            inside.add(request.adapter)
            first.append(request)
        else:
            later.append(request)
    return first + later


class UnmergeOnly(BasePolicy):
    """Pristine weights, first come, first served; whoever does not fit is passed over."""

    strict = False

    def _plan(self, view: View, waiting: Sequence[RequestView]) -> Plan:
        return Plan(
            Mode.UNMERGED, None, view.running, waiting, "always unmerged", strict=self.strict
        )


class SLora(UnmergeOnly):
    """S-LoRA: unmerged, strictly first come; clustering and early abort as set (S-LoRA §4)."""

    strict = True


class MergeOnly(BasePolicy):
    """One adapter at a time: that of the oldest request, with all that ask for the same.

    An adapter that cannot be merged has its turn with pristine weights.
    """

    def _plan(self, view: View, waiting: Sequence[RequestView]) -> Plan:
        resident = view.resident
        candidates = [*view.running, *islice(waiting, LOOK_AHEAD)]
        candidates = [r for r in candidates if r.adapter is None or r.adapter in resident]
        if not candidates:
            return Plan(view.mode, view.merged, (), (), "adapters are being loaded")
        oldest = min(candidates, key=by_arrival)
        adapter = oldest.adapter
        merged = adapter if can_merge(view, adapter) else None
        return Plan(
            Mode.UNMERGED if merged is None else Mode.MERGED,
            merged,
            _of(view.running, adapter),
            _of(waiting, adapter),
            f"oldest request is {oldest.id}",
        )


class DLora(BasePolicy):
    """dLoRA's credit-based batching, as in its published code (OSDI 2024, §4.2).

    Merged while enough of the first-come batch would be the merged adapter's; the rest is stalled
    meanwhile, without a bound worth the name: an adapter's credit for being passed over grows by
    less than one a step, and it takes `CREDIT` to be put first. Thresholds adapt by additive
    decrease and multiplicative increase.
    """

    CREDIT = 10_000.0
    ADD, MULTIPLY = 0.05, 1.1

    def __init__(self, cost_model: CostModel, settings: PolicySettings) -> None:
        super().__init__(cost_model, settings)
        batch = StepShape(decode=32, context=32 * 400)
        unmerged = StepShape(
            decode=32, context=32 * 400, terms=32, work=32 * 64, ranks=512, adapters=8
        )
        self._merged_time = cost_model.step(batch)
        self._unmerged_time = cost_model.step(unmerged)
        self._speed = self._merged_time / self._unmerged_time
        self._enter, self._leave = 1.0, self._speed
        self._credit: defaultdict[str | None, float] = defaultdict(float)
        self._steps = self._virtual = 0
        self._merged_rows = self._all_rows = 0
        self._was_merged = False
        self._popular: str | None = None

    def _plan(self, view: View, waiting: Sequence[RequestView]) -> Plan:
        most = view.limits.max_requests
        queue = heapq.merge(sorted(view.running, key=by_arrival), waiting, key=by_arrival)
        first_come = list(islice(queue, most))
        counts = Counter([r.adapter for r in first_come])
        credited = [a for a, credit in self._credit.items() if credit >= self.CREDIT and counts[a]]
        mergeable = [a for a in counts if can_merge(view, a)]
        adapter = None
        if mergeable and not credited:
            popular = max(mergeable, key=lambda a: (counts[a], a == view.merged))
            merged = view.merged if self._was_merged else None
            if merged is not None and counts[merged] >= self._leave * len(first_come):
                adapter = merged
            elif counts[popular] >= self._enter * len(first_come):
                adapter = popular
            elif popular != self._popular:
                self._virtual += 1
                self._popular = popular
            self._merged_rows += counts[adapter if adapter is not None else popular]
            self._all_rows += len(first_come)
        if (adapter is not None) != self._was_merged:
            self._adapt(view)
            self._was_merged = adapter is not None
        self._steps += 1
        if adapter is None:
            ordered = sorted(waiting, key=lambda r: r.adapter not in credited)
            return Plan(
                Mode.UNMERGED, None, view.running, ordered, f"no adapter has {self._enter:.0%}"
            )
        stalled = Counter([r.adapter for r in first_come if r.adapter != adapter])
        unit = 0.5 / (self._speed * most)
        for other, count in stalled.items():
            self._credit[other] += unit * count
            self._credit[adapter] -= unit * count
        return Plan(
            Mode.MERGED,
            adapter,
            _of(view.running, adapter),
            _of(waiting, adapter),
            f"{counts[adapter]} of {len(first_come)} are its; {sum(stalled.values())} stalled",
            until=FOREVER if not stalled else 0.0,
        )

    def _adapt(self, view: View) -> None:
        """Move the thresholds towards the mode that would have had the higher throughput."""
        if not self._steps:
            return
        switch = self.cost.switch(None, view.merged or "", 64)
        merged = self._merged_time * self._steps
        unmerged = self._unmerged_time * self._steps
        if self._was_merged:
            merged += switch
        else:
            unmerged += switch
            merged += switch * self._virtual
        merged_rate, unmerged_rate = self._merged_rows / merged, self._all_rows / unmerged
        if self._was_merged:
            if merged_rate > unmerged_rate and self._enter - self.ADD > self._leave:
                self._enter -= self.ADD
            elif merged_rate < unmerged_rate:
                self._enter *= self.MULTIPLY
        elif unmerged_rate > merged_rate and self._leave + self.ADD < self._enter:
            self._leave += self.ADD
        elif unmerged_rate < merged_rate:
            self._leave /= self.MULTIPLY
        self._steps = self._virtual = self._merged_rows = self._all_rows = 0


class Valora(BasePolicy):
    """VaLoRA's Algorithm 1, its holes closed.

    Principles as in §4.4.3: merged wherever possible; when others starve, mixture first, then
    unmerged. What the printed algorithm leaves open is settled so:

    - The batch size that shares refer to is that of the batch which can be formed now, and a
      merge must save more than it costs, so that a lone request neither never nor always merges.
    - `hysteresis` lies between entering and leaving a mode.
    - Running requests of other adapters never stall: to turn to an adapter with them running is
      mixture, or no merge at all where the costs say that mixture's second terms outweigh what it
      spares. Only waiting ones are kept back, up to θ.
    - Who starves on the merged adapter needs no mixture. More starving requests than the batch
      holds are cut by credit.
    - Ties go to the merged adapter, then to the name; the base model is never merged.
    """

    def _plan(self, view: View, waiting: Sequence[RequestView]) -> Plan:
        now = view.now
        counts = _counts(view, waiting)
        size = min(view.limits.max_requests, len(view.running) + len(waiting))
        adapter = self._favourite(view, counts, size)
        if adapter is None:
            for request in waiting:
                request.credit = now - request.arrival
            return Plan(
                Mode.UNMERGED, None, view.running, waiting, "no adapter has most of the requests"
            )
        # Credit: waited, plus the step, plus the switch that stands before it.
        extra = self._step_time(view) + self.cost.switch(view.merged, adapter)
        others = [r for r in view.running if r.adapter != adapter]
        kept_back: float = FOREVER
        starving = len(others)
        theta = self.settings.theta
        for request in waiting:
            request.credit = credit = now - request.arrival + extra
            if request.adapter != adapter:
                if credit > theta:
                    starving += 1
                else:
                    kept_back = min(kept_back, request.arrival)
        share = counts[adapter] / size
        if starving > size * 0.5:
            return Plan(Mode.UNMERGED, None, view.running, waiting, f"{starving} of {size} starve")
        if starving and not self._mixture_pays(view, waiting, adapter):
            return Plan(
                Mode.UNMERGED, None, view.running, waiting,
                f"{starving} others must not wait, and mixture would cost more",
            )  # fmt: skip
        if starving:
            return Plan(
                Mode.MIXTURE,
                adapter,
                view.running,
                waiting,
                f"{share:.0%} are its; {starving} others must not wait",
            )
        return Plan(
            Mode.MERGED,
            adapter,
            _of(view.running, adapter),
            _of(waiting, adapter),
            f"{share:.0%} are its, no other starves",
            until=kept_back + theta - extra,
        )

    def _favourite(self, view: View, counts: Counter[str | None], size: int) -> str | None:
        """The adapter to have in the weights, None for none."""
        able = [(n, a == view.merged, a) for a, n in counts.items() if can_merge(view, a)]
        if not able:
            return None
        count, _, best = max(able)
        slack = self.settings.hysteresis * size
        current = view.merged
        if (
            current is not None
            and current != best
            and counts[current] > size / 2 - slack
            and count <= counts[current] + slack
        ):
            return current
        if best == current:
            return best if count > size / 2 - slack else None
        if count <= size / 2 or (current is not None and count <= size / 2 + slack):
            return None
        return best if self._pays(view, best, count) else None

    def _pays(self, view: View, adapter: str | None, count: int) -> bool:
        """Whether what is left to do for an adapter is worth the merge."""
        rank, steps = 0, 0
        for requests in (view.running, view.waiting):
            for request in islice(requests, LOOK_AHEAD):
                if request.adapter == adapter:
                    rank = request.rank
                    steps = max(steps, request.output_left, 1)
        plain = StepShape(decode=count)
        own = StepShape(decode=count, terms=count, work=count * rank, ranks=rank, adapters=1)
        saved = steps * (self.cost.step(own) - self.cost.step(plain))
        return saved > self.cost.switch(view.merged, adapter, rank)

    def _mixture_pays(self, view: View, waiting: Sequence[RequestView], adapter: str) -> bool:
        """Whether the steps to come are cheaper in mixture than unmerged, switches included.

        A row of another adapter has two terms in mixture, so with kernels that are good at many
        adapters unmerged rows may cost less.
        """
        rank = rows = own = named = work = steps = 0
        ranks: dict[str, int] = {}
        prompts = []
        limits = view.limits
        for request in islice(chain(view.running, waiting), min(limits.max_requests, LOOK_AHEAD)):
            rows += 1
            steps = max(steps, request.output_left)
            if request.prompt_left:
                prompts.append((request, min(request.prompt_left, limits.chunk)))
            if request.adapter == adapter:
                own += 1
                rank = request.rank
            elif request.adapter is not None:
                named += 1
                work += request.rank
                ranks[request.adapter] = request.rank
        rank = rank or 64
        others, total = rows - own, sum(ranks.values()) + rank
        mixture = StepShape(
            Mode.MIXTURE, decode=rows, terms=named + others, work=work + others * rank, ranks=total
        )
        unmerged = StepShape(decode=rows, terms=named + own, work=work + own * rank, ranks=total)
        gain = steps * (self.cost.step(unmerged) - self.cost.step(mixture))
        if prompts:
            ranks[adapter] = rank
            gain += self.cost.step(step_shape(Mode.UNMERGED, None, prompts, ranks))
            gain -= self.cost.step(step_shape(Mode.MIXTURE, adapter, prompts, ranks))
        switches = self.cost.switch(view.merged, adapter, rank)
        return gain > switches - self.cost.switch(view.merged, None)

    def _step_time(self, view: View) -> float:
        rows = len(view.running)
        return self.cost.step(StepShape(decode=max(1, rows), terms=rows, work=64 * rows, ranks=64))


def make(name: str, cost_model: CostModel, settings: PolicySettings) -> Policy:
    """A policy by name; see `orchestrator.make_policy`."""
    from valora_serve.orchestrator.cost_policy import Cost

    classes: dict[str, type[BasePolicy]] = {
        "cost": Cost,
        "valora": Valora,
        "merge_only": MergeOnly,
        "unmerge_only": UnmergeOnly,
        "dlora": DLora,
        "slora": SLora,
    }
    if name not in classes:
        raise ValueError(f"No policy {name!r}; there are {', '.join(POLICIES)}.")
    return classes[name](cost_model, settings)
