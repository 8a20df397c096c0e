"""VaLoRA's operator: tiles chosen for each call (§4.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from valora_kernels.atmm import atmm
from valora_kernels.operators.base import LoraOperator, aligned
from valora_kernels.reference import atmm_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from valora_kernels.metadata import LoraBatch
    from valora_kernels.weights import LoraWeights


class Atmm(LoraOperator):
    """`atmm`; where widths do not fit the kernels, plain torch."""

    name: ClassVar[str] = "atmm"
    adaptive: ClassVar[bool] = True

    def add(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        weights: LoraWeights,
        batch: LoraBatch,
    ) -> None:
        """Add the LoRA terms of all rows."""
        (atmm if aligned(weights) else atmm_reference)(ys, x, weights, batch)
