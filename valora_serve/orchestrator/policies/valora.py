"""VaLoRA's scheduling policy (Algorithm 1, §4.4.3)."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from valora_serve.orchestrator.base import BasePolicy, can_merge, count_by_adapter, with_adapter
from valora_serve.orchestrator.batching import FOREVER, LOOK_AHEAD, BatchPlan
from valora_serve.orchestrator.cost_model import StepShape, step_shape
from valora_serve.types import Mode

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Sequence

    from valora_serve.orchestrator.decision import RequestView, View


class ValoraPolicy(BasePolicy):
    """VaLoRA's Algorithm 1, with rules for the cases that the paper leaves open.

    The principles are those of §4.4.3: merged mode whenever possible; when other requests starve,
    mixture mode first, then unmerged mode. The cases that the printed algorithm leaves open:

    - The share of an adapter refers to the batch that can be formed now, and a merge must save more
      than it costs. A single request is therefore merged only if that pays.
    - The setting `hysteresis` separates the conditions for entering and leaving a mode.
    - Running requests of other adapters are never paused. While they run, the mode is mixture, or
      unmerged where the cost model says that the second LoRA terms of mixture mode cost more than
      they save. Only waiting requests are kept back, up to θ.
    - Requests that would otherwise miss their latency limit starve, and go before all others; a
      running request without a limit is preempted for them if nothing else makes room.
    - Starving requests of the merged adapter do not cause mixture mode. If more requests starve
      than the batch holds, those with the highest credit go first.
    - Ties go to the merged adapter, then to the adapter's name. The base model is never merged.
    """

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        """Plan a step by Algorithm 1; urgent requests go first."""
        urgent = self.urgent(view, waiting)
        first = {r.id for r in urgent}
        if urgent:
            waiting = [*urgent, *(r for r in waiting if r.id not in first)]
        plan = self._algorithm(view, waiting, first)
        plan.urgent = urgent
        if any(self.settings.due(r) is not None for r in waiting):
            plan.until = 0.0  # one may become urgent at any time
        return plan

    def _algorithm(
        self, view: View, waiting: Sequence[RequestView], urgent: Collection[str]
    ) -> BatchPlan:
        """Plan a step by Algorithm 1.

        Args:
            view: State before the step.
            waiting: Waiting requests that may be admitted, in this order.
            urgent: Ids of those that must not wait.
        """
        now = view.now
        counts = count_by_adapter(view, waiting)
        size = min(view.limits.max_requests, len(view.running) + len(waiting))
        adapter = self._best_adapter(view, counts, size)
        if adapter is None:
            for request in waiting:
                request.credit = now - request.arrival
            return BatchPlan(
                Mode.UNMERGED, None, view.running, waiting, "no adapter has most of the requests"
            )
        # Credit: seconds of waiting, plus the step, plus the switch before it.
        extra = self._step_time(view) + self.cost.switch(view.merged, adapter)
        others = [r for r in view.running if r.adapter != adapter]
        kept_back: float = FOREVER
        starving = len(others)
        theta = self.settings.theta
        for request in waiting:
            request.credit = credit = now - request.arrival + extra
            if request.adapter != adapter:
                if credit > theta or request.id in urgent:
                    starving += 1
                else:
                    kept_back = min(kept_back, request.arrival)
        share = counts[adapter] / size
        if starving > size * 0.5:
            reason = f"starving: {starving} of the {size} in the queue"
            return BatchPlan(Mode.UNMERGED, None, view.running, waiting, reason)
        if starving and not self._mixture_pays(view, waiting, adapter):
            reason = f"others that must not wait: {starving}; mixture mode would cost more"
            return BatchPlan(Mode.UNMERGED, None, view.running, waiting, reason)
        if starving:
            return BatchPlan(
                Mode.MIXTURE,
                adapter,
                view.running,
                waiting,
                f"{share:.0%} of the requests use it; others that must not wait: {starving}",
            )
        return BatchPlan(
            Mode.MERGED,
            adapter,
            with_adapter(view.running, adapter),
            with_adapter(waiting, adapter),
            f"{share:.0%} of the requests use it; no other starves",
            until=kept_back + theta - extra,
        )

    def _best_adapter(self, view: View, counts: Counter[str | None], size: int) -> str | None:
        """Return the adapter to merge, None to leave the weights pristine."""
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
        return best if self._merge_pays(view, best, count) else None

    def _merge_pays(self, view: View, adapter: str | None, count: int) -> bool:
        """Return whether the remaining steps of an adapter save more than the merge costs."""
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
        """Return whether the next steps, with the switch, cost less in mixture mode.

        A row of another adapter has two LoRA terms in mixture mode, so unmerged mode may cost less
        where the kernels compute many adapters efficiently.
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
