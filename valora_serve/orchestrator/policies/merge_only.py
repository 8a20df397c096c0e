"""Merge-only: one adapter at a time."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from valora_serve.orchestrator.base import BasePolicy, can_merge, with_adapter
from valora_serve.orchestrator.batching import LOOK_AHEAD, BatchPlan, by_age
from valora_serve.types import Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_serve.orchestrator.decision import RequestView, View


class MergeOnlyPolicy(BasePolicy):
    """One adapter at a time: that of the oldest request, with all requests of this adapter.

    Requests of the base model, and of an adapter that cannot be merged, run in unmerged mode.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.MERGED, Mode.UNMERGED})
    shares: ClassVar[bool] = False

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        """Plan a step for the adapter of the oldest request."""
        resident = view.resident
        candidates = [*view.running, *islice(waiting, LOOK_AHEAD)]
        candidates = [r for r in candidates if r.adapter is None or r.adapter in resident]
        if not candidates:
            return BatchPlan(view.mode, view.merged, (), (), "adapters are being loaded")
        oldest = min(candidates, key=by_age)
        adapter = oldest.adapter
        merged = adapter if can_merge(view, adapter) else None
        return BatchPlan(
            Mode.UNMERGED if merged is None else Mode.MERGED,
            merged,
            with_adapter(view.running, adapter),
            with_adapter(waiting, adapter),
            f"request {oldest.id} is the oldest",
        )
