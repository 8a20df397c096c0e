"""LoRA operators: ATMM, and the ways of other systems to compute the same, to compare it with.

- `base`: what an operator must do.
- `registry`: the operators there are.
- `atmm`: VaLoRA's, with tiles chosen for each call.
- `static`: the same kernels with one tiling for all calls (Punica's SGMV, S-LoRA's MBGMV).
- `bgmv`: every row gathers its own matrices (Punica's BGMV).
- `padded`: rows and ranks padded to one size, and batched products (torch.bmm).
- `einsum`: every row through every adapter of the batch, masked (dLoRA).
"""
