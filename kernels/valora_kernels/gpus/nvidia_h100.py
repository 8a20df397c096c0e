"""NVIDIA H100 and other GPUs with the H200's chip and another memory. Nothing was measured on them.

The H100 PCIe has fewer processors: its record is read from the driver.
"""

from dataclasses import replace
from pathlib import Path

from valora_kernels.gpus.nvidia_h200 import gpu as h200

gpu = replace(
    h200,
    name="NVIDIA H100",
    patterns=(
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H800",
        "NVIDIA GH200*",
    ),
    table=Path(__file__).with_suffix(".json"),
    like=h200,
)
