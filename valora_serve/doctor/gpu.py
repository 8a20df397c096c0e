"""Checks of PyTorch, the GPUs, the libraries for them, and what was measured on them."""

from __future__ import annotations

import importlib.metadata
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from valora_data.wording import plural
from valora_serve.doctor.base import Finding, Level, server_settings
from valora_serve.doctor.sizes import read_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from valora_serve.doctor.base import Facts, GpuFacts, Patient
    from valora_serve.doctor.sizes import Sizes

LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""First driver of each major version of CUDA; newer minor versions of CUDA work with it."""
LIBRARIES = ("torch", "torchvision", "triton", "transformers", "flashinfer-python",
             "apache-tvm-ffi")  # fmt: skip
"""Packages whose versions are compared with what VaLoRA and PyTorch require."""
BFLOAT16 = (8, 0)
"""Least compute capability that computes bfloat16."""
COMPANIONS = ("flashinfer-jit-cache", "flashinfer-cubin")
"""Packages that FlashInfer takes kernels from, and refuses if they are of another version."""
PACKAGES = {
    "nvcc": "the CUDA toolkit (nvcc; {jit_cache} brings what it compiles)",
    "ninja": "ninja (pip install ninja)",
}
"""What brings the tools that FlashInfer compiles its kernels with; g++ all others."""
GIB = 1 << 30


def check_torch(patient: Patient) -> Iterator[Finding]:
    """PyTorch, the driver, and the GPUs that it can use."""
    facts = patient.facts()
    if facts.torch is None:
        found = f"cannot be imported ({facts.problem})"
        again = "--force-reinstall " if installed("torch") else ""
        yield Finding(Level.WRONG, "PyTorch", found, f"pip install {again}torch")
        return
    yield Finding(Level.FINE, "PyTorch", f"{facts.torch}, for {_built_for(facts)}")
    if facts.driver is not None:
        yield _driver(facts)
    if not facts.gpus:
        yield _no_gpu(facts)
        return
    sizes = read_sizes(patient.base)
    for number, gpu in enumerate(facts.gpus):
        for finding in _gpu(f"GPU {number}", gpu, patient, sizes, facts.architectures):
            used = number < patient.tensor_parallel or finding.level is not Level.WRONG
            yield finding if used else replace(finding, level=Level.NOTE)
    if patient.tensor_parallel > len(facts.gpus):
        found = f"{len(facts.gpus)} found, and --tensor-parallel {patient.tensor_parallel}"
        yield Finding(Level.WRONG, "GPUs", found, "name as many as there are")


def _gpu(
    what: str, gpu: GpuFacts, patient: Patient, sizes: Sizes | None, architectures: tuple[str, ...]
) -> Iterator[Finding]:
    """Whether a GPU can be used at all, and for the base model."""
    if gpu.problem:
        yield Finding(
            Level.WRONG, what, f"{gpu.name} cannot be used ({gpu.problem})",
            "end the processes that use it, or choose another GPU with CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    else:
        memory = f"{gpu.free / GIB:.0f} of {gpu.total / GIB:.0f} GiB free"
        yield Finding(Level.FINE, what, f"{gpu.name}, {memory}")
    if not _has_code(architectures, gpu.capability):
        yield Finding(
            Level.WRONG, what,
            f"this PyTorch has no code for compute capability {'.'.join(map(str, gpu.capability))}"
            f" (it has {', '.join(architectures)})",
            "install a PyTorch that has, or use another GPU",
        )  # fmt: skip
    elif gpu.capability < BFLOAT16:
        yield Finding(
            Level.NOTE, what, "computes no bfloat16",
            "serve with --dtype float16, or use a GPU of compute capability 8.0 or higher",
        )  # fmt: skip
    yield from _memory(what, gpu, patient, sizes)


def _has_code(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code for one of these runs on a GPU: of its major version, or as PTX."""
    found = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name) for name in architectures]
    known = [(one[1], (int(one[2]), int(one[3]))) for one in found if one is not None]
    return not known or any(
        of <= capability and (kind == "compute" or of[0] == capability[0]) for kind, of in known
    )


def _built_for(facts: Facts) -> str:
    return "the CPU" if facts.cuda is None else f"CUDA {facts.cuda}"


def _driver(facts: Facts) -> Finding:
    """The driver, compared with the CUDA that PyTorch is built for."""
    driver, least = facts.driver or "", _least_driver(facts)
    # With CUDA's package for forward compatibility, older ones find GPUs, too.
    if least is not None and _is_older(driver, least) and not facts.gpus:
        return Finding(
            Level.WRONG, "driver",
            f"{driver}, too old for the CUDA {facts.cuda} of this PyTorch: it finds no GPU",
            f"install driver {least} or newer, or a PyTorch for an older CUDA",
        )  # fmt: skip
    return Finding(Level.FINE, "driver", driver)


def _least_driver(facts: Facts) -> int | None:
    return LEAST_DRIVER.get(int((facts.cuda or "0").partition(".")[0]))


