"""What the engine derives from its settings and the machine: device, dtype, pages, graph sizes."""

import logging
import os
import platform
from bisect import bisect_left
from collections.abc import Sequence

import torch

from valora_data.contract.base_model import load_model as read_model
from valora_data.contract.quantized import NF4, unpack
from valora_data.cpu import usable_cores
from valora_data.wording import first_line
from valora_serve.engine.settings import FP8, NF4_PACKED, UNMERGEABLE, EngineSettings
from valora_serve.errors import ServeError, SettingsError
from valora_serve.memory.unified import PageShape
from valora_serve.model.lmm import Lmm
from valora_serve.model.split import SplitReader
from valora_serve.model.work import DECODE, PROMPT, VISION
from valora_serve.orchestrator.cost_model import PROMPT_SIZES
from valora_serve.parallel.group import Group

log = logging.getLogger(__name__)

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320,
                384, 448, 512)  # fmt: skip
IMAGE_COUNTS = (1, 2, 4, 8, 16)
"""Numbers of decoding rows, and of images, that CUDA graphs are captured for."""

CPU_BYTES = 512 << 20  # size of the unified memory on a CPU, in bytes
# Bytes of a step for each row and element of its width: 15 tensors, and graphs as many again.
ACTIVATIONS = 64
LOGITS = 32  # bytes of sampling for each row and token of the vocabulary: logits in 32 bits, sorted
GRAPHS = 1 << 30  # bytes for what CUDA graphs and the attention library take whatever the model
MIN_PAGES = 16  # fewest pages on a GPU that an engine starts with
HOST_THREADS = 6  # most threads of torch's operators on the host where a GPU computes the steps


def find_device(settings: EngineSettings, rank: int = 0) -> torch.device:
    """Return the device of a rank, with its index; ``auto`` is the GPU if there is one."""
    name, size = settings.device, settings.tensor_parallel
    if name == "auto":
        name = "cuda" if size > 1 or torch.cuda.is_available() else "cpu"
    try:
        if size > 1 and (first := torch.device(name)).type == "cuda":
            left = max(torch.cuda.device_count() - (first.index or 0), 0)
            if left < size:
                raise SettingsError(
                    f"tensor_parallel: {size} GPUs are asked for, and this machine has "
                    f"{left or 'none'}{f' from {first} on' if first.index else ''}: ask for fewer"
                )
            return torch.device("cuda", (first.index or 0) + rank)
        found = torch.zeros(1, device=name)
        found.tolist()  # of torch's pseudo devices (meta) nothing can be read
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(
            f"device {name} cannot be used ({first_line(error)}): name cpu, cuda or auto; "
            "`valora-serve --check` looks at the GPUs"
        ) from error
    return found.device


def load_model(settings: EngineSettings, group: Group | None) -> Lmm:
    """Load the base model of the settings, or the part of it that a process of a group has.

    Weights that are quantized to 4 bits are unpacked again, to the numbers that adapters were
    trained on, unless they are to stay packed. A `BundleError` or `SettingsError` says why not.
    """
    base, fp8, packed = settings.base, settings.quantize == FP8, settings.quantize == NF4_PACKED
    quantize = NF4 if packed or settings.quantize == NF4 else None
    device = group.device if group else find_device(settings)
    name = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, name if settings.dtype == "auto" else settings.dtype)
    if group is not None:
        reader = SplitReader(base, group, quantize, settings.lora_parallel)
        return Lmm(
            base, *read_model(base, dtype, read=reader, plain=True), device, quantize, reader
        )
    model, processor = read_model(base, dtype, quantize=quantize, device=device, plain=True)
    if quantize is not None and not packed:
        model = unpack(model, dtype)
    return Lmm(base, model, processor, device, quantize, fp8=fp8, packed=packed)


