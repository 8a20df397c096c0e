"""VaLoRA's scheduling policy (Algorithm 1, §4.4.3)."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain, islice

from valora_serve.orchestrator.base import BasePolicy, can_merge, with_adapter
from valora_serve.orchestrator.batching import FOREVER, LOOK_AHEAD, BatchPlan
from valora_serve.orchestrator.cost_model import StepShape, step_shape
from valora_serve.orchestrator.decision import RequestView, View
from valora_serve.types import Mode


class ValoraPolicy(BasePolicy):
    """VaLoRA's Algorithm 1; docs/explanation/orchestrator.md has the rules of its open cases.

    Ties go to the merged adapter, then to the adapter's name.
    """

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
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
        """Plan a step by Algorithm 1; `urgent` are the ids of those that must not wait."""
        now, theta = view.now, self.settings.theta
        counts = Counter([r.adapter for r in chain(view.running, waiting)])
        size = min(view.limits.max_requests, len(view.running) + len(waiting))

        def unmerged(reason: str) -> BatchPlan:
            return BatchPlan(Mode.UNMERGED, None, view.running, waiting, reason)

        adapter = self._best_adapter(view, counts, size)
        if adapter is None:
            for request in waiting:
                request.credit = now - request.arrival
            return unmerged("no adapter has most of the requests")
        # Credit: seconds of waiting, plus the step, plus the switch before it.
        extra = self.decode_seconds(len(view.running)) + self.cost.switch(view.merged, adapter)
        kept_back: float = FOREVER
        starving = sum(r.adapter != adapter for r in view.running)
        for request in waiting:
            request.credit = credit = now - request.arrival + extra
            if request.adapter != adapter:
                if credit > theta or request.id in urgent:
                    starving += 1
                else:
                    kept_back = min(kept_back, request.arrival)
        share = f"{counts[adapter] / size:.0%} of the requests use it"
        if starving > size * 0.5:
            return unmerged(f"starving: {starving} of the {size} in the queue")
        if starving and not self._mixture_pays(view, waiting, adapter):
            return unmerged(f"others that must not wait: {starving}; mixture mode would cost more")
        if starving:
            reason = f"{share}; others that must not wait: {starving}"
            return BatchPlan(Mode.MIXTURE, adapter, view.running, waiting, reason)
        return BatchPlan(
            Mode.MERGED,
            adapter,
            with_adapter(view.running, adapter),
            with_adapter(waiting, adapter),
            f"{share}; no other starves",
            until=kept_back + theta - extra,
        )

    def _best_adapter(self, view: View, counts: Counter[str | None], size: int) -> str | None:
        able = [(n, a == view.merged, a) for a, n in counts.items() if can_merge(view, a)]
        if not able:
            return None
        count, _, best = max(able)
        slack = self.settings.hysteresis * size
        current = view.merged
        if (
            current is not None
            and current != best
            and counts[current] > max(0, size / 2 - slack)
            and count <= counts[current] + slack
        ):
            return current
        if best == current:
            return best if count > size / 2 - slack else None
        if count <= size / 2 or (current is not None and count <= size / 2 + slack):
            return None
        return best if self._merge_pays(view, best, count) else None

    def _merge_pays(self, view: View, adapter: str | None, count: int) -> bool:
        rank, steps = 0, 0
        for request in (*view.running[:LOOK_AHEAD], *view.waiting[:LOOK_AHEAD]):
            if request.adapter == adapter:
                rank = request.rank
                steps = max(steps, request.output_left, 1)
        plain = StepShape(decode=count)
        own = StepShape(decode=count, terms=count, work=count * rank, ranks=rank)
        saved = steps * (self.cost.step(own) - self.cost.step(plain))
        return saved > self.cost.switch(view.merged, adapter, rank)

    def _mixture_pays(self, view: View, waiting: Sequence[RequestView], adapter: str) -> bool:
        """Return whether the next steps, with the switch, cost less in mixture mode."""
        limits = view.limits
        limit = min(limits.max_requests, LOOK_AHEAD)
        requests = list(islice(chain(view.running, waiting), limit))
        own = [r for r in requests if r.adapter == adapter]
        named = [r for r in requests if r.adapter not in (None, adapter)]
        prompts = [(r, min(r.prompt_left, limits.chunk)) for r in requests if r.prompt_left]
        steps = max((r.output_left for r in requests), default=0)
        rank = (own[-1].rank if own else 0) or 64
        ranks = {str(r.adapter): r.rank for r in named}
        rows, others = len(requests), len(requests) - len(own)
        work, total = sum(r.rank for r in named), sum(ranks.values()) + rank
        mixture = StepShape(
            Mode.MIXTURE, rows, terms=len(named) + others, work=work + others * rank, ranks=total
        )
        unmerged = StepShape(
            decode=rows, terms=len(named) + len(own), work=work + len(own) * rank, ranks=total
        )
        gain = steps * (self.cost.step(unmerged) - self.cost.step(mixture))
        if prompts:
            ranks[adapter] = rank
            gain += self.cost.step(step_shape(Mode.UNMERGED, None, prompts, ranks))
            gain -= self.cost.step(step_shape(Mode.MIXTURE, adapter, prompts, ranks))
        switches = self.cost.switch(view.merged, adapter, rank)
        return gain > switches - self.cost.switch(view.merged, None)
