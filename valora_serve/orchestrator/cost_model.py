"""Predicts the seconds of a step, a switch and a load on this machine (VaLoRA §4.4.3).

Two piecewise linear models over a few counts of a step: one for steps that only decode (replayed
from CUDA graphs), and one for steps with prompt tokens. Slopes are never negative. The engine is
profiled at its first start; the coefficients are cached as JSON by machine and model.
"""

from __future__ import annotations

import json
import logging
import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valora_serve.errors import ServeError
from valora_serve.orchestrator.decision import RequestView
from valora_serve.types import Mode

log = logging.getLogger(__name__)

VERSION = 8


class CostModelError(ServeError):
    """A file of costs cannot be read, or the measurements cannot be fitted."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The counts of a step on which its time depends.

    In unmerged mode a token has 1 LoRA term, or 0 for the base model. In mixture mode it has 0 for
    the merged adapter, 1 for the base model and 2 for any other adapter; in merged mode, none.
    """

    mode: Mode = Mode.UNMERGED
    decode: int = 0  # rows that decode one token each
    prefill: int = 0  # prompt tokens
    images: int = 0  # to encode
    kv_tokens: int = 0  # that decode rows attend to, summed over the rows
    pairs: int = 0  # of a prompt token and a token that it attends to
    terms: int = 0  # LoRA terms, summed over tokens
    work: int = 0  # ranks of the LoRA terms, summed over tokens
    ranks: int = 0  # summed over the distinct adapters that have a term


def step_shape(
    mode: Mode,
    merged: str | None,
    batch: Iterable[tuple[RequestView, int]],
    ranks: Mapping[str, int],
) -> StepShape:
    """Count a batch of (request, tokens) in a mode; `ranks` are those of adapters by name."""
    mixture = mode is Mode.MIXTURE and merged is not None
    merged_rank = ranks[merged] if mixture and merged is not None else 0
    decode = prefill = images = kv_tokens = pairs = terms = work = 0
    distinct: dict[str | None, int] = {}
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
            distinct[merged] = merged_rank
    total = sum(distinct.values())
    return StepShape(mode, decode, prefill, images, kv_tokens, pairs, terms, work, total)


