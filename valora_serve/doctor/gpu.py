"""Checks of PyTorch, the GPUs, the libraries for them, and what was measured on them."""

from __future__ import annotations

import importlib.metadata
import math
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from valora_data.errors import ValoraError
from valora_data.wording import plural
from valora_serve.doctor.base import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from valora_serve.doctor.base import Facts, GpuFacts, Patient

LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""First driver of each major version of CUDA; newer minor versions of CUDA work with it."""
LIBRARIES = ("torch", "torchvision", "triton", "transformers", "flashinfer-python",
             "apache-tvm-ffi")  # fmt: skip
"""Packages whose versions are compared with what VaLoRA and PyTorch require."""
BFLOAT16 = (8, 0)
"""Least compute capability that computes bfloat16."""
BESIDE_WEIGHTS = 2 << 30
"""Bytes for activations, graphs and some pages beside the weights."""
GIB = 1 << 30


def check_torch(patient: Patient) -> Iterator[Finding]:
    """PyTorch, the driver, and the GPUs that it can use."""
    facts = patient.facts()
    if facts.torch is None:
        found = f"cannot be imported ({facts.problem})"
        yield Finding(Level.WRONG, "PyTorch", found, "pip install torch")
        return
    yield Finding(Level.FINE, "PyTorch", f"{facts.torch}, for {_built_for(facts)}")
    if facts.driver is not None:
        yield _driver(facts)
    if not facts.gpus:
        yield _no_gpu(facts)
        return
    weights = weight_bytes(patient.base)
    for number, gpu in enumerate(facts.gpus):
        what = f"GPU {number}"
        memory = f"{gpu.free / GIB:.0f} of {gpu.total / GIB:.0f} GiB free"
        yield Finding(Level.FINE, what, f"{gpu.name}, {memory}")
        if gpu.capability < BFLOAT16:
            yield Finding(
                Level.NOTE, what, "computes no bfloat16",
                "serve with --dtype float16, or use a GPU of compute capability 8.0 or higher",
            )  # fmt: skip
        yield from _memory(what, gpu, patient, weights)
    if patient.tensor_parallel > len(facts.gpus):
        found = f"{len(facts.gpus)} found, and --tensor-parallel {patient.tensor_parallel}"
        yield Finding(Level.WRONG, "GPUs", found, "name as many as there are")


def _built_for(facts: Facts) -> str:
    return "the CPU" if facts.cuda is None else f"CUDA {facts.cuda}"


def _driver(facts: Facts) -> Finding:
    """The driver, compared with the CUDA that PyTorch is built for."""
    driver = facts.driver or ""
    major = int((facts.cuda or "0").partition(".")[0])
    least = LEAST_DRIVER.get(major)
    if least is not None and int(driver.partition(".")[0]) < least:
        return Finding(
            Level.WRONG, "driver",
            f"{driver}, too old for the CUDA {facts.cuda} of this PyTorch: it finds no GPU",
            f"install driver {least} or newer, or a PyTorch for an older CUDA",
        )  # fmt: skip
    return Finding(Level.FINE, "driver", driver)


def _no_gpu(facts: Facts) -> Finding:
    if facts.driver is None:
        text = "none: models are computed on the CPU, which suits tiny"
        return Finding(Level.NOTE, "GPU", text)
    if facts.cuda is None:
        remedy = "this PyTorch is built for the CPU: install one with CUDA"
        return Finding(Level.WRONG, "GPU", "there is a driver, but PyTorch cannot use it", remedy)
    text = "there is a driver, but PyTorch finds no GPU"
    if facts.problem:
        text += f" ({facts.problem})"
    remedy = f"the driver must support CUDA {facts.cuda}: update it, or check CUDA_VISIBLE_DEVICES"
    return Finding(Level.WRONG, "GPU", text, remedy)


def _memory(what: str, gpu: GpuFacts, patient: Patient, weights: int | None) -> Iterator[Finding]:
    """Whether the base model fits, and who else is on the GPU."""
    others = [p for p in gpu.processes if p.bytes is None or p.bytes > 0]
    held = gpu.total - gpu.free
    if others:
        named = ", ".join(
            f"{p.pid} ({'?' if p.bytes is None else f'{p.bytes / GIB:.1f}'} GiB)" for p in others
        )
        text = f"{plural(len(others), 'other process|processes')} on it: {named}"
        remedy = "end them, or choose another GPU with CUDA_VISIBLE_DEVICES"
        yield Finding(Level.NOTE, what, f"{text}, which slow it down and take memory", remedy)
    if weights is None:
        return
    need = weights // patient.tensor_parallel + BESIDE_WEIGHTS
    text = f"{patient.base} needs {need / GIB:.1f} GiB of it in bfloat16"
    if gpu.total < need:
        share = max(2, math.ceil(weights / max(1, gpu.total - BESIDE_WEIGHTS)))
        remedy = f"use a smaller base model, a larger GPU, or {share} GPUs with --tensor-parallel"
        yield Finding(Level.WRONG, what, f"too small: {text}", remedy)
    elif gpu.free < need:
        text = f"{text}, and {held / GIB:.1f} GiB are taken"
        remedy = "end the process that holds them, or choose another GPU with CUDA_VISIBLE_DEVICES"
        yield Finding(Level.WRONG, what, text, remedy)
    elif gpu.free < need + weights // patient.tensor_parallel:
        text += "; policies that merge adapters keep a second copy, for which there is no room"
        remedy = "serve with --policy unmerge_only, or on a larger GPU"
        yield Finding(Level.NOTE, what, text, remedy)
    else:
        yield Finding(Level.FINE, what, text)


def weight_bytes(base: str) -> int | None:
    """Return the bytes of a base model's weights in 16 bits; None if they are not on this machine.

    Args:
        base: ``tiny``, or a folder.
    """
    from safetensors import SafetensorError, safe_open

    from valora_data.contract.base_model import base_folder

    try:
        folder = Path(base) if Path(base).is_dir() else Path(base_folder(base))
        count = 0
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    count += math.prod(opened.get_slice(name).get_shape())
    except (ValoraError, OSError, SafetensorError):
        return None
    return 2 * count or None


def check_kernels(patient: Patient) -> Iterator[Finding]:
    """Triton, which the LoRA kernels are written in, the attention library, and their versions."""
    facts = patient.facts()
    if facts.torch is None:
        return
    gpu = bool(facts.gpus)
    version = installed("triton")
    if version is not None:
        yield Finding(Level.FINE, "Triton", version)
    elif gpu:
        yield Finding(Level.WRONG, "Triton", "not installed", "pip install triton")
    if gpu and not facts.compiler:
        remedy = "install gcc: Triton compiles the launchers of its kernels with it"
        yield Finding(Level.WRONG, "C compiler", "not found", remedy)
    flash = installed("flashinfer-python")
    if not gpu:
        yield Finding(Level.FINE, "attention", "torch, the backend for the CPU")
    elif flash is None:
        yield Finding(
            Level.NOTE, "attention",
            "FlashInfer, with which all our figures were measured, is not installed; Triton "
            "kernels replace it",
            "pip install 'valora[gpu]'",
        )  # fmt: skip
    elif not facts.nvcc and installed("flashinfer-jit-cache") is None:
        remedy = "install the CUDA toolkit, or flashinfer-jit-cache of the same version"
        text = (
            f"not found: FlashInfer {flash} compiles its kernels with it; Triton kernels replace it"
        )
        yield Finding(Level.NOTE, "nvcc", text, remedy)
    else:
        yield Finding(Level.FINE, "attention", f"FlashInfer {flash}")
    yield from _versions()


def _versions() -> Iterator[Finding]:
    """Libraries of another version than VaLoRA, or PyTorch, requires."""
    for owner in ("valora", "torch"):
        for text in required_by(owner):
            wanted = Requirement(text)
            if wanted.name not in LIBRARIES or not _applies(wanted):
                continue
            version = installed(wanted.name)
            if version is None or _suits(wanted, version):
                continue
            yield Finding(
                Level.WRONG, wanted.name,
                f"{version}, but {owner} needs {wanted.name}{wanted.specifier}",
                f"pip install '{wanted.name}{wanted.specifier}'",
            )  # fmt: skip


def _applies(wanted: Requirement) -> bool:
    """Return whether a requirement, or one of the extra `gpu`, is meant for this machine."""
    marker = wanted.marker
    return marker is None or marker.evaluate({"extra": "gpu"}) or marker.evaluate({"extra": ""})


def _suits(wanted: Requirement, version: str) -> bool:
    try:
        return wanted.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def check_tuning(patient: Patient) -> Iterator[Finding]:
    """What was measured on these GPUs: tilings of the kernels, and costs of steps."""
    facts = patient.facts()
    if not facts.gpus:
        return
    from valora_serve.engine.settings import EngineSettings
    from valora_serve.engine.sizing import cost_folder
    from valora_serve.orchestrator.cost_model import cache_path

    for name, gpu in {gpu.name: gpu for gpu in facts.gpus}.items():
        yield _tilings(gpu, patient)
        machine = name if patient.tensor_parallel == 1 else f"{name} x{patient.tensor_parallel}"
        file = cache_path(cost_folder(EngineSettings()), machine, patient.base)
        if file.exists():
            yield Finding(Level.FINE, "costs", f"measured for {patient.base} on {machine}")
        else:
            text = f"not measured for {patient.base} on {machine}"
            remedy = "the first start measures them, which takes some seconds more"
            yield Finding(Level.NOTE, "costs", text, remedy)


def _tilings(gpu: GpuFacts, patient: Patient) -> Finding:
    """Where the tilings of the LoRA kernels come from."""
    from valora_kernels.gpus import detect
    from valora_kernels.gpus.registry import recorded
    from valora_kernels.lookup import is_measured
    from valora_serve.engine.settings import EngineSettings
    from valora_serve.engine.sizing import tiling_file
    from valora_serve.engine.tuning import read_table

    name = gpu.name
    known = recorded(name) or detect.generic(
        name, processors=1, shared_memory=0, capability=gpu.capability
    )
    if is_measured(known):
        return Finding(Level.FINE, "tilings", f"measured for {name}")
    by_hand = "`valora-tile --model 7b` on it measures them"
    how = "rules choose them, and the LoRA kernels are slower"
    if known.like is not None:
        how = f"those of the {known.like.name}, which has the same chip, are used"
    if patient.tensor_parallel > 1:
        text = f"none for {name}: {how}"
        return Finding(Level.NOTE, "tilings", text, by_hand)
    file = tiling_file(EngineSettings(), known.name)
    if count := len(read_table(file, known).entries):
        text = f"{plural(count, 'shape')} measured for {name} while a server was idle, in {file}"
        return Finding(Level.FINE, "tilings", text)
    text = f"none for {name} yet: {how}"
    remedy = f"the server measures them while it is idle; {by_hand} with more candidates"
    return Finding(Level.NOTE, "tilings", text, remedy)


def installed(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def required_by(package: str) -> list[str]:
    """Return the requirements of an installed package."""
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
