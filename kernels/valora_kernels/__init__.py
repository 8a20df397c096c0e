"""Matrix kernels for many LoRA adapters at once (VaLoRA §4.3).

- `weights`: where adapters lie on the device, in a contiguous pool or in pages.
- `metadata`: which rows of a batch need which adapters, built once a batch.
- `atmm`: y += Σ coefficient · scaling · (x Aᵀ) Bᵀ for such a batch.
- `project`: the same together with the base projection.
- `merge`: one adapter into the weights of all layers, and out without a trace.
- `reference`: what all of it computes, in plain torch.
- `tiling`, `search`: which arrangement of the kernels for which shape, and how that is found.
"""
