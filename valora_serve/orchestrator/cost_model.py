"""What a step, a switch and a load cost on this machine, in seconds (VaLoRA §4.4.3).

Two linear models over a few counts of a step: one for steps that only decode (replayed graphs), one
for steps with prompt tokens. Slopes are never negative and the knees are fixed, so a prediction
grows with the batch, as it must. The engine measures steps at its first start, `CostModel.fit`
makes coefficients of them, and they are cached as JSON under the names of machine and model.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from valora_serve.errors import ServeError
from valora_serve.types import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from valora_serve.orchestrator.decision import RequestView

VERSION = 4


class CostModelError(ServeError):
    """A file of costs cannot be read, or what was measured cannot be fitted."""


class CostVersionError(CostModelError):
    """A file of costs was written by another version."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The counts of a step that its time depends on.

    Attributes:
        mode: Of the step.
        decode: Rows that decode one token.
        prefill: Prompt tokens.
        images: Images encoded.
        kv_tokens: Tokens in the KV cache that decode rows attend to, summed over the rows.
        pairs: Pairs of a prompt token and a token that it attends to.
        terms: LoRA terms summed over tokens: 1 for an unmerged row, 0 for one of the merged
            adapter, 2 for a foreign row in mixture, 1 there for a base row.
        work: Ranks summed over the same.
        ranks: Ranks summed over the distinct adapters with a term.
        adapters: Distinct adapters with a term.
    """

    mode: Mode = Mode.UNMERGED
    decode: int = 0
    prefill: int = 0
    images: int = 0
    kv_tokens: int = 0
    pairs: int = 0
    terms: int = 0
    work: int = 0
    ranks: int = 0
    adapters: int = 0


def step_shape(
    mode: Mode,
    merged: str | None,
    batch: Iterable[tuple[RequestView, int]],
    ranks: Mapping[str, int],
) -> StepShape:
    """Count a batch.

    Args:
        mode: Of the step.
        merged: Adapter in the weights.
        batch: Requests as they are before the step, with the tokens to compute.
        ranks: Rank by adapter; must hold `merged` in mixture.
    """
    mixture = mode is Mode.MIXTURE and merged is not None
    merged_rank = ranks[merged] if mixture and merged is not None else 0
    decode = prefill = images = kv_tokens = pairs = terms = work = 0
    distinct: dict[str, int] = {}
    foreign = False
    for request, tokens in batch:
        if request.prompt_left:
            prefill += tokens
            images += request.images
            pairs += tokens * (request.kv_tokens + (tokens + 1) // 2)
        else:
            decode += 1
            kv_tokens += request.kv_tokens + 1
        adapter = request.adapter
        if adapter == merged:
            continue
        if adapter is not None:
            terms += tokens
            work += tokens * request.rank
            distinct[adapter] = request.rank
        if mixture:
            terms += tokens
            work += tokens * merged_rank
            foreign = True
    total = sum(distinct.values())
    return StepShape(
        mode,
        decode,
        prefill,
        images,
        kv_tokens,
        pairs,
        terms,
        work,
        total + merged_rank if foreign else total,
        len(distinct) + foreign,
    )


PROMPT_SIZES = (64, 128, 192, 256, 288, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Rows of the steps with prompts that are captured on a GPU.

Up to the last one a GPU is faster than the host that launches its kernels one by one (60 ms).
"""

HOST_BOUND = 1.2
"""Steps without a graph up to so many times the shortest are taken to wait for the host."""

DECODE_KNEES = (64, 256)
PREFILL_KNEES = (128, 256, 512)

# Names of the coefficients, in the order of `_decode_row` and `_prefill_row`.
DECODE_TERMS = (
    "step", "row", "row>64", "row>256", "context", "lora", "lora_rank", "lora_work", "mixture"
)  # fmt: skip
PREFILL_TERMS = (
    "step",
    "token",
    "token>128",
    "token>256",
    "token>512",
    "context",
    "pair",
    "image",
    "lora",
    "lora_rank",
    "lora_work",
    "mixture",
)


