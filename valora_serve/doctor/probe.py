"""Reads what PyTorch, the driver and its management library say of the GPUs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from valora_data.wording import first_line
from valora_serve.doctor.base import Facts, GpuFacts, Process
from valora_serve.toolkit import missing_tools

DRIVER = Path("/proc/driver/nvidia/version")


@cache
def read_facts() -> Facts:
    """Read what is known of the GPUs, once."""
    compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    missing, visible = tuple(missing_tools()), os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = _driver()
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation fails in many ways
        return Facts(None, first_line(error), driver=driver, compiler=compiler, missing=missing)
    gpus: list[GpuFacts] = []
    problem, architectures = "", list[str]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                gpus = [_gpu(torch, number) for number in range(torch.cuda.device_count())]
                architectures = torch.cuda.get_arch_list()
        except Exception as error:  # noqa: BLE001 - torch's are of many kinds, and it is said
            problem = first_line(error)
    if not gpus and not problem and said:
        problem = str(said[0].message).splitlines()[0]
    return Facts(
        str(torch.__version__), problem, torch.version.cuda, driver, tuple(gpus),
        tuple(architectures), visible, compiler, missing,
    )  # fmt: skip


def _gpu(torch: Any, number: int) -> GpuFacts:
    facts = torch.cuda.get_device_properties(number)
    name, capability = str(facts.name), (facts.major, facts.minor)
    others = _processes(str(facts.uuid))
    try:
        free, total = torch.cuda.mem_get_info(number)
    except Exception as error:  # noqa: BLE001 - it is full, or another process has it for itself
        return GpuFacts(name, capability, facts.total_memory, 0, others, first_line(error))
    return GpuFacts(name, capability, total, free, others)


def _processes(uuid: str) -> tuple[Process, ...]:
    """Return the other processes on a GPU; none if nvidia-ml-py is not installed."""
    found = []
    with contextlib.suppress(Exception):  # whatever it is, the free memory is known all the same
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid[:4] == "GPU-" else f"GPU-{uuid}")
            for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if one.pid != os.getpid():
                    found.append(Process(one.pid, one.usedGpuMemory))
        finally:
            pynvml.nvmlShutdown()
    return tuple(found)


def _driver() -> str | None:
    """Return the version of the NVIDIA driver."""
    with contextlib.suppress(OSError):
        match = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", DRIVER.read_text())
        if match is not None:
            return match[1]
    return None
