"""What the CPU has instructions for, and how many of its cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")  # where a container finds its own limits


def usable_cores() -> int:
    """Number of cores that this process may use: its affinity, and its container's limit."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    try:
        most, period = map(int, (CGROUP / "cpu.max").read_text().split())
    except (OSError, ValueError):  # no control groups of version 2, or "max"
        return cores
    return max(1, min(cores, round(most / period)))


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 (AMX, or AVX-512 BF16)."""
    import torch

    # Older versions of torch do not tell.
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))
