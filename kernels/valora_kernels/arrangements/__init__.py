"""The ways to arrange the LoRA operator's two steps, shrink h = scale · x Aᵀ and expand y += h Bᵀ.

- `base`: what an arrangement must say and do.
- `registry`: the arrangements there are.
- `shrink_expand`: a kernel for each step.
- `fused`: one kernel for both steps.
- `dense`: the library's products, for a batch of one adapter.
"""
