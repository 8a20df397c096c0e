"""Policies to compare with: simple ones, VaLoRA's Algorithm 1 in two readings, and dLoRA."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import ClassVar

from valora_serve.orchestrator.base import BasePolicy, can_merge, with_adapter
from valora_serve.orchestrator.batching import FOREVER, LOOK_AHEAD, BatchPlan, by_age, waiting_since
from valora_serve.orchestrator.cost_model import CostModel, StepShape
from valora_serve.orchestrator.decision import PolicySettings, RequestView, View
from valora_serve.types import Mode


class UnmergeOnlyPolicy(BasePolicy):
    """Always unmerged, first come, first served; requests that do not fit are skipped."""

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.UNMERGED})
    strict = False

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        return BatchPlan(
            Mode.UNMERGED, None, view.running, waiting, "always unmerged", strict=self.strict
        )


class SLoraPolicy(UnmergeOnlyPolicy):
    """As S-LoRA (§4): a request that does not fit blocks those behind it."""

    strict = True


class MergeOnlyPolicy(BasePolicy):
    """One adapter at a time: that of the oldest request, with all requests of this adapter."""

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.MERGED, Mode.UNMERGED})
    shares: ClassVar[bool] = False

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        candidates = [
            r for r in (*view.running, *islice(waiting, LOOK_AHEAD))
            if r.adapter is None or r.adapter in view.resident
        ]  # fmt: skip
        if not candidates:
            return BatchPlan(view.mode, view.merged, (), (), "adapters are being loaded")
        oldest = min(candidates, key=by_age)
        merged = oldest.adapter if can_merge(view, oldest.adapter) else None
        return BatchPlan(
            Mode.UNMERGED if merged is None else Mode.MERGED,
            merged,
            with_adapter(view.running, oldest.adapter),
            with_adapter(waiting, oldest.adapter),
            f"request {oldest.id} is the oldest",
        )


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


class DLoraPolicy(BasePolicy):
    """dLoRA's credit-based batching, as in its published code (OSDI 2024, §4.2).

    The policy stays merged while enough of the first-come batch, which is what runs and what would
    be admitted next, uses the merged adapter. All other requests are paused meanwhile, practically
    without bound: the credit of a paused adapter grows by less than 1 per step, and the adapter
    takes precedence only at `CREDIT`. The thresholds adapt by additive decrease and multiplicative
    increase.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.MERGED, Mode.UNMERGED})
    shares: ClassVar[bool] = False
    CREDIT = 10_000.0
    ADD, MULTIPLY = 0.05, 1.1

    def __init__(self, cost_model: CostModel, settings: PolicySettings) -> None:
        super().__init__(cost_model, settings)
        batch = StepShape(decode=32, kv_tokens=32 * 400)
        self._merged_time = cost_model.step(batch)
        unmerged = replace(batch, terms=32, work=32 * 64, ranks=512)
        self._unmerged_time = cost_model.step(unmerged)
        self._speed = self._merged_time / self._unmerged_time
        self._enter, self._leave = 1.0, self._speed
        self._credit: defaultdict[str | None, float] = defaultdict(float)
        self._steps = self._virtual = 0
        self._merged_rows = self._all_rows = 0
        self._was_merged = False
        self._popular: str | None = None

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        limit = view.limits.max_requests
        first_come = [*view.running, *islice(waiting, max(0, limit - len(view.running)))]
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
            reason = f"no adapter has {self._enter:.0%} of the requests"
            return BatchPlan(Mode.UNMERGED, None, view.running, ordered, reason)
        paused = Counter([r.adapter for r in first_come if r.adapter != adapter])
        unit = 0.5 / (self._speed * limit)
        for other, count in paused.items():
            self._credit[other] += unit * count
            self._credit[adapter] -= unit * count
        return BatchPlan(
            Mode.MERGED,
            adapter,
            with_adapter(view.running, adapter),
            with_adapter(waiting, adapter),
            f"requests that use it: {counts[adapter]} of {len(first_come)}; "
            f"paused: {paused.total()}",
            until=FOREVER if not paused else 0.0,
        )

    def _adapt(self, view: View) -> None:
        """Move the thresholds towards the mode with the higher estimated throughput."""
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
