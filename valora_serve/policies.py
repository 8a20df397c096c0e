"""The policies: which requests compute what next, and in which mode (VaLoRA §4.4.3).

All of them fill their batch with `_Policy._pack`, which keeps the limits; what differs is who may
take part, in which order, and where the weights go.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from valora_serve.cost_model import StepShape
from valora_serve.orchestrator import POLICIES, Decision
from valora_serve.types import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from valora_serve.cost_model import CostModel
    from valora_serve.orchestrator import Policy, PolicySettings, RequestView, View

FOREVER = math.inf
PREFETCHES = 8  # adapters asked for at a time; more would delay the first of them
LOOK_AHEAD = 256  # waiting requests looked at for prefetching and clustering
AHEAD_OF_LIMIT = 0.5  # share of a latency limit after which a request counts as urgent

_arrival = attrgetter("arrival")


def _since(request: RequestView) -> float:
    """Since when a request waits for its next token."""
    served = request.served
    return request.arrival if served is None else served


@dataclass(slots=True)
class _Plan:
    """Who may take part in a step, and how; what a policy hands to `_Policy._pack`.

    Attributes:
        mode: Of the step.
        merged: Adapter in the weights.
        running: Running requests that may take part.
        waiting: Waiting requests that may be taken in, in this order.
        reason: Why.
        until: Until when the answer holds, if nothing is prefilled and nobody is left out.
        budget: Most prompt tokens of the step, None for what the limits allow.
        admit: Most requests to take in, None for what the limits allow.
        strict: A request that does not fit holds up those behind it.
    """

    mode: Mode
    merged: str | None
    running: Sequence[RequestView]
    waiting: Sequence[RequestView]
    reason: str
    until: float = FOREVER
    budget: int | None = None
    admit: int | None = None
    strict: bool = False


class _Batch:
    """A batch that is being filled within the limits of a view.

    Args:
        view: What the policy sees.
        plan: What it wants.
        starved: Requests that arrived before may not be overtaken.
    """

    def __init__(self, view: View, plan: _Plan, starved: float) -> None:
        self.view = view
        self.plan = plan
        self.starved = starved
        self.items: list[tuple[str, int]] = []
        self.requests: list[RequestView] = []
        self.preempt: list[RequestView] = []
        self.prefetch: list[str] = []
        self.rotating = False
        self.prompt_tokens = 0
        self.tokens = view.limits.max_tokens
        self.merging = self._merging()
        self.pages = view.limits.free_pages - self.merging
        self.adapters: set[str | None] = {None, plan.merged}
        self.room = view.limits.max_adapters + 1

    def run(self) -> None:
        """Take the running requests, then the waiting ones, then prefetch."""
        self._running()
        if self.plan.waiting and not self.preempt:
            self._waiting()
        if not self.items and self.plan.waiting and self.view.running and not self.preempt:
            self._make_way()
        if self.view.waiting:
            self._prefetches()

    def _running(self) -> None:
        plan, limits = self.plan, self.view.limits
        running = plan.running
        prefilling = self._decode(running)
        if self.rotating or len(running) > limits.max_tokens:
            # Not all fit at once: those that waited longest go first.
            self._restart()
            self.rotating = True
            prefilling = self._decode(sorted(running, key=_since))
        if prefilling is None:
            preempted = self._free_pages()
            self._restart()
            gone = {r.id for r in preempted}
            self.preempt = preempted
            self.pages += sum(r.held for r in preempted)
            running = [r for r in running if r.id not in gone]
            prefilling = self._decode(sorted(running, key=_arrival), skip=True)
        budget = self.tokens if plan.budget is None else min(plan.budget, self.tokens)
        for request in prefilling or ():
            tokens = min(request.prompt_left, limits.chunk, budget)
            if tokens <= 0:
                break
            if self._fits(request.adapter) and request.pages <= self.pages:
                self.pages -= request.pages
                self._add(request, tokens)
                budget -= tokens

    def _merging(self) -> int:
        """Pages of an adapter that only now comes to be needed all the time, by its merge."""
        merged = self.plan.merged
        if merged is None or merged == self.view.merged:
            return 0
        if any(r.adapter == merged for r in self.view.running):
            return 0
        return next((r.adapter_pages for r in self.view.waiting if r.adapter == merged), 0)

    def _restart(self) -> None:
        self.items.clear()
        self.requests.clear()
        self.tokens = self.view.limits.max_tokens
        self.pages = self.view.limits.free_pages - self.merging
        self.adapters = {None, self.plan.merged}

    def _decode(
        self, running: Iterable[RequestView], *, skip: bool = False
    ) -> list[RequestView] | None:
        """Take the decodes; says who prefills, None if pages ran out (unless `skip`)."""
        prefilling = []
        adapters, resident = self.adapters, self.view.resident
        items, requests = self.items, self.requests
        room, tokens, pages = self.room, self.tokens, self.pages
        room += self.plan.merged is None and None not in adapters
        for request in running:
            if request.prompt_left:
                prefilling.append(request)
                continue
            adapter = request.adapter
            if adapter not in adapters:
                if adapter not in resident:
                    continue
                if len(adapters) >= room:
                    self.rotating = True
                    continue
                adapters.add(adapter)
            if request.pages:
                if request.pages > pages:
                    if skip:
                        continue
                    return None
                pages -= request.pages
            if tokens <= 0:
                self.rotating = True
                break
            tokens -= 1
            items.append((request.id, 1))
            requests.append(request)
        self.tokens, self.pages = tokens, pages
        return prefilling

    def _free_pages(self) -> list[RequestView]:
        """Running requests to preempt, youngest first, until the older ones can go on."""
        free = self.view.limits.free_pages - self.merging
        taking = {r.id for r in self.plan.running}
        need = sum(r.pages for r in self.plan.running)
        victims: list[RequestView] = []
        for request in sorted(self.view.running, key=_arrival, reverse=True)[:-1]:
            if need <= free:
                break
            victims.append(request)
            free += request.held
            if request.id in taking:
                need -= request.pages
        return victims

    def _fits(self, adapter: str | None) -> bool:
        """Whether rows of an adapter may be in the batch; then it is one of the batch's."""
        if adapter in self.adapters:
            return True
        if adapter not in self.view.resident or len(self.adapters) >= self.room:
            return False
        self.adapters.add(adapter)
        return True

    def _add(self, request: RequestView, tokens: int) -> None:
        self.items.append((request.id, tokens))
        self.requests.append(request)
        self.tokens -= tokens
        self.prompt_tokens += tokens

    def _waiting(self) -> None:
        plan, view = self.plan, self.view
        limits, resident = view.limits, view.resident
        slots = limits.max_requests - len(view.running)
        if plan.admit is not None:
            slots = min(slots, plan.admit)
        if slots <= 0:
            return
        budget = self.tokens
        if plan.budget is not None:
            budget = min(budget, plan.budget - self.prompt_tokens)
        pinned = self._pinned()
        if not self._reserve():
            return
        for request in plan.waiting:
            if slots <= 0 or budget <= 0:
                break
            adapter = request.adapter
            if adapter is not None and adapter not in resident:
                continue
            starved = request.arrival < self.starved
            need = request.pages
            if adapter is not None and adapter not in pinned:
                need += request.adapter_pages
            if need > self.pages or not self._fits(adapter):
                if starved or plan.strict:
                    break
                continue
            pinned.add(adapter)
            self.pages -= need
            slots -= 1
            tokens = min(max(1, request.prompt_left), limits.chunk, budget)
            budget -= tokens
            self._add(request, tokens)

    def _pinned(self) -> set[str | None]:
        """Adapters whose pages do not count as free."""
        pinned = {r.adapter for r in self.view.running}
        pinned.update((self.view.merged, self.plan.merged))
        pinned.update(self.view.loading)
        return pinned

    def _reserve(self) -> bool:
        """Keep pages for the oldest starved request whose adapter is missing.

        Returns:
            Whether there are enough; if not, nobody may be taken in until there are.
        """
        view = self.view
        for request in view.waiting:
            adapter = request.adapter
            if request.arrival >= self.starved:
                return True
            if adapter is None or adapter in view.resident:
                continue
            self.pages -= request.pages
            if adapter not in view.loading:
                self.pages -= request.adapter_pages
                if self.pages + request.pages >= 0:
                    self.prefetch.append(adapter)
            return self.pages >= 0
        return True

    def _make_way(self) -> None:
        """Nothing can go on: running requests that the mode leaves out hold what is needed.

        The youngest of them give way to the first that waits.
        """
        head = next((r for r in self.plan.waiting if self._present(r)), None)
        if head is None:
            return
        pages = self.view.limits.free_pages - self.merging
        slots = self.view.limits.max_requests - len(self.view.running)
        need = head.pages + (head.adapter_pages if head.adapter not in self._pinned() else 0)
        for request in sorted(self.view.running, key=_arrival, reverse=True):
            if need <= pages and slots > 0:
                break
            self.preempt.append(request)
            pages += request.held
            slots += 1

    def _present(self, request: RequestView) -> bool:
        return request.adapter is None or request.adapter in self.view.resident

    def _prefetches(self) -> None:
        """Adapters of the oldest that wait, as far as memory goes."""
        view = self.view
        seen = self._pinned() | self.adapters | set(self.prefetch)
        pages = self.pages
        for request in islice(view.waiting, LOOK_AHEAD):
            adapter = request.adapter
            if adapter in seen:
                continue
            seen.add(adapter)
            pages -= request.adapter_pages
            if pages < 0 or len(self.prefetch) >= PREFETCHES:
                break
            if adapter is not None and adapter not in view.resident:
                self.prefetch.append(adapter)


