"""The adapter factory: teach, distill, fuse, export (VaLoRA §4.2)."""
