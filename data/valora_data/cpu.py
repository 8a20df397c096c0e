"""What the CPU has instructions for, and how many of its cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds its own limits."""


def usable_cores() -> int:
    """Number of cores that this process may use: its affinity, and its container's limit."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quota = _quota()
    return cores if quota is None else max(1, min(cores, round(quota)))


def _quota() -> float | None:
    """Cores whose time the container's control group may use; None without a limit."""
    try:
        if (CGROUP / "cpu.max").is_file():  # version 2
            most, period = (CGROUP / "cpu.max").read_text().split()
        else:
            most = (CGROUP / "cpu/cpu.cfs_quota_us").read_text()
            period = (CGROUP / "cpu/cpu.cfs_period_us").read_text()
        found = int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no control groups, or "max"
        return None
    return found if found > 0 else None  # version 1 says -1 for no limit


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 (AMX, or AVX-512 BF16)."""
    import torch

    # Older versions of torch do not tell.
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))
