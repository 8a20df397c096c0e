"""Bounds of what an adapter adds to a model, which prove that it is harmless to others.

An adapter adds x·ΔWᵀ with ΔW = scaling·B·A to the outputs of a linear. Norms of the rank rows bound
that for every input, without computing ΔW: for x of norm ‖x‖, the output o of the shrink's row j is
at most scaling·‖a_j‖·‖x‖, and the whole output at most scaling·Σ_j |b_oj|·‖a_j‖·‖x‖. Two questions
are answered once, when an adapter is loaded:

- Are its outputs finite for a typical input? Otherwise it is refused.
- Can it be merged? In mixture mode all other rows compute x·(W + ΔW)ᵀ − x·ΔWᵀ, whose rounding
  error grows with ‖ΔW‖/‖W‖. An adapter for which that is too much is served, but never merged.
"""

import math
from collections.abc import Mapping

import torch

from valora_serve.catalogue.adapters import Adapter
from valora_serve.errors import AdapterError

LARGEST_SQUARED = 2.0**63
"""Norms square activations in fp32: what is larger overflows there, also in wider types."""

LARGEST_SHARE, LARGEST_SHARE_16 = 64.0, 8.0
"""Largest ‖ΔW‖/‖W‖ of a row of a mergeable adapter, in fp32 and in 16 bits.

Trained adapters stay below 1. Merging one at the limit costs other rows 3 bits of 8 in bf16, and in
fp16 there is still room for activations of 8,000.
"""

HEADROOM = 2.0**12
"""Norm of other requests' inputs that the shrink of a mergeable adapter must stand, in fp16."""


def check_effect(
    adapter: Adapter, dtype: torch.dtype, row_norms: Mapping[str, float]
) -> str | None:
    """Return why an adapter must not be merged, None if it may be.

    Args:
        adapter: The adapter with its matrices.
        dtype: Data type that the model computes in.
        row_norms: Root mean square of the norms of the rows of W, by name of each linear that
            adapters are merged into; empty if none ever is.

    Raises:
        AdapterError: Its outputs overflow the data type for an input of root mean square 1.
    """
    limits, reason = torch.finfo(dtype), None
    largest = min(limits.max, LARGEST_SQUARED)
    most = LARGEST_SHARE if dtype == torch.float32 else LARGEST_SHARE_16
    for module, pair in adapter.modules.items():
        rows = torch.linalg.vector_norm(pair.a, dim=1, dtype=torch.float64)
        b, scaling = pair.b.abs().double(), abs(pair.scaling)
        shrink = float(rows.max())  # largest norm of a row of A
        expand = float((b @ rows).max())  # bounds the norm of a row of B·A
        products = math.sqrt(pair.a.shape[1]) * max(shrink, expand)  # of an input with that norm
        # Merging multiplies B·A first, in fp32. The comparisons are false for NaN, too.
        if not (max(scaling * products, scaling) <= largest and products <= LARGEST_SQUARED):
            raise AdapterError(
                f"adapter {adapter.folder}: lora_alpha or the weights of {module} are so large "
                f"that its outputs overflow {dtype}: train it again with a smaller learning rate"
            )
        if reason is not None or module not in row_norms:
            continue
        # The norm of a row of B·A if the rows of A are orthogonal: independent rounding errors add
        # up so.
        spread, norm = float((b.square() @ rows.square()).max().sqrt()), row_norms[module]
        share = scaling * spread / norm if norm else math.inf
        lost = limits.tiny * float(b.max()) * math.sqrt(len(pair.a))
        if spread and not share <= most:
            times = f"{share:.3g} times the base weights' size"
            reason = f"it changes {module} by {times}, more than {most:g}"
        elif scaling * shrink * HEADROOM > limits.max:
            reason = f"A of {module} is too large for other requests' inputs"
        # What a shrink loses below the smallest number is not taken back out of the weights.
        elif spread and lost > limits.eps * most * norm:
            reason = f"A of {module} is so small, and B so large, that the shrink underflows"
    return reason