def _decode_row(s: StepShape) -> list[float]:
    knees = [max(0, s.decode - knee) for knee in DECODE_KNEES]
    return [1, s.decode, *knees, s.kv_tokens, *_lora_row(s)]


def _prefill_row(s: StepShape, tokens: int) -> list[float]:
    knees = [max(0, tokens - knee) for knee in PREFILL_KNEES]
    return [1, tokens, *knees, s.kv_tokens, s.pairs, s.images, *_lora_row(s)]


def _lora_row(s: StepShape) -> list[float]:
    return [s.terms > 0, s.ranks, s.work, s.terms > 0 and s.mode is Mode.MIXTURE]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of steps, switches and loads.

    Attributes:
        machine: Whose times these are, e.g. the GPU's name.
        model: Of which base model.
        decode: Seconds per unit of each of `DECODE_TERMS`.
        prefill: Seconds per unit of each of `PREFILL_TERMS`.
        merge: Seconds to merge an adapter: fixed, and per rank.
        unmerge: Seconds to restore the pristine weights.
        load_: Seconds to copy an adapter in: fixed, and per rank.
        captured: Rows of the steps with prompts that are replayed from graphs, ascending; a step
            of fewer rows takes the next graph's time.
        uncaptured: Seconds that a larger step takes at least, for the host has to launch all of it.
        measured: False for an estimate.
        error: Median relative error over the points of the fit, None for an estimate.
    """

    machine: str
    model: str
    decode: tuple[float, ...]
    prefill: tuple[float, ...]
    merge: tuple[float, float]
    unmerge: float
    load_: tuple[float, float]
    captured: tuple[int, ...] = ()
    uncaptured: float = 0.0
    measured: bool = False
    error: float | None = None

    def step(self, s: StepShape) -> float:
        """Seconds of a step; 0 for an empty one."""
        if s.prefill:
            c = self.prefill
            n = self.rows(s.decode + s.prefill)
            time = c[0] + c[1] * n + c[5] * s.kv_tokens + c[6] * s.pairs + c[7] * s.images
            if n > 128:
                time += c[2] * (n - 128)
                if n > 256:
                    time += c[3] * (n - 256)
                    if n > 512:
                        time += c[4] * (n - 512)
            if s.terms:
                time += c[8] + c[9] * s.ranks + c[10] * s.work
                if s.mode is Mode.MIXTURE:
                    time += c[11]
            if time < self.uncaptured and not self.is_captured(n):
                return self.uncaptured
            return time
        if not s.decode:
            return 0.0
        c = self.decode
        n = s.decode
        time = c[0] + c[1] * n + c[4] * s.kv_tokens
        if n > 64:
            time += c[2] * (n - 64)
            if n > 256:
                time += c[3] * (n - 256)
        if s.terms:
            time += c[5] + c[6] * s.ranks + c[7] * s.work
            if s.mode is Mode.MIXTURE:
                time += c[8]
        return time

    def is_captured(self, rows: int) -> bool:
        """Whether a step of so many rows with prompts is replayed from a graph."""
        return bool(self.captured) and rows <= self.captured[-1]

    def rows(self, rows: int) -> int:
        """Rows that are computed in a step of so many with prompts: graphs are filled up."""
        if not self.is_captured(rows):
            return rows
        return self.captured[bisect_left(self.captured, rows)]

    def switch(self, before: str | None, after: str | None, rank: int = 64) -> float:
        """Seconds to go from one merged adapter (None: pristine) to another of this rank."""
        if before == after:
            return 0.0
        if after is None:
            return self.unmerge
        return self.merge[0] + self.merge[1] * rank

    def load(self, rank: int) -> float:
        """Seconds to copy an adapter of this rank from the host."""
        return self.load_[0] + self.load_[1] * rank

    def with_lora(self, factor: float) -> CostModel:
        """The same machine if LoRA terms cost so many times as much, to see what hangs on it."""
        lora = DECODE_TERMS.index("lora"), PREFILL_TERMS.index("lora")
        decode, prefill = (
            (*c[:i], *(value * factor for value in c[i:]))
            for c, i in zip((self.decode, self.prefill), lora, strict=True)
        )
        return replace(self, decode=decode, prefill=prefill)

    def fit(
        self,
        points: Sequence[tuple[StepShape, float]],
        *,
        machine: str,
        model: str,
        merges: Sequence[tuple[int, float]] = (),
        unmerges: Sequence[float] = (),
        loads: Sequence[tuple[int, float]] = (),
        captured: tuple[int, ...] = (),
        uncaptured: float = 0.0,
    ) -> CostModel:
        """The model that fits what was measured, by non-negative least squares.

        Errors count relative to the time measured. What no point tells apart from zero keeps
        this model's coefficient (e.g. the cost of an image if none was measured).

        Args:
            points: Steps and their seconds.
            machine: Whose times these are.
            model: Of which base model.
            merges: Ranks and seconds of merging.
            unmerges: Seconds of unmerging.
            loads: Ranks and seconds of loading.
            captured: See the attribute.
            uncaptured: See the attribute.

        Raises:
            CostModelError: A time is not positive.
        """
        times = [t for _, t in points] + [t for _, t in (*merges, *loads)] + list(unmerges)
        if not all(0 < t < float("inf") for t in times):
            raise CostModelError("A measured time is not a positive number; profile again.")
        # What the host takes to launch says nothing about tokens.
        known = replace(self, captured=captured)
        launched = [(s, t) for s, t in points
                    if s.prefill and (t > HOST_BOUND * uncaptured
                                      or known.is_captured(s.decode + s.prefill))]  # fmt: skip
        groups = ([p for p in points if not p[0].prefill], launched)
        decode = _fit([(_decode_row(s), t) for s, t in groups[0]], self.decode)
        rows = [(_prefill_row(s, known.rows(s.decode + s.prefill)), t) for s, t in groups[1]]
        prefill = _fit(rows, self.prefill)
        fitted = replace(
            self,
            machine=machine,
            model=model,
            decode=decode,
            prefill=prefill,
            merge=_line(merges, self.merge),
            unmerge=float(np.median(unmerges)) if len(unmerges) else self.unmerge,
            load_=_line(loads, self.load_),
            captured=captured,
            uncaptured=uncaptured,
            measured=True,
        )
        errors = [abs(fitted.step(s) / t - 1) for s, t in points]
        return replace(fitted, error=float(np.median(errors)) if errors else None)

    def save(self, folder: Path) -> Path:
        """Write the model to its place in a cache folder; appears whole or not at all."""
        path = cache_path(folder, self.machine, self.model)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "version": VERSION,
            "machine": self.machine,
            "model": self.model,
            "measured": self.measured,
            "error": self.error,
            "decode_seconds": dict(zip(DECODE_TERMS, self.decode, strict=True)),
            "prefill_seconds": dict(zip(PREFILL_TERMS, self.prefill, strict=True)),
            "merge_seconds": list(self.merge),
            "unmerge_seconds": self.unmerge,
            "load_seconds": list(self.load_),
            "captured_rows": list(self.captured),
            "uncaptured_seconds": self.uncaptured,
        }
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
        return path

    @staticmethod
    def read(path: Path) -> CostModel:
        """Read a saved model.

        Raises:
            CostModelError: The file is missing, no such model, or of another version.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                raise CostVersionError(
                    f"{path} is of version {content['version']}, expected {VERSION}; "
                    "delete it and the costs are profiled again."
                )
            model = CostModel(
                machine=content["machine"],
                model=content["model"],
                decode=tuple(float(content["decode_seconds"][k]) for k in DECODE_TERMS),
                prefill=tuple(float(content["prefill_seconds"][k]) for k in PREFILL_TERMS),
                merge=_pair(content["merge_seconds"]),
                unmerge=float(content["unmerge_seconds"]),
                load_=_pair(content["load_seconds"]),
                captured=tuple(int(n) for n in content["captured_rows"]),
                uncaptured=float(content["uncaptured_seconds"]),
                measured=bool(content["measured"]),
                error=content["error"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CostModelError(
                f"{path} is no file of step costs ({error}); delete it and they are profiled again."
            ) from error
        coefficients = (*model.decode, *model.prefill, *model.merge, model.unmerge, *model.load_,
                        *model.captured, model.uncaptured)  # fmt: skip
        if not all(0 <= c < float("inf") for c in coefficients):
            raise CostModelError(
                f"{path} holds a negative or infinite cost; delete it and they are profiled again."
            )
        return model


def cache_path(folder: Path, machine: str, model: str) -> Path:
    """Where the costs of a model on a machine are cached."""
    names = ("".join(c if c.isalnum() else "-" for c in n.lower()) for n in (machine, model))
    return folder / "costs" / "--".join(names) / "costs.json"


def load_or_estimate(folder: Path, machine: str, model: str) -> CostModel:
    """The cached costs of a model on a machine, or the estimate if there are none of this version.

    Raises:
        CostModelError: There is a file, but it is damaged.
    """
    path = cache_path(folder, machine, model)
    try:
        return CostModel.read(path) if path.exists() else H200_7B
    except CostVersionError:
        return H200_7B


# An estimate, rounded from what one H200 measured; `measured` is False until profiled.
# Decode: 13.5 GB of weights at 4.2 TB/s plus launch gaps; 0.5 MB of keys and values a token. LoRA
# of rank 64 on q, k, v, o: 0.25 ms a step with one adapter, 0.7 with 16, 0.27 more where rows have
# two terms. Prefill: 22 us a token; a step too large for a graph, with 16 adapters, takes the host
# 60 ms, however few its rows. Load: 2.1 MB per rank over PCIe 5 at 50 GB/s.
H200_7B = CostModel(
    machine="NVIDIA H200",
    model="llama-7b",
    decode=(4.33e-3, 10e-6, 4.5e-6, 10e-6, 0.116e-6, 0.22e-3, 0.4e-6, 0.044e-6, 0.27e-3),
    prefill=(5e-3, 7e-6, 15e-6, 0.9e-6, 0.0, 0.21e-6, 2e-9, 1.5e-3, 0.4e-3, 0.65e-6, 0.03e-6,
             0.7e-3),
    merge=(2.8e-3, 7e-6),
    unmerge=2.0e-3,
    load_=(0.2e-3, 39e-6),
    captured=PROMPT_SIZES,
    uncaptured=60e-3,
)  # fmt: skip


def _pair(values: Sequence[float]) -> tuple[float, float]:
    first, second = values
    return float(first), float(second)


def _fit(
    rows: Sequence[tuple[Sequence[float], float]], prior: Sequence[float]
) -> tuple[float, ...]:
    """Coefficients of relative least squares; columns that are all zero keep the prior's."""
    if not rows:
        return tuple(prior)
    times = np.array([t for _, t in rows])
    a = np.array([row for row, _ in rows], dtype=float) / times[:, None]
    seen = np.flatnonzero(a.any(axis=0))
    result = np.array(prior, dtype=float)
    scale = np.linalg.norm(a[:, seen], axis=0)
    result[seen] = nnls(a[:, seen] / scale, np.ones(len(rows))) / scale
    return tuple(result.tolist())


def _line(points: Sequence[tuple[int, float]], prior: tuple[float, float]) -> tuple[float, float]:
    if not points:
        return prior
    if len({rank for rank, _ in points}) == 1:
        # One rank says nothing about the slope: keep the prior's shape and meet the median.
        rank = points[0][0]
        factor = float(np.median([t for _, t in points])) / (prior[0] + prior[1] * rank)
        return prior[0] * factor, prior[1] * factor
    fitted = _fit([((1.0, rank), t) for rank, t in points], prior)
    return fitted[0], fitted[1]


def nnls(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x ≥ 0 that minimises ‖a x − b‖, by Lawson and Hanson's active sets.

    Args:
        a: [points, unknowns] float64.
        b: [points] float64.
    """
    n = a.shape[1]
    x = np.zeros(n)
    free = np.zeros(n, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ b).max(initial=0.0)))
    for _ in range(10 * n):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            trial = np.zeros(n)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                break
            share = np.min(x[negative] / (x[negative] - trial[negative]))
            x = x + share * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = trial
    return x
