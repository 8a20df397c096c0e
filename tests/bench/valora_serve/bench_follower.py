"""Follower of `bench_tensor_parallel`: times groups of layers, or leaves LoRA's collectives out.

Both sides run `time_group` together. Without collectives the results are wrong and the times those
of everything else, as in S-LoRA's Figure 8.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from valora_serve.engine import follower
from valora_serve.model.runner import ModelRunner
from valora_serve.parallel.group import Group
from valora_serve.parallel.peer_memory import PeerMemory

SILENT = "VALORA_BENCH_SILENT"
"""Set to leave LoRA's own collectives out."""
NCCL = "VALORA_BENCH_NCCL"
"""Set to exchange small tensors through NCCL, too."""


def change() -> None:
    """Leave LoRA's own collectives out, or use NCCL alone, if the environment says so."""
    if os.environ.get(NCCL):
        PeerMemory.open = classmethod(lambda *_: None)
    if not os.environ.get(SILENT):
        return

    def start_all_reduce(self, values):
        return lambda: None

    Group.start_all_reduce = start_all_reduce


def time_group(runner: ModelRunner, name: str, rows: int, distinct: int, lora: bool) -> float:
    """Microseconds of the layers of a group with so many rows of so many adapters."""
    linears, device = runner._lmm.linears, runner._device
    group = linears.groups[name]
    batch = runner._lora
    with torch.inference_mode():
        runner._resources.fill_typical(batch, rows, 1, rows, distinct)
    x = torch.randn(rows, group.spec.in_features, dtype=runner._lmm.dtype, device=device)

    def run() -> None:
        with linears.scope.text(batch if lora else None), torch.inference_mode():
            group.compute(x)

    repeats = 50 if device.type == "cuda" else 3
    for _ in range(3):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    linears.forget_outputs()
    return (time.perf_counter() - start) / repeats * 1e6


def main() -> int:
    change()
    init = follower.Follower.__init__

    def more(self, engine, report):
        init(self, engine, report)
        self._orders["time_group"] = lambda *given: time_group(engine.runner, *given)

    follower.Follower.__init__ = more
    return follower.main(sys.argv[1:])


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
