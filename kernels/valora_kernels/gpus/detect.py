"""The record of the GPU that a torch device is."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from valora_kernels.gpus.base import Gpu
from valora_kernels.gpus.nvidia_h200 import gpu as measured
from valora_kernels.gpus.registry import recorded

log = logging.getLogger(__name__)

COMPILER_MEMORY = 11 << 10
"""Bytes of shared memory a program that are left to the compiler."""


def generic_table(name: str) -> Path:
    """Return the file of the tiling table of a GPU without a record; `valora-tile` writes it."""
    return Path(__file__).with_name(name.lower().replace(" ", "_") + ".json")


def generic(name: str, *, processors: int, shared_memory: int, capability: tuple[int, int]) -> Gpu:
    """The record of a GPU that nobody measured: its own hardware, with the H200's thresholds.

    Our own base products need tiles that only the shared memory of data-centre GPUs of compute
    capability 9 and 10 holds; other GPUs leave base products to the library. Tilings come from the
    table that `valora-tile` writes on such a GPU, and from rules as long as there is none.
    """
    large = capability[0] in (9, 10)
    return replace(
        measured,
        name=name,
        patterns=(),
        processors=processors,
        shared_memory=shared_memory,
        capability=capability,
        table=generic_table(name),
        projections=measured.projections if large else (),
        products=measured.products if large else (),
    )


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The record of a device, resolved once.

    A GPU without a record gets one read from the driver, which is logged. The record of a CPU,
    named `cpu`, is for Triton's interpreter.
    """
    if device.type != "cuda":
        return recorded(device.type) or generic(
            device.type, processors=3, shared_memory=measured.shared_memory, capability=(0, 0)
        )
    name = torch.cuda.get_device_name(device)
    found = recorded(name)
    if found is None:
        properties = torch.cuda.get_device_properties(device)
        found = generic(
            name,
            processors=properties.multi_processor_count,
            shared_memory=properties.shared_memory_per_block_optin - COMPILER_MEMORY,
            capability=(properties.major, properties.minor),
        )
        log.warning(
            "%s has no record: %d processors and %d KB of shared memory are read from the driver, "
            "all thresholds are those of the %s; register a record in the entry-point group %s",
            name, found.processors, found.shared_memory >> 10, measured.name, "valora.gpus",
        )  # fmt: skip
    return found