class _Policy:
    """What the policies share.

    Args:
        cost_model: What steps, switches and loads cost.
        settings: Knobs.
    """

    def __init__(self, cost_model: CostModel, settings: PolicySettings) -> None:
        self.cost = cost_model
        self.settings = settings
        self._steady: Sequence[RequestView] = ()
        self._admission = _Admission(settings) if settings.early_abort else None

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

    def _plan(self, view: View, waiting: Sequence[RequestView]) -> _Plan:
        raise NotImplementedError

    def _admit(self, view: View) -> tuple[Sequence[RequestView], tuple[tuple[str, str], ...]]:
        """Who may still wait, and who is given up on."""
        if self._admission is None:
            return view.waiting, ()
        return self._admission(view)

    def _pack(self, view: View, plan: _Plan, abort: tuple[tuple[str, str], ...]) -> Decision:
        now = view.now
        starved = now - self.settings.patience
        batch = _Batch(view, plan, starved)
        if batch.pages < 0:
            plan = _Plan(
                Mode.UNMERGED, None, view.running, plan.waiting, f"no room to keep {plan.merged}"
            )
            batch = _Batch(view, plan, starved)
        batch.run()
        stuck = not batch.items and not batch.preempt
        if stuck and (plan.merged or view.merged) is not None and (plan.running or plan.waiting):
            # The adapter in the weights takes the pages or the place of those that wait.
            plan = _Plan(
                Mode.UNMERGED, None, view.running, plan.waiting, "the merged adapter makes room"
            )
            batch = _Batch(view, plan, starved)
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
            self._admission.note(batch, now)
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


