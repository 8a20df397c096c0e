"""How fast a model answers: images a second, from decoded images to answers."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from valora_data.cpu import usable_cores
from valora_data.schema import Sample

BATCH = 32  # samples, as teachers answer them
ROUNDS = 5
SECONDS = 2.0


class Pace:
    """Measures the speed of a model while it does its work, batch by batch."""

    def __init__(self) -> None:
        self._rates: list[float] = []

    def start(self, samples: Sequence[Sample]) -> None:
        """Start to answer samples."""
        self._samples, self._done, self._last = samples, 0, time.perf_counter()

    def on_batch(self, done: int) -> None:
        """Note that a batch was answered, with the number of samples answered so far."""
        now = time.perf_counter()
        if done > self._done:
            images = _images(self._samples[self._done : done])
            self._rates.append(images / max(now - self._last, 1e-9))
        self._done, self._last = done, now

    def facts(self) -> dict[str, Any]:
        """As `measure_speed`, of all batches but the first, in which the model warms up."""
        rates = self._rates[1:] or self._rates
        return {"images_per_second": median(rates), "machine": machine()} if rates else {}


def measure_speed(
    answer: Callable[[Sequence[Sample]], Any],
    samples: Sequence[Sample],
    device: str = "cpu",
    *,
    alone: bool = True,
) -> dict[str, Any]:
    """Measure how fast a model answers batches of 32 samples, or of fewer if it is slow.

    Processes that run a model together (`alone` is false) ask it twice, whatever their clocks say.
    `images_per_second` is the median over the batches of about two seconds; every frame counts.
    """

    def seconds(batch: Sequence[Sample]) -> float:
        start = time.perf_counter()
        answer(batch)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        return max(time.perf_counter() - start, 1e-9)

    batch = samples[:BATCH]
    first = seconds(batch[: 1 if alone else BATCH])
    took: list[float] = []
    if alone:
        batch = batch[: max(1, int(SECONDS / first))]
        took = [first] if first >= SECONDS else []
    while not took or (alone and len(took) < ROUNDS and sum(took) < SECONDS):
        took.append(seconds(batch))
    return {"images_per_second": _images(batch) / median(took), "machine": machine(device)}


def _images(samples: Sequence[Sample]) -> int:
    return sum(max(1, len(sample.images)) for sample in samples)


def machine(device: str = "cpu") -> str:
    """Name of a device in torch's terms: the GPU, or the processor with its number of cores."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    facts = Path("/proc/cpuinfo")
    text = facts.read_text(errors="replace") if facts.is_file() else ""
    named = re.search(r"^model name\s*:[ \t]*(\S.*?)\s*$", text, re.MULTILINE)
    name = named[1] if named else platform.processor() or platform.machine()
    return f"{name}, {usable_cores()} cores"
