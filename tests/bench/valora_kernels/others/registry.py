"""Operators of others that `bench_atmm` measures beside ours: one file and one line each.

A module has `operators(work)`, which gives calls by name. Each adds LoRA to the `ys` of one set of
inputs of the workload; what a server does once for an adapter or a batch (layout, metadata) is done
before and not measured.
"""

from __future__ import annotations

import importlib.metadata
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from valora_kernels.timing import Inputs, KernelWorkload

    Operators = dict[str, Callable[[Inputs], object]]

MODULES: Final = {
    "torch": "tests.bench.valora_kernels.others.torch_operators",
    "vllm": "tests.bench.valora_kernels.others.vllm_kernels",
    "sglang": "tests.bench.valora_kernels.others.sglang_kernels",
}
"""Modules by the package that they need."""

missing: dict[str, str] = {}
"""Why a package's operators are not measured, in one line."""


def operators(work: KernelWorkload) -> Operators:
    """All operators that can be had here, by name."""
    found: Operators = {}
    for package, module in MODULES.items():
        if package not in missing:
            try:
                found |= import_module(module).operators(work)
            except Exception as error:  # noqa: BLE001 - whatever a package raises is in the report
                text = (str(error).splitlines() or [""])[0]
                missing[package] = f"{type(error).__name__}: {text}"
    return found


def b_of(s: Inputs, projection: int) -> torch.Tensor:
    """Bᵀ [slots, max_rank, out_features[projection]] of a workload, whose rows are contiguous."""
    weights, rows = s.weights, s.weights.slots * s.weights.max_rank
    part = weights.b.split([rows * width for width in weights.out_features])[projection]
    return part.view(weights.slots, weights.max_rank, -1)


def versions() -> str:
    """What was measured and what was not, for the report."""
    said = []
    for package in MODULES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "without metadata"
        said.append(f"{package} {missing.get(package) or version}")
    return "; ".join(said)
