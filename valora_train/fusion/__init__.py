"""Knowledge fusion (VaLoRA §4.2.1): decisions, training, state on disk."""