def _can_merge(view: View, adapter: str | None) -> bool:
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


class _Admission:
    """S-LoRA's early abort (§4.3, appendix B).

    Requests whose first token would come too late even if they went next are given up. While
    more come than can be taken in, the newest go first, else the oldest.

    Args:
        settings: Knobs: `slo`, `limits`.
    """

    PERIOD = 1.0  # seconds between two updates of the moving averages
    KEPT = 0.8  # share of the old average in the new one

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._newest = -math.inf
        self._came = self._taken = 0
        self._came_average = self._taken_average = 0.0
        self._next = -math.inf
        self._prefill = 0.0  # longest from taking in to the first token
        self._pending: dict[str, float] = {}

    def __call__(self, view: View) -> tuple[Sequence[RequestView], tuple[tuple[str, str], ...]]:
        """Who may still wait and in which order, and who is given up on."""
        now = view.now
        self._measure(view)
        keep, abort = [], []
        for request in view.waiting:
            if request.served is not None:
                keep.append(request)  # preempted: it has had its first token
                continue
            limit = request.limit
            if limit is None:
                limit = self._settings.limits.get(request.domain or "", self._settings.slo)
            if request.deadline is not None:
                limit = min(limit, request.deadline - request.arrival)
            if now - request.arrival + self._prefill > limit:
                abort.append((request.id, f"first token would come after {limit:g} s"))
            else:
                keep.append(request)
        if self._came_average > self._taken_average:
            keep.reverse()
        return keep, tuple(abort)

    def _measure(self, view: View) -> None:
        for request in reversed(view.waiting):
            if request.arrival <= self._newest:
                break
            self._came += 1
        if view.waiting:
            self._newest = max(self._newest, view.waiting[-1].arrival)
        for request in view.running:
            if not request.prompt_left and request.id in self._pending:
                took = view.now - self._pending.pop(request.id)
                self._prefill = max(self._prefill * 0.99, took)
        if view.now >= self._next:
            self._next = view.now + self.PERIOD
            kept = self.KEPT
            self._came_average = kept * self._came_average + (1 - kept) * self._came
            self._taken_average = kept * self._taken_average + (1 - kept) * self._taken
            self._came = self._taken = 0

    def note(self, batch: _Batch, now: float) -> None:
        """Be told what a step takes in."""
        for request in batch.requests:
            if not request.running and request.id not in self._pending:
                self._taken += 1
                self._pending[request.id] = now


class UnmergeOnly(_Policy):
    """Pristine weights, first come, first served; whoever does not fit is passed over."""

    strict = False

    def _plan(self, view: View, waiting: Sequence[RequestView]) -> _Plan:
        return _Plan(
            Mode.UNMERGED, None, view.running, waiting, "always unmerged", strict=self.strict
        )