def _is_older(driver: str, least: int) -> bool:
    return int(driver.partition(".")[0]) < least


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
    least = _least_driver(facts)
    if least is not None and _is_older(facts.driver, least):
        remedy = f"the driver must support CUDA {facts.cuda}: update it"
    elif facts.visible is not None:
        remedy = f"CUDA_VISIBLE_DEVICES is {facts.visible!r}: name GPUs that there are, or unset it"
    else:
        remedy = (
            "see whether `nvidia-smi` lists one, start the container with --gpus all, or restart "
            "the machine if the driver was updated"
        )
    return Finding(Level.WRONG, "GPU", text, remedy)


def _memory(what: str, gpu: GpuFacts, patient: Patient, sizes: Sizes | None) -> Iterator[Finding]:
    """Whether the engine starts with the base model, and who else is on the GPU."""
    from valora_serve.engine.settings import EngineSettings

    others = [p for p in gpu.processes if p.bytes is None or p.bytes > 0]
    held = gpu.total - gpu.free
    if others:
        named = ", ".join(
            f"{p.pid} ({'?' if p.bytes is None else f'{p.bytes / GIB:.1f}'} GiB)" for p in others
        )
        text = f"{plural(len(others), 'other process|processes')} on it: {named}"
        remedy = "end them, or choose another GPU with CUDA_VISIBLE_DEVICES"
        yield Finding(Level.NOTE, what, f"{text}, which slow it down and take memory", remedy)
    if sizes is None or gpu.problem:
        return
    share = EngineSettings().memory
    need = sizes.weights // patient.tensor_parallel + sizes.beside
    text = f"{patient.base} needs {need / GIB:.1f} GiB of it in bfloat16"
    if share * gpu.total < need:
        room = share * gpu.total - sizes.beside
        remedy = "use a smaller base model, or a larger GPU"
        if room > 0:
            count = max(patient.tensor_parallel + 1, math.ceil(sizes.weights / room))
            remedy = (
                f"use a smaller base model, a larger GPU, or {count} GPUs with --tensor-parallel"
            )
        text = f"too small: {text}, and the engine takes {share:.0%} of a GPU's"
        yield Finding(Level.WRONG, what, text, remedy)
    elif share * gpu.total - held < need:
        text = f"{text}, and {held / GIB:.1f} GiB are taken"
        remedy = "end the process that holds them, or choose another GPU with CUDA_VISIBLE_DEVICES"
        yield Finding(Level.WRONG, what, text, remedy)
    elif share * gpu.total - held < need + sizes.merged // patient.tensor_parallel:
        text += (
            "; the default policy merges adapters into a second copy, for which there is no room"
        )
        remedy = "serve with --policy unmerge_only, or on a larger GPU"
        yield Finding(Level.WRONG, what, text, remedy)
    else:
        yield Finding(Level.FINE, what, text)


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
    else:
        yield from _flashinfer(flash, facts)
    yield from _versions()


def _flashinfer(version: str, facts: Facts) -> Iterator[Finding]:
    """Whether FlashInfer has its kernels, or what it compiles them with."""
    for name in COMPANIONS:
        other = installed(name)
        if other is not None and other.partition("+")[0] != version:
            yield Finding(
                Level.WRONG, name,
                f"{other}, which FlashInfer {version} refuses; Triton kernels replace it",
                f"pip uninstall {name}, or install {version} of it from FlashInfer's own index",
            )  # fmt: skip
            return
    if not facts.missing or installed("flashinfer-jit-cache") is not None:
        yield Finding(Level.FINE, "attention", f"FlashInfer {version}")
        return
    jit_cache = f"flashinfer-jit-cache {version} from FlashInfer's own index, it is not on PyPI,"
    brings = [PACKAGES.get(name, "g++").format(jit_cache=jit_cache) for name in facts.missing]
    text = (
        f"not found: FlashInfer {version} compiles its kernels with it; Triton kernels replace it"
    )
    remedy = f"install {' and '.join(brings)}"
    yield Finding(Level.NOTE, ", ".join(facts.missing), text, remedy)


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
    from valora_serve.engine.sizing import cost_folder
    from valora_serve.orchestrator.cost_model import cache_path

    for name, gpu in {gpu.name: gpu for gpu in facts.gpus}.items():
        yield _tilings(gpu, patient)
        machine = name if patient.tensor_parallel == 1 else f"{name} x{patient.tensor_parallel}"
        file = cache_path(cost_folder(server_settings()), machine, patient.base)
        if _is_there(file):
            yield Finding(Level.FINE, "costs", f"measured for {patient.base} on {machine}")
        else:
            text = f"not measured for {patient.base} on {machine}"
            remedy = "the first start measures them, which takes some seconds more"
            yield Finding(Level.NOTE, "costs", text, remedy)


def _is_there(file: Path) -> bool:
    try:
        return file.exists()
    except PermissionError:  # a folder above it may not be looked into
        return False


def _tilings(gpu: GpuFacts, patient: Patient) -> Finding:
    """Where the tilings of the LoRA kernels come from."""
    from valora_kernels.gpus import detect
    from valora_kernels.gpus.registry import recorded
    from valora_kernels.lookup import is_measured
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
    file = tiling_file(server_settings(), known.name)
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
