"""VaLoRA's Algorithm 1 as the scheduler that its authors published computes it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from valora_serve.orchestrator.base import BasePolicy, can_merge
from valora_serve.orchestrator.batching import BatchPlan
from valora_serve.types import Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_serve.orchestrator.decision import RequestView, View


class Algorithm1PublishedPolicy(BasePolicy):
    """`ReqQueue.ours_schedule` of mi150/VaLoRA; docs/explanation/orchestrator.md compares it.

    The mode follows from the waiting requests alone, whenever some may join; running ones go on. A
    credit is the time of waiting. The threshold, 1,000 s there, is the setting `theta`.
    """

    shares: ClassVar[bool] = False

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        """Plan a step."""
        most = view.limits.max_requests
        if not waiting or len(view.running) >= most:
            mode = Mode.UNMERGED if view.merged is None else Mode.MIXTURE
            return BatchPlan(mode, view.merged, view.running, (), "no request joins", until=0.0)
        for request in waiting:
            request.credit = view.now - request.arrival
        starving = {r.id for r in waiting if r.credit > self.settings.theta}
        size = min(most, len(waiting))
        counts = Counter(r.adapter for r in waiting if can_merge(view, r.adapter))
        best, count = counts.most_common(1)[0] if counts else (None, 0)
        note = f"waiting and starving: {len(starving)}; of one adapter: {count} of {size}"
        if best is None or count / size <= 0.5 or len(starving) / size > 0.5:
            return BatchPlan(Mode.UNMERGED, None, view.running, waiting, note, until=0.0)
        joining = [r for r in waiting if r.id in starving or r.adapter == best]
        return BatchPlan(Mode.MIXTURE, best, view.running, joining, note, until=0.0)
