"""VaLoRA's Algorithm 1 to the letter (§4.4.3), to compare `valora` and others with."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from valora_serve.orchestrator.base import BasePolicy, can_merge
from valora_serve.orchestrator.batching import BatchPlan, by_age, waiting_since
from valora_serve.orchestrator.cost_model import StepShape
from valora_serve.types import Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_serve.orchestrator.decision import RequestView, View


class Algorithm1Policy(BasePolicy):
    """Algorithm 1 as it is printed; docs/explanation/orchestrator.md compares its readings.

    R are all requests, the oldest first, running ones included: those that the batch leaves out
    pause. MaxBS is the most requests that may run at a time. A credit is the time since the request
    was last computed (or arrived), plus the step and the switch to the mode that the algorithm
    considers. What the listing does not say is settled as little as possible: an adapter that is
    not on the device cannot be merged yet, so l_i are those that are; the base model has no adapter
    to merge; if more requests starve than fit, the oldest go first. The step is one in unmerged
    mode, where §4.4.3 has one in the current mode: up to a few milliseconds less while merged.
    """

    shares: ClassVar[bool] = False

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        """Plan a step; comments are the lines of the listing."""
        most, theta = view.limits.max_requests, self.settings.theta
        everyone = sorted([*view.running, *waiting], key=by_age)
        counts = Counter([r.adapter for r in everyone if can_merge(view, r.adapter)])
        best, count = None, 0
        if counts:  # 4
            count, _, best = max((n, a == view.merged, a or "") for a, n in counts.items())
        rows = max(1, len(view.running))
        step = self.cost.step(StepShape(decode=rows, terms=rows, work=64 * rows, ranks=64))
        extra = step + self.cost.switch(view.merged, best)
        starving: list[RequestView] = []
        others: list[RequestView] = []
        for request in everyone:  # 2
            request.credit = view.now - waiting_since(request) + extra
            (starving if request.credit > theta else others).append(request)
        starving, room = starving[:most], max(0, most - len(starving))  # 3
        if best is not None and len(starving) / most <= 0.5 < count / most:  # 5
            own = [r for r in everyone if r.adapter == best]
            if not starving:  # 6 to 8
                return _plan(Mode.MERGED, best, own[:most], "no request starves")
            held = {r.id for r in starving}  # 10 to 12
            batch = starving + [r for r in own if r.id not in held][:room]
            return _plan(Mode.MIXTURE, best, batch, f"starving: {len(starving)}")
        note = f"starving: {len(starving)}; most popular adapter: {count} of {most}"  # 14, 15
        return _plan(Mode.UNMERGED, None, starving + others[:room], note)


def _plan(mode: Mode, merged: str | None, batch: Sequence[RequestView], reason: str) -> BatchPlan:
    running = [r for r in batch if r.running]
    joining = [r for r in batch if not r.running]
    return BatchPlan(mode, merged, running, joining, reason, until=0.0)  # credits always change