class SLora(UnmergeOnly):
    """S-LoRA: unmerged, strictly first come; clustering and early abort as set (S-LoRA §4)."""

    strict = True


class MergeOnly(_Policy):
    """One adapter at a time: that of the oldest request, with all that ask for the same.

    An adapter that cannot be merged has its turn with pristine weights.
    """

    def _plan(self, view: View, waiting: Sequence[RequestView]) -> _Plan:
        resident = view.resident
        candidates = [*view.running, *islice(waiting, LOOK_AHEAD)]
        candidates = [r for r in candidates if r.adapter is None or r.adapter in resident]
        if not candidates:
            return _Plan(view.mode, view.merged, (), (), "adapters are being loaded")
        oldest = min(candidates, key=_arrival)
        adapter = oldest.adapter
        merged = adapter if _can_merge(view, adapter) else None
        return _Plan(
            Mode.UNMERGED if merged is None else Mode.MERGED,
            merged,
            _of(view.running, adapter),
            _of(waiting, adapter),
            f"oldest request is {oldest.id}",
        )


class DLora(_Policy):
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
        self._credit: Counter[str | None] = Counter()
        self._steps = self._virtual = 0
        self._merged_rows = self._all_rows = 0
        self._was_merged = False
        self._popular: str | None = None

    def _plan(self, view: View, waiting: Sequence[RequestView]) -> _Plan:
        most = view.limits.max_requests
        queue = heapq.merge(sorted(view.running, key=_arrival), waiting, key=_arrival)
        first_come = list(islice(queue, most))
        counts = Counter([r.adapter for r in first_come])
        credited = [a for a, credit in self._credit.items() if credit >= self.CREDIT and counts[a]]
        mergeable = [a for a in counts if _can_merge(view, a)]
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
            return _Plan(
                Mode.UNMERGED, None, view.running, ordered, f"no adapter has {self._enter:.0%}"
            )
        stalled = Counter([r.adapter for r in first_come if r.adapter != adapter])
        unit = 0.5 / (self._speed * most)
        for other, count in stalled.items():
            self._credit[other] += unit * count
            self._credit[adapter] -= unit * count
        return _Plan(
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


class Valora(_Policy):
    """VaLoRA's Algorithm 1, its holes closed.

    Principles as in §4.4.3: merged wherever possible; when others starve, mixture first, then
    unmerged. What the printed algorithm leaves open is settled so:

    - The batch size that shares refer to is that of the batch which can be formed now, and a
      merge must save more than it costs, so that a lone request neither never nor always merges.
    - `hysteresis` lies between entering and leaving a mode.
    - Running requests of other adapters never stall: to turn to an adapter with them running is
      mixture. Only waiting ones are kept back, up to θ.
    - Who starves on the merged adapter needs no mixture. More starving requests than the batch
      holds are cut by credit.
    - Ties go to the merged adapter, then to the name; the base model is never merged.
    """

    def _plan(self, view: View, waiting: Sequence[RequestView]) -> _Plan:
        now = view.now
        counts = _counts(view, waiting)
        size = min(view.limits.max_requests, len(view.running) + len(waiting))
        adapter = self._favourite(view, counts, size)
        if adapter is None:
            for request in waiting:
                request.credit = now - request.arrival
            return _Plan(
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
            return _Plan(Mode.UNMERGED, None, view.running, waiting, f"{starving} of {size} starve")
        if starving:
            return _Plan(
                Mode.MIXTURE,
                adapter,
                view.running,
                waiting,
                f"{share:.0%} are its; {starving} others must not wait",
            )
        return _Plan(
            Mode.MERGED,
            adapter,
            _of(view.running, adapter),
            _of(waiting, adapter),
            f"{share:.0%} are its, no other starves",
            until=kept_back + theta - extra,
        )

    def _favourite(self, view: View, counts: Counter[str | None], size: int) -> str | None:
        """The adapter to have in the weights, None for none."""
        able = [(n, a == view.merged, a) for a, n in counts.items() if _can_merge(view, a)]
        if not able:
            return None
        count, _, best = max(able)
        slack = self.settings.hysteresis * size
        current = view.merged
        if current is not None and counts[current] and current != best:
            if counts[current] > size / 2 - slack and count <= counts[current] + slack:
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

    def _step_time(self, view: View) -> float:
        rows = len(view.running)
        return self.cost.step(StepShape(decode=max(1, rows), terms=rows, work=64 * rows, ranks=64))


def make(name: str, cost_model: CostModel, settings: PolicySettings) -> Policy:
    """A policy by name; see `orchestrator.make_policy`."""
    from valora_serve.cost_policy import Cost

    classes: dict[str, type[_Policy]] = {
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
