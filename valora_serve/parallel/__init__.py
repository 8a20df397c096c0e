"""Tensor parallelism: how the processes of a group exchange tensors. Layers: `model/split.py`."""

SLORA, REPLICATE_A = LORA_PARALLEL = ("slora", "replicate_a")
"""How LoRA matrices are split over the GPUs.

`replicate_a` leaves the side whole by which the base layer is not split, and needs no communication
of its own. `slora` splits all, and sums x·Aᵀ (S-LoRA §6.1, but A of column layers by its inputs).
"""
