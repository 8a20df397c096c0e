"""The adapter factory: teach, distill, fuse and export (VaLoRA §4.2)."""
