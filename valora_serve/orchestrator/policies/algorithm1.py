"""VaLoRA's Algorithm 1 (§4.4.3), as printed and as its authors' scheduler computes it."""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from valora_serve.orchestrator.base import BasePolicy, can_merge
from valora_serve.orchestrator.batching import BatchPlan, by_age, waiting_since
from valora_serve.orchestrator.decision import RequestView, View
from valora_serve.types import Mode


class Algorithm1Policy(BasePolicy):
    """Algorithm 1 to the letter; docs/explanation/orchestrator.md compares its readings.

    R are all requests, the oldest first, running ones included; MaxBS is the most that may run.
    """

    shares: ClassVar[bool] = False

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:  # by its lines
        limit, theta = view.limits.max_requests, self.settings.theta
        everyone = sorted([*view.running, *waiting], key=by_age)
        counts = Counter([r.adapter for r in everyone if can_merge(view, r.adapter)])
        best, count = None, 0
        if counts:  # 4
            count, _, best = max((n, a == view.merged, a or "") for a, n in counts.items())
        extra = self.decode_seconds(max(1, len(view.running)))
        extra += self.cost.switch(view.merged, best)
        for request in everyone:  # 2
            request.credit = view.now - waiting_since(request) + extra
        starving = [r for r in everyone if r.credit > theta][:limit]  # 3
        others = [r for r in everyone if not r.credit > theta]
        room = limit - len(starving)
        if best is not None and len(starving) / limit <= 0.5 < count / limit:  # 5
            own = [r for r in everyone if r.adapter == best]
            if not starving:  # 6 to 8
                return _plan(Mode.MERGED, best, own[:limit], "no request starves")
            held = {r.id for r in starving}  # 10 to 12
            batch = starving + [r for r in own if r.id not in held][:room]
            return _plan(Mode.MIXTURE, best, batch, f"starving: {len(starving)}")
        note = f"starving: {len(starving)}; most popular adapter: {count} of {limit}"  # 14, 15
        return _plan(Mode.UNMERGED, None, starving + others[:room], note)


def _plan(mode: Mode, merged: str | None, batch: Sequence[RequestView], reason: str) -> BatchPlan:
    running = [r for r in batch if r.running]
    joining = [r for r in batch if not r.running]
    return BatchPlan(mode, merged, running, joining, reason, until=0.0)  # credits always change


class Algorithm1PublishedPolicy(BasePolicy):
    """`ReqQueue.ours_schedule` of mi150/VaLoRA.

    The mode follows from the waiting requests alone, whenever some may join; running ones go on. A
    credit is the time of waiting. The threshold, 1,000 s there, is the setting `theta`.
    """

    shares: ClassVar[bool] = False

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        limit = view.limits.max_requests
        if not waiting or len(view.running) >= limit:
            mode = Mode.UNMERGED if view.merged is None else Mode.MIXTURE
            return BatchPlan(mode, view.merged, view.running, (), "no request joins", until=0.0)
        for request in waiting:
            request.credit = view.now - request.arrival
        starving = {r.id for r in waiting if r.credit > self.settings.theta}
        size = min(limit, len(waiting))
        counts = Counter(r.adapter for r in waiting if can_merge(view, r.adapter))
        best, count = counts.most_common(1)[0] if counts else (None, 0)
        note = f"waiting and starving: {len(starving)}; of one adapter: {count} of {size}"
        if best is None or count / size <= 0.5 or len(starving) / size > 0.5:
            return BatchPlan(Mode.UNMERGED, None, view.running, waiting, note, until=0.0)
        joining = [r for r in waiting if r.id in starving or r.adapter == best]
        return BatchPlan(Mode.MIXTURE, best, view.running, joining, note, until=0.0)
