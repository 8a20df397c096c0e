"""Matrix kernels for many LoRA adapters at once (VaLoRA §4.3)."""
