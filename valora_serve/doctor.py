"""Command ``valora doctor``: checks this machine, and says what is missing and how to mend it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.errors import ValoraError

if TYPE_CHECKING:
    from collections.abc import Sequence

PYTHONS = ((3, 11), (3, 12))
"""Versions of Python that the package supports."""
LEAST_DISK = 2 << 30
"""Bytes below which a disk counts as full: a fusion of the tiny model writes about one GiB."""
EXTRAS = {
    "serve": ("fastapi", "uvicorn", "pydantic_settings", "httpx", "llguidance", "av"),
    "train": ("hydra", "peft", "mlflow", "datasets", "pycocotools", "supervision"),
    "yolo": ("ultralytics",),
}
"""Modules that tell whether an extra is installed, by its name."""


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
        found: What was found.
        remedy: How to mend it; empty if there is nothing to mend.
    """

    level: Level
    what: str
    found: str
    remedy: str = ""


Check = Callable[[], Iterator[Finding]]


def check_python() -> Iterator[Finding]:
    """The version of Python."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] in PYTHONS:
        yield Finding(Level.FINE, "Python", found)
    else:
        wanted = " or ".join(".".join(map(str, version)) for version in PYTHONS)
        yield Finding(Level.WRONG, "Python", found, f"install Python {wanted}")


def check_extras() -> Iterator[Finding]:
    """Which parts of the package are installed."""
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            text = f"not installed ({', '.join(missing)})"
            yield Finding(Level.NOTE, f"valora[{extra}]", text, f"pip install 'valora[{extra}]'")
        else:
            yield Finding(Level.FINE, f"valora[{extra}]", "installed")


def check_torch() -> Iterator[Finding]:
    """PyTorch, and the GPUs that it can use."""
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        yield Finding(Level.WRONG, "PyTorch", f"cannot be imported ({reason})", "pip install torch")
        return
    yield Finding(Level.FINE, "PyTorch", str(torch.__version__))
    if not torch.cuda.is_available():
        yield from _without_gpu(torch.version.cuda)
        return
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        memory = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        yield Finding(Level.FINE, f"GPU {number}", f"{facts.name}, {memory}")
        if (facts.major, facts.minor) < (8, 0):
            yield Finding(
                Level.NOTE, f"GPU {number}", "computes no bfloat16",
                "serve with --dtype float16, or use a GPU of compute capability 8.0 or higher",
            )  # fmt: skip


def _without_gpu(cuda: str | None) -> Iterator[Finding]:
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")
    if driver and cuda is None:
        remedy = "this PyTorch is built for the CPU: install one with CUDA"
        yield Finding(Level.WRONG, "GPU", "there is a driver, but PyTorch cannot use it", remedy)
    elif driver:
        remedy = f"the driver must support CUDA {cuda}: update it, or check CUDA_VISIBLE_DEVICES"
        yield Finding(Level.WRONG, "GPU", "there is a driver, but PyTorch finds no GPU", remedy)
    else:
        yield Finding(Level.NOTE, "GPU", "none: models are computed on the CPU, which suits tiny")


def check_kernels() -> Iterator[Finding]:
    """Triton, which the LoRA kernels are written in, and the attention libraries."""
    try:
        import torch
    except (ImportError, OSError):
        return
    gpu = torch.cuda.is_available()
    version = _version("triton")
    if version is not None:
        yield Finding(Level.FINE, "Triton", version)
    elif gpu:
        yield Finding(Level.WRONG, "Triton", "not installed", "pip install triton")
    if gpu and shutil.which("cc") is None and shutil.which("gcc") is None:
        remedy = "install gcc: Triton compiles the launchers of its kernels with it"
        yield Finding(Level.WRONG, "C compiler", "not found", remedy)
    if not gpu:
        yield Finding(Level.FINE, "attention", "torch, the backend for the CPU")
    elif (flash := _version("flashinfer-python")) is not None:
        yield Finding(Level.FINE, "attention", f"FlashInfer {flash}")
    else:
        remedy = "pip install flashinfer-python, the fastest backend for most GPUs"
        yield Finding(Level.NOTE, "attention", "FlashInfer is not installed", remedy)


def check_files() -> Iterator[Finding]:
    """The base model that ships with the package, and the bundles beside it."""
    from valora_data.contract.base_model import base_folder, base_hash

    try:
        found = f"{base_folder('tiny')} (sha256 {base_hash('tiny')[:12]})"
    except (ValoraError, OSError) as error:
        yield Finding(Level.WRONG, "base model", str(error), "install the package again")
    else:
        yield Finding(Level.FINE, "base model", found)
    bundles = Path("bundles")
    names = sorted(file.parent.name for file in bundles.glob("*/bundle.json"))
    if names:
        yield Finding(Level.FINE, "bundles", f"{', '.join(names)} in {bundles}/")
    else:
        remedy = "`valora fuse` makes one; `valora demo` serves the one in the package"
        yield Finding(Level.NOTE, "bundles", "none in this folder", remedy)


def check_machine() -> Iterator[Finding]:
    """Cores, memory and disk."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding(Level.FINE, "machine", f"{cores} CPU cores, {memory:.0f} GiB memory")
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / 2**30:.0f} GiB free in {Path.cwd()}"
    if free < LEAST_DISK:
        yield Finding(Level.WRONG, "disk", text, "make room, or work in another folder")
    else:
        yield Finding(Level.FINE, "disk", text)


CHECKS: dict[str, Check] = {
    "python": check_python,
    "machine": check_machine,
    "extras": check_extras,
    "torch": check_torch,
    "kernels": check_kernels,
    "files": check_files,
}
"""Checks by name, in their order; each yields what it finds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Returns:
        0; 1 if something is wrong.
    """
    parser = argparse.ArgumentParser("valora doctor", description=__doc__)
    parser.add_argument(
        "checks", nargs="*", metavar="CHECK", choices=[[], *CHECKS], default=[],
        help=f"one or more of {', '.join(CHECKS)}; all by default",
    )  # fmt: skip
    names = parser.parse_args(arguments).checks or list(CHECKS)
    wrong = 0
    for name in names:
        for finding in CHECKS[name]():
            wrong += finding.level is Level.WRONG
            remedy = f": {finding.remedy}" if finding.remedy else ""
            print(f"{finding.level.value} {finding.what:<13} {finding.found}{remedy}", flush=True)
    print("nothing is wrong" if not wrong else f"{wrong} of these must be mended")
    return 1 if wrong else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
