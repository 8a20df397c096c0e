"""Option ``--check`` of ``valora-serve``: says whether the server would start on this machine."""

import importlib.metadata
import math
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from valora_data.contract.base_model import base_folder
from valora_data.cpu import usable_cores
from valora_data.wording import first_line
from valora_serve.engine.settings import UNMERGEABLE, EngineSettings
from valora_serve.orchestrator.registry import POLICIES
from valora_serve.toolkit import missing_tools
from valora_serve.types import Mode

Findings = Iterator[tuple[str, str]]
FINE, NOTE, WRONG = "✓–✗"
VISION_MODULES = ("vision_tower", "visual", "multi_modal_projector")
DRIVER = Path("/proc/driver/nvidia/version")
GIB = 1 << 30
SHARES = {"nf4_packed": 0.3, "fp8": 0.5}  # of the memory in 16 bits, with scales


def check(settings: EngineSettings, bundles: Sequence[Path], connections: int) -> int:
    """Print what a server finds on this machine; 1 if it would not start with it, or else 0."""
    found = [*_limits(connections), *_libraries(), *_gpus(settings, bundles)]
    print("\n".join(f"{mark} {text}" for mark, text in found))
    return int(any(mark == WRONG for mark, _ in found))


def _limits(connections: int) -> Findings:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield FINE, f"{usable_cores()} CPU cores, {memory / GIB:.1f} GiB of memory"
    if 0 <= (files := resource.getrlimit(resource.RLIMIT_NOFILE)[1]) < connections + 256:
        yield NOTE, f"{files} open files: raise `ulimit -Hn`, or lower --max-connections"


def _libraries() -> Findings:
    versions = dict.fromkeys(("flashinfer-python", "flashinfer-jit-cache", "flashinfer-cubin"), "")
    for name in versions:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name).partition("+")[0]
    version, kernels, _ = versions.values()
    problem = ""
    if not version:
        problem = "it is not installed: pip install 'valora[gpu]'"
    elif {*versions.values(), ""} - {"", version}:
        problem = f"it refuses kernels of other versions than {version}: install the same"
    elif not kernels and (missing := ", ".join(missing_tools())):
        problem = f"it compiles its kernels with {missing}, not found: install these, or jit-cache"
    yield NOTE if problem else FINE, f"FlashInfer: {problem or version}"


def _gpus(settings: EngineSettings, bundles: Sequence[Path]) -> Findings:
    driver = None
    with suppress(OSError):
        driver = DRIVER.read_text().split("  ")[1]
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation fails in many ways
        return (yield WRONG, f"PyTorch cannot be imported ({first_line(error)}): install it again")
    built = f"for CUDA {torch.version.cuda}, NVIDIA driver {driver or 'not found'}"
    yield FINE, f"PyTorch {torch.__version__} {built}"
    if settings.device.startswith("cpu"):
        return
    count, needed = torch.cuda.device_count(), settings.tensor_parallel
    if not count and driver:
        text = f"no GPU with CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}"
        yield WRONG, f"{text}: update the driver for this CUDA, or see what `nvidia-smi` lists"
    elif not count:
        yield NOTE, "no GPU: models are computed on the CPU, which suits tiny"
    elif count < needed:
        yield WRONG, f"--tensor-parallel is {needed}: use at most the {count} GPUs found"
    for number in range(min(count, needed)):
        for mark, text in _gpu(torch, number, settings, bundles):
            yield mark, f"GPU {number}: {text}"


def _gpu(torch: Any, number: int, settings: EngineSettings, bundles: Sequence[Path]) -> Findings:
    try:
        torch.zeros(1, device=f"cuda:{number}").add(1)  # fails if PyTorch has no code for it
        free, total = torch.cuda.mem_get_info(number)
    except Exception as error:  # noqa: BLE001 - torch's are of many kinds
        return (yield WRONG, f"cannot be used ({first_line(error)}): name another, or free it")
    facts, pids = torch.cuda.get_device_properties(number), set()
    yield FINE, f"{facts.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
    with suppress(Exception):  # nvidia-ml-py is optional
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{str(facts.uuid).removeprefix('GPU-')}")
        pids = {one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    for pid in sorted(pids - {os.getpid()}):
        yield NOTE, f"process {pid} runs on it, too: it takes memory and slows the server down"
    try:
        need = _bytes(settings, bundles)
    except Exception as error:  # noqa: BLE001 - safetensors' is no ValueError
        return (yield NOTE, f"the size of {settings.base} cannot be read: {first_line(error)}")
    text = f"{settings.base} with adapters and pages needs {need / GIB:.1f} GiB"
    if total * settings.memory - (total - free) < need:
        remedy = "free it, add GPUs with --tensor-parallel, or try --policy unmerge_only"
        yield WRONG, f"{text}, more than is free of {settings.memory:.0%} of it: {remedy}"
    else:
        yield FINE, text


def _bytes(settings: EngineSettings, bundles: Sequence[Path]) -> float:
    """Bytes of each GPU that a server needs, in 16 bits, from the headers of files."""
    from huggingface_hub import snapshot_download
    from safetensors import safe_open
    from transformers import AutoConfig

    from valora_serve.engine.sizing import MIN_PAGES, beside_weights  # imports torch

    folder = Path(base_folder(settings.base))
    if not folder.is_dir():
        folder = Path(snapshot_download(str(folder), local_files_only=True))
    text = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    kept = 2 * (getattr(text, "num_key_value_heads", None) or heads) * head  # numbers a layer
    weights = linears = tower = 0.0
    adapters = [file for one in bundles for file in one.rglob("adapter_model.safetensors")]
    for file in (*folder.glob("*.safetensors"), *adapters):
        with safe_open(file, "numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                shape = opened.get_slice(name).get_shape()
                weights += (size := 2 * math.prod(shape))
                if any(part in name for part in VISION_MODULES):
                    tower += size * (len(shape) == 2)
                else:
                    linears += size * name.endswith("proj.weight")
    weights -= linears * (1 - SHARES.get(settings.quantize, 1))
    if Mode.MERGED in POLICIES[settings.policy].modes and settings.quantize not in UNMERGEABLE:
        weights += linears + tower  # the copy that merging keeps
    page = 2 * text.num_hidden_layers * settings.block_size * kept
    beside = (settings.pages or MIN_PAGES) * page
    beside += beside_weights(settings, text.hidden_size, text.vocab_size)
    return float(weights / settings.tensor_parallel + beside)
