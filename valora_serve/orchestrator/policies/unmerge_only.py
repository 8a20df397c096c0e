"""Unmerge-only: always unmerged, first come, first served."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from valora_serve.orchestrator.base import BasePolicy
from valora_serve.orchestrator.batching import BatchPlan
from valora_serve.types import Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_serve.orchestrator.decision import RequestView, View


class UnmergeOnlyPolicy(BasePolicy):
    """Always unmerged, first come, first served; requests that do not fit are skipped.

    Attributes:
        strict: Whether a request that does not fit blocks those behind it.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.UNMERGED})
    strict = False

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        """Plan a step with every request in unmerged mode."""
        return BatchPlan(
            Mode.UNMERGED, None, view.running, waiting, "always unmerged", strict=self.strict
        )
