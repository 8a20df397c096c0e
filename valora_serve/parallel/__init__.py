"""Tensor parallelism: what each process of a group holds, and how they exchange tensors."""
