"""How other systems compute LoRA, to compare with ATMM in the engine; importing it registers them.

- `static`: ATMM's kernels with one tiling for all calls (Punica's SGMV, S-LoRA's MBGMV).
- `bgmv`: every row gathers its own matrices (Punica's BGMV).
- `padded`: rows and ranks padded to one size, and batched products (torch.bmm).
- `einsum`: every row through every adapter of the batch, masked (dLoRA).
"""

from valora_kernels.operators import OPERATORS

for _name in ("static", "bgmv", "padded", "einsum"):
    OPERATORS[_name] = f"{__name__}.{_name}:{_name.capitalize()}"
