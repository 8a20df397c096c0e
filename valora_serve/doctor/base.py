"""What checks are given and what they yield."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from valora_data.contract.files import expanded
from valora_serve.engine.settings import EngineSettings


class Level(Enum):
    """How a finding counts."""

    FINE = "✓"
    NOTE = "–"
    """Something optional is missing."""
    WRONG = "✗"
    """Nothing works, or not as it should."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        level: How it counts.
        what: What was looked at, e.g. ``Python``.
        found: What was found, and what it costs.
        remedy: How to mend it; empty if there is nothing to mend.
    """

    level: Level
    what: str
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that holds memory of a GPU.

    Attributes:
        pid: Its id.
        bytes: Bytes that it holds; None if the driver does not say.
    """

    pid: int
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU that PyTorch can use.

    Attributes:
        name: Its name.
        capability: Its compute capability.
        total: Bytes of its memory.
        free: Bytes of its memory that are free.
        processes: Other processes on it.
        problem: Why it cannot be used; empty if it can.
    """

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    processes: tuple[Process, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the GPUs and the libraries for them.

    Attributes:
        torch: Version of PyTorch; None if it cannot be imported.
        problem: Why PyTorch cannot be imported, or finds no GPU; empty if it does not say.
        cuda: Version of CUDA that PyTorch is built for; None if it is built for the CPU.
        driver: Version of the NVIDIA driver; None if there is none.
        gpus: The GPUs.
        architectures: Those that PyTorch has code for, as it names them, e.g. ``sm_90``; empty if
            that is not known.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
        compiler: Whether there is a C compiler.
        missing: Tools that FlashInfer compiles its kernels with, and that are not found.
    """

    torch: str | None
    problem: str = ""
    cuda: str | None = None
    driver: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    architectures: tuple[str, ...] = ()
    visible: str | None = None
    compiler: bool = True
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Patient:
    """What is to be served, and where.

    Attributes:
        base: Base model: ``tiny``, a folder or a hub name.
        tensor_parallel: GPUs that share it.
        facts: Reads what is known of the GPUs; called only by checks that need it.
    """

    base: str
    tensor_parallel: int
    facts: Callable[[], Facts]


def server_settings() -> EngineSettings:
    """Return the settings of a server that is started here, with the folders of its variables."""
    return EngineSettings(
        cost_folder=_folder("VALORA_COST_FOLDER"), tiling_folder=_folder("VALORA_TILING_FOLDER")
    )


def _folder(variable: str) -> str | None:
    path = os.environ.get(variable)
    return str(expanded(path)) if path else None


Check = Callable[[Patient], Iterator[Finding]]
