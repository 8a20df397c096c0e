"""dLoRA's credit-based batching (OSDI 2024, §4.2)."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import ClassVar

from valora_serve.orchestrator.base import BasePolicy, can_merge, with_adapter
from valora_serve.orchestrator.batching import FOREVER, BatchPlan
from valora_serve.orchestrator.cost_model import CostModel, StepShape
from valora_serve.orchestrator.decision import PolicySettings, RequestView, View
from valora_serve.types import Mode


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
