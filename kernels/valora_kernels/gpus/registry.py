"""The records of GPUs: the built-in ones, and those that other packages register."""

from __future__ import annotations

from valora_kernels.gpus.base import Gpu
from valora_kernels.registry import Registry

GPUS: Registry[Gpu] = Registry(
    "valora.gpus",
    "GPU",
    {
        "nvidia_h100": "valora_kernels.gpus.nvidia_h100:gpu",
        "nvidia_h200": "valora_kernels.gpus.nvidia_h200:gpu",
    },
)


def recorded(device_name: str) -> Gpu | None:
    """The first record that describes the device, built-in ones first; None if there is none.

    Args:
        device_name: What `torch.cuda.get_device_name` says.
    """
    return next((gpu for gpu in GPUS.values() if gpu.describes(device_name)), None)