PROMPT_SIZES = (64, 128, 192, 256, 288, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Rows of the steps with prompt tokens that are captured in CUDA graphs: up to the last, the GPU
computes a step faster than the host can launch its kernels one by one (60 ms)."""
HOST_BOUND = 1.2
"""A step without a graph that takes at most this many times the shortest one waits for the host."""

# Names of the coefficients, in the order of `_row`.
_LORA_TERMS = ("lora", "lora_rank", "lora_work", "mixture")
DECODE_TERMS = ("step", "row", "row>64", "row>256", "kv_token", *_LORA_TERMS)
PREFILL_TERMS = ("step", "token", "token>128", "token>256", "token>512", "kv_token", "pair",
                 "image", *_LORA_TERMS)  # fmt: skip


def _row(s: StepShape, rows: int) -> list[float]:
    """Return what the coefficients of a step are multiplied by; `rows` as a graph computes them."""
    knees = [max(0, rows - knee) for knee in ((128, 256, 512) if s.prefill else (64, 256))]
    more = [s.pairs, s.images] if s.prefill else []
    lora = [s.terms > 0, s.ranks, s.work, s.terms > 0 and s.mode is Mode.MIXTURE]
    return [1, rows, *knees, s.kv_tokens, *more, *lora]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts the seconds of steps, switches and loads."""

    machine: str  # such as the name of its GPU
    model: str  # name of the base model
    decode_seconds: tuple[float, ...]  # per unit of each of `DECODE_TERMS`
    prefill_seconds: tuple[float, ...]  # per unit of each of `PREFILL_TERMS`
    merge_seconds: tuple[float, float]  # of an adapter: a constant, and per unit of rank
    unmerge_seconds: float  # to restore the pristine weights
    load_seconds: tuple[float, float]  # of an adapter: a constant, and per unit of rank
    # Rows of the steps with prompt tokens that are replayed from CUDA graphs, ascending: a step
    # takes as long as the next larger graph.
    captured_rows: tuple[int, ...] = ()
    uncaptured_seconds: float = 0.0  # least of a step with prompts that no graph covers
    measured: bool = False  # or an estimate
    lora_rank: int = 0  # the largest of the adapters that there were when it was measured
    error: float | None = None  # median relative error over the points of the fit

    def step(self, s: StepShape) -> float:
        """Predict the seconds of a step; 0 for an empty step."""
        if s.prefill:
            c, lora, n = self.prefill_seconds, 8, self.rows(s.decode + s.prefill)
            time = c[0] + c[1] * n + c[5] * s.kv_tokens + c[6] * s.pairs + c[7] * s.images
            if n > 128:
                time += c[2] * (n - 128) + c[3] * max(0, n - 256) + c[4] * max(0, n - 512)
        else:
            c, lora, n = self.decode_seconds, 5, s.decode
            if not n:
                return 0.0
            time = c[0] + c[1] * n + c[4] * s.kv_tokens
            if n > 64:
                time += c[2] * (n - 64) + c[3] * max(0, n - 256)
        if s.terms:
            time += c[lora] + c[lora + 1] * s.ranks + c[lora + 2] * s.work
            if s.mode is Mode.MIXTURE:
                time += c[lora + 3]
        if s.prefill and time < self.uncaptured_seconds and not self.is_captured(n):
            return self.uncaptured_seconds
        return time

    def is_captured(self, rows: int) -> bool:
        """Whether a CUDA graph covers a step with prompt tokens and so many rows."""
        return bool(self.captured_rows) and rows <= self.captured_rows[-1]

    def rows(self, rows: int) -> int:
        """Return how many rows a step with prompt tokens computes, as graphs are padded."""
        if not self.is_captured(rows):
            return rows
        return self.captured_rows[bisect_left(self.captured_rows, rows)]

    def switch(self, before: str | None, after: str | None, rank: int = 64) -> float:
        """Predict the seconds of a switch between merged adapters (None: pristine weights)."""
        if before == after:
            return 0.0
        if after is None:
            return self.unmerge_seconds
        return self.merge_seconds[0] + self.merge_seconds[1] * rank

    def load(self, rank: int) -> float:
        """Predict the seconds to load an adapter of this rank from the host's memory."""
        return self.load_seconds[0] + self.load_seconds[1] * rank

    def with_lora(self, factor: float) -> CostModel:
        """Return these costs with the cost of LoRA terms multiplied by a factor, to try out."""
        lora = DECODE_TERMS.index("lora"), PREFILL_TERMS.index("lora")
        decode, prefill = (
            (*c[:i], *(value * factor for value in c[i:]))
            for c, i in zip((self.decode_seconds, self.prefill_seconds), lora, strict=True)
        )
        return replace(self, decode_seconds=decode, prefill_seconds=prefill)

    def fit(
        self,
        points: Sequence[tuple[StepShape, float]],
        merges: Sequence[tuple[int, float]] = (),
        unmerges: Sequence[float] = (),
        loads: Sequence[tuple[int, float]] = (),
        **facts: Any,
    ) -> CostModel:
        """Fit a cost model to measurements, by non-negative least squares of the relative errors.

        `points` are steps with their seconds, `merges` and `loads` ranks with theirs, and `facts`
        other fields. A coefficient that occurs in no measurement keeps the value of this model.
        """
        times = [t for _, t in (*points, *merges, *loads)] + list(unmerges)
        if not all(0 < t < math.inf for t in times):
            raise CostModelError("A measured time is not positive; profile the engine again.")
        known = replace(self, measured=True, **facts)
        decode = [(_row(s, s.decode), t) for s, t in points if not s.prefill]
        # Steps that wait for the host say nothing about the cost of tokens.
        prefill = [
            (_row(s, known.rows(rows)), t) for s, t in points for rows in [s.decode + s.prefill]
            if s.prefill and (t > HOST_BOUND * known.uncaptured_seconds or known.is_captured(rows))
        ]  # fmt: skip
        fitted = replace(
            known,
            decode_seconds=_fit(decode, self.decode_seconds),
            prefill_seconds=_fit(prefill, self.prefill_seconds),
            merge_seconds=_line(merges, self.merge_seconds),
            unmerge_seconds=float(np.median(unmerges)) if len(unmerges) else self.unmerge_seconds,
            load_seconds=_line(loads, self.load_seconds),
        )
        errors = [abs(fitted.step(s) / t - 1) for s, t in points]
        return replace(fitted, error=float(np.median(errors)) if errors else None)

    def save(self, folder: Path) -> Path:
        """Write the costs to their path in a cache folder, atomically; return the path."""
        path = cache_path(folder, self.machine, self.model)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"version": VERSION, **asdict(self)}
        for name, terms in _TERMS.items():
            content[name] = dict(zip(terms, content[name], strict=True))
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        return path

    @staticmethod
    def read(path: Path) -> CostModel:
        """Read a file of costs; CostModelError if it is missing, damaged or of another version."""
        again = "delete it to profile the engine again."
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content.pop("version")
            if version != VERSION:
                raise CostModelError(f"{path} has version {version}, expected {VERSION}; {again}")
            for name, terms in _TERMS.items():
                content[name] = [content[name][term] for term in terms]
            lists = {
                name: tuple(map(type(like[0]), content[name]))
                for name, like in asdict(H200_7B).items() if isinstance(like, tuple)
            }  # fmt: skip
            model = CostModel(**content | lists)
            costs = [*chain(*lists.values()), model.unmerge_seconds, model.uncaptured_seconds]
            wrong = not all(math.isfinite(cost) and cost >= 0 for cost in costs)
            steps = StepShape(decode=1, kv_tokens=1), StepShape(prefill=1, pairs=1)
            wrong |= not all((*map(model.step, steps), model.load(1), model.switch(None, "")))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
                RecursionError) as error:  # fmt: skip
            raise CostModelError(f"{path} is not a file of costs ({error}); {again}") from error
        if wrong:
            raise CostModelError(f"{path} has a negative or infinite cost, or a free step; {again}")
        return model


