"""The runtime that serves bundles (VaLoRA §4.3, §4.4)."""