def limit_host_threads(device: torch.device) -> None:
    """Let torch's operators use few cores of the host, unless OMP_NUM_THREADS says how many.

    An operator waits for all of its threads, of which one comes late where cores are busy: four
    engines that started on 64 cores had not laid out their first adapters after 330 s. On a CPU,
    a core is left to HTTP and images: with both of two, a server answered 0.6 of the requests.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        max_threads = HOST_THREADS if device.type == "cuda" else max(1, usable_cores() - 1)
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores(), max_threads))


def machine_of(settings: EngineSettings, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of costs: GPUs, or CPU, threads and type; how weights are packed."""
    size, computing = settings.tensor_parallel, str(dtype).removeprefix("torch.")
    name = f"{platform.machine()} {torch.get_num_threads()} threads {computing}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    if settings.quantize in UNMERGEABLE:
        name += f" {settings.quantize}"
    return name if size == 1 else f"{name} x{size}"


def context_length(settings: EngineSettings, lmm: Lmm) -> int:
    """Return the longest prompt and answer together; or a `SettingsError` about `max_tokens`."""
    beside = settings.max_requests - 1
    if lmm.block and settings.max_tokens < lmm.block + beside:
        raise SettingsError(
            f"max_tokens={settings.max_tokens}: base model {lmm.base} computes the {lmm.block} "
            f"tokens of an image in one step, beside up to {beside} requests that decode: raise it "
            f"to {lmm.block + beside}, or lower max_requests"
        )
    found = min(settings.context_length or lmm.context_length, lmm.context_length)
    if found == lmm.window:
        log.warning("context_length=%d, as layers of %s attend in such windows", found, lmm.base)
    return found


def graph_sizes(settings: EngineSettings, device: torch.device) -> dict[str, Sequence[int]]:
    """Return the numbers of rows of steps, and of images, to capture graphs for, by their kind."""
    fitting = [n for n in DECODE_SIZES if n <= settings.max_requests] if settings.graphs else []
    prompts_too = settings.prompt_graphs
    if prompts_too is None:
        prompts_too = device.type == "cuda" and settings.graphs
    if not prompts_too:
        return {DECODE: fitting}
    last = bisect_left(PROMPT_SIZES, settings.max_tokens)  # it holds any step
    return {DECODE: fitting, PROMPT: PROMPT_SIZES[: last + 1], VISION: IMAGE_COUNTS}


def beside_weights(settings: EngineSettings, width: int, vocabulary: int) -> int:
    """Bytes that steps and graphs take at most, beside weights and pages."""
    step = settings.max_tokens * width * ACTIVATIONS
    return step + settings.max_requests * vocabulary * LOGITS + GRAPHS


def pages_that_fit(settings: EngineSettings, lmm: Lmm, page: PageShape, mergeable: bool) -> int:
    """Pages that fit beside the model and, if `mergeable`, its pristine weights."""
    item = torch.tensor([], dtype=lmm.dtype).element_size()
    if lmm.device.type != "cuda":
        return max(2, CPU_BYTES // (page.elements * item))
    torch.cuda.empty_cache()  # what torch has kept of loading the model is free, too
    free, total = torch.cuda.mem_get_info(lmm.device)
    pristine = 0
    if mergeable:
        weights = sum(
            weight.numel() for group in lmm.linears.groups.values() for weight in group.weights
        )
        there = sum(len(memory.pristine) for memory in lmm.linears.merged)  # of an earlier engine
        pristine = item * (weights - there)
    beside = beside_weights(settings, lmm.width, lmm.vocabulary)
    left = total * settings.memory - (total - free) - pristine - beside
    pages = int(left // (page.elements * item))
    if pages < MIN_PAGES:
        copy, other = "", ""
        if pristine:
            copy = f" and the copy of its weights that merging needs ({pristine >> 20} MiB)"
            other = "choose policy=unmerge_only, "
        raise ServeError(
            f"the GPU has {free >> 20} MiB free, too little beside the model{copy}: raise "
            f"memory={settings.memory:g}, {other}lower max_tokens={settings.max_tokens}, or use a "
            "smaller base model"
        )
    return pages