_TERMS = {"decode_seconds": DECODE_TERMS, "prefill_seconds": PREFILL_TERMS}


def cache_path(folder: Path, machine: str, model: str) -> Path:
    """Path at which the costs of a model on a machine are cached."""
    names = ("".join(c if c.isalnum() else "-" for c in n.lower()) for n in (machine, model))
    return folder / "costs" / "--".join(names) / "costs.json"


def load_or_estimate(folder: Path, machine: str, model: str) -> CostModel:
    """Read the cached costs of a model on a machine; the estimate for an H200 if there are none."""
    try:
        return CostModel.read(cache_path(folder, machine, model))
    except CostModelError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            log.warning("costs are estimates until they are measured again: %s", error)
        return H200_7B


# An estimate, rounded from measurements on one H200.
# Decode: 13.5 GB of weights at 4.2 TB/s plus launch gaps; 0.5 MB of KV cache per token. LoRA of
# rank 64 on q, k, v, o: 0.25 ms per step with one adapter, 0.7 ms with 16, and 0.27 ms more where
# rows have two terms. Prefill: 22 us per token; the host needs 60 ms to launch a step with 16
# adapters that is too large for a graph, however few rows it has. Load: 2.1 MB per unit of rank
# over PCIe 5 at 50 GB/s.
H200_7B = CostModel(
    machine="NVIDIA H200",
    model="llama-7b",
    decode_seconds=(4.33e-3, 10e-6, 4.5e-6, 10e-6, 0.116e-6, 0.22e-3, 0.4e-6, 0.044e-6, 0.27e-3),
    prefill_seconds=(5e-3, 7e-6, 15e-6, 0.9e-6, 0.0, 0.12e-6, 2e-9, 1.5e-3, 0.4e-3, 0.65e-6,
                     0.03e-6, 0.7e-3),
    merge_seconds=(2.8e-3, 7e-6),
    unmerge_seconds=2.0e-3,
    load_seconds=(0.2e-3, 39e-6),
    captured_rows=PROMPT_SIZES,
    uncaptured_seconds=60e-3,
)  # fmt: skip


def _fit(
    rows: Sequence[tuple[Sequence[float], float]], prior: Sequence[float]
) -> tuple[float, ...]:
    """Fit coefficients by relative least squares; columns of zeros keep the prior's coefficient."""
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
    if points and len({rank for rank, _ in points}) == 1:
        # One rank says nothing about the slope: scale the prior to the median.
        rank = points[0][0]
        factor = float(np.median([t for _, t in points])) / (prior[0] + prior[1] * rank)
        return prior[0] * factor, prior[1] * factor
    fitted = _fit([((1.0, rank), t) for rank, t in points], prior)
    return fitted[0], fitted[1]


def nnls(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the x ≥ 0 that minimises ‖a x − b‖, of at most a dozen unknowns: the best subset."""
    q, r = np.linalg.qr(a)
    target = q.T @ b
    best, lowest = np.zeros(a.shape[1]), float(np.linalg.norm(target))
    for size in range(1, a.shape[1] + 1):
        for free in map(list, combinations(range(a.shape[1]), size)):
            trial = np.linalg.lstsq(r[:, free], target, rcond=None)[0]
            error = float(np.linalg.norm(r[:, free] @ trial - target))
            if error < lowest and trial.min() >= 0:
                best, lowest = np.zeros(a.shape[1]), error
                best[free] = trial
    return best
