"""GPU kernels that apply many LoRA adapters to one batch (VaLoRA §4.3).

- `weights`: the adapters' matrices in device memory, whose rows address tables locate.
- `metadata`: which rows of a batch use which adapters, built once per batch.
- `atmm`: the LoRA operator, y += Σ coefficient · scaling · (x Aᵀ) Bᵀ, for such a batch.
- `project`: the base projection and the LoRA operator together.
- `merge`: merges one adapter into the weights of all layers, and unmerges it exactly.
- `reference`: the definition of all of these in plain torch.
- `launching`, `arrangements`: the ways to run the operator's kernels, and their sizes.
- `gpus`: the record of each GPU, with its tiling table.
- `tiling`, `lookup`, `search`, `tune`, `timing`: tile sizes, how they are chosen and measured.
"""
