"""Tensor parallelism on a 7B shape with random weights: decode steps, and LoRA's collectives.

`python -m tests.bench.valora_serve.bench_tensor_parallel` measures decode steps on one GPU and on
`--gpus` of them, with both ways to split LoRA matrices, with and without LoRA's own collectives
(S-LoRA, Figure 8), and prints one table. Every engine runs in a process of its own.
`--device cpu --layers 2 --width 256` tries the program where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.bench.valora_serve.bench_worker import NCCL, SILENT, change
from tests.bench.valora_serve.serve_models import ATTENTION
from tests.bench.valora_serve.split_models import save_adapters, save_base
from valora_serve.engine.engine import Engine
from valora_serve.engine.profile import make_step
from valora_serve.engine.settings import EngineSettings
from valora_serve.engine.workers import Workers
from valora_serve.types import Mode

if TYPE_CHECKING:
    from valora_serve.model.work import Work

ADAPTERS = 16
STEPS = 20
"""Steps that are launched one behind the other, as when the engine serves."""
ROWS = (1, 16, 64, 512, 2048)
WAYS = {
    "one": ("one GPU", "replicate_a", ""),
    "slora": ("{} GPUs, slora", "slora", ""),
    "silent": ("{} GPUs, slora, no LoRA collectives", "slora", SILENT),
    "nccl": ("{} GPUs, slora, NCCL alone", "slora", NCCL),
    "replicate_a": ("{} GPUs, replicate_a", "replicate_a", ""),
}
"""Label, `lora_parallel` and variable of the environment of what is measured."""
WORKER = "tests.bench.valora_serve.bench_worker"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--device", default="cuda")
    made.add_argument("--gpus", type=int, default=2)
    made.add_argument("--layers", type=int, default=32)
    made.add_argument("--width", type=int, default=4096)
    made.add_argument("--rank", type=int, default=64)
    made.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    made.add_argument("--context", type=int, default=512)
    made.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS, help="default: all")
    made.add_argument("--kernels", action="store_true", help="what a step's time consists of")
    made.add_argument("--keep", type=Path, help="folder to keep base model and adapters in")
    made.add_argument("--one", nargs=3, metavar=("FOLDER", "GPUS", "WAY"), help=argparse.SUPPRESS)
    return made


def settings_of(given: argparse.Namespace, folder: Path, gpus: int, way: str) -> EngineSettings:
    cpu = given.device == "cpu"
    return EngineSettings(
        base=str(folder / "base"), device=given.device, tensor_parallel=gpus, lora_parallel=way,
        max_rank=given.rank, slots=ADAPTERS, profile=False, max_requests=max(given.batches),
        pages=2000 if cpu else None, max_tokens=max(ROWS), block_size=16,
        # Decode steps in unmerged mode only: fewer graphs to capture.
        policy="slora", prompt_graphs=False, capture="eager",
    )  # fmt: skip


def measure(given: argparse.Namespace) -> None:
    """Measure one engine, and print the result as JSON."""
    folder, gpus, way = Path(given.one[0]), int(given.one[1]), given.one[2]
    change()
    Workers.module = WORKER
    engine = Engine(settings_of(given, folder, gpus, way))
    try:
        for place in sorted(folder.glob("adapter-*")):
            engine.load("adapter", place, place.name)
        engine.warm_up()
        for key in engine.registry.ranks:
            engine.adapters.load(key)
            while not engine.adapters.ready(key):
                pass
        found: dict[str, object] = {}
        for rows in given.batches:
            for distinct in sorted({0, min(rows, ADAPTERS)}):
                shares = [(given.context, 1)] * rows
                if (step := make_step(engine, Mode.UNMERGED, None, distinct, shares)) is not None:
                    found[f"{rows}/{distinct}"] = step_ms(engine, step[1])
                    if given.kernels:
                        print_kernels(engine, step[1], f"{rows} rows, {distinct} adapters")
        if gpus > 1:
            assert engine.workers is not None and engine.workers.group is not None
            found["memory is shared"] = engine.workers.group.peers is not None
        print(json.dumps(found))
    finally:
        engine.close()


def step_ms(engine: Engine, works: list[Work]) -> float:
    """Milliseconds of a step among many that are launched one behind the other."""
    slot = engine.merge_state.slot
    engine.runner.step(works, slot).read()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(STEPS):
            last = engine.runner.step(works, slot)
        last.read()
        times.append((time.perf_counter() - start) / STEPS * 1e3)
    return min(times)


def print_kernels(engine: Engine, works: list[Work], what: str) -> None:
    """Print what a step's time on the GPU of rank 0 consists of."""
    kind = torch.profiler.ProfilerActivity
    watched = kind.CUDA if engine.device.type == "cuda" else kind.CPU
    with torch.profiler.profile(activities=[watched]) as profile:
        for _ in range(STEPS):
            last = engine.runner.step(works, engine.merge_state.slot)
        last.read()
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)[:14]
    print(f"{what}: kernels on the GPU of rank 0", file=sys.stderr)
    for row in rows:
        calls, total = row.count / STEPS, row.device_time_total / STEPS
        print(f"{total:9.1f} us in {calls:6.1f} calls: {row.key[:90]}", file=sys.stderr, flush=True)


def run(given: argparse.Namespace, folder: Path, gpus: int, way: str, variable: str) -> dict:
    """Measure one engine in a process of its own, with a variable of its environment set."""
    arguments = [
        sys.executable, "-m", "tests.bench.valora_serve.bench_tensor_parallel",
        *(f"--{name}={getattr(given, name)}" for name in
          ("device", "gpus", "layers", "width", "rank", "context")),
        "--batches", *map(str, given.batches),
        *(["--kernels"] if given.kernels else []),
        "--one", str(folder), str(gpus), way,
    ]  # fmt: skip
    done = subprocess.run(
        arguments, stdout=subprocess.PIPE, check=False, text=True,
        env=os.environ | ({variable: "1"} if variable else {}),
    )  # fmt: skip
    if done.returncode:
        print(f"{way} on {gpus} GPUs ended with {done.returncode}", file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    given = parser().parse_args()
    if given.one:
        measure(given)
        return
    ways = [
        (WAYS[name][0].format(given.gpus), 1 if name == "one" else given.gpus, *WAYS[name][1:])
        for name in given.ways
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = given.keep or Path(name)
        if not (folder / "adapter-0").exists():  # kept by an earlier call
            save_base(folder / "base", given.device, given.layers, given.width)
            torch.cuda.empty_cache()
            save_adapters(folder, given.layers, given.width, [given.rank] * ADAPTERS, ATTENTION)
        found = {}
        for label, *rest in ways:
            found[label] = run(given, folder, *rest)
            print(label, json.dumps(found[label]), flush=True)
    first = found[ways[0][0]]
    cases = [key for key in first if "/" in key]
    print(f"\nDecode step in ms, and its share of the first's (context {given.context} tokens)\n")
    print("| batch / adapters | " + " | ".join(found) + " |")
    print("|---|" + "---|" * len(found))
    for case in cases:
        cells = [f"{each[case]:.3f} ({each[case] / first[case]:.2f})" for each in found.values()]
        print(f"| {case.replace('/', ' / ')} | " + " | ".join(cells) + " |")
    if {"slora", "silent"} <= {*given.ways}:
        slora, silent = (found[WAYS[name][0].format(given.gpus)] for name in ("slora", "silent"))
        shares = [f"{case}: {1 - silent[case] / slora[case]:.1%}" for case in cases]
        print(f"\nLoRA's own collectives, share of a step with slora: {', '.join(shares)}")


if __name__ == "__main__":
    main()
