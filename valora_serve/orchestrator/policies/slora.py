"""S-LoRA: always unmerged, strictly first come, first served (S-LoRA §4)."""

from __future__ import annotations

from valora_serve.orchestrator.policies.unmerge_only import UnmergeOnlyPolicy


class SLoraPolicy(UnmergeOnlyPolicy):
    """As `UnmergeOnlyPolicy`, but a request that does not fit blocks those behind it.

    Adapter clustering and early abort are on if the settings `clusters` and `early_abort` say so.
    """

    strict = True
