"""Baselines that never choose: unmerge-only, S-LoRA and merge-only."""

from collections.abc import Sequence
from itertools import islice
from typing import ClassVar

from valora_serve.orchestrator.base import BasePolicy, can_merge, with_adapter
from valora_serve.orchestrator.batching import LOOK_AHEAD, BatchPlan, by_age
from valora_serve.orchestrator.decision import RequestView, View
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
