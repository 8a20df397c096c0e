"""Measures what steps, switches and loads cost on this machine (VaLoRA §4.4)."""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from PIL import Image

from valora_kernels.metadata import NONE
from valora_serve.engine.engine import Engine
from valora_serve.engine.sizing import machine_of
from valora_serve.errors import ServeError, StoppedError
from valora_serve.memory.block_manager import Owner
from valora_serve.model.prompt import Prompt, Visual
from valora_serve.model.sampler import TokenChoice
from valora_serve.model.work import Work
from valora_serve.orchestrator.cost_model import CostModel, StepShape, step_shape
from valora_serve.orchestrator.decision import RequestView
from valora_serve.types import Mode, Request, SamplingParams

log = logging.getLogger(__name__)

DECODE_ROWS = (1, 8, 32, 64, 128, 256, 512)  # decoding requests of a measured step
CONTEXTS = (32, 512)  # their tokens in the KV cache
PREFILL_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # prompt tokens of one
# Decoding requests beside them, and their tokens in the KV cache: few, and as many as there are
# pages for, which other kernels read. From few alone a fit made these cost three times as much, and
# prompts were held back for nothing.
BESIDE = ((8, 256), (128, 512))
IMAGES, SIDE = (1, 8), 448  # new images of a measured step, and their pixels in a row
# The same for a CPU, where a start should not wait for more. Prompt tokens are those at which
# slopes change: between two others, a fit made the first 128 free, and policies liked such steps.
FEW_ROWS, FEW_CONTEXTS, FEW_TOKENS, FEW_IMAGES = (1, 8, 32), (32,), (64, 128, 256), (1, 4)
ADAPTERS, LOAD_WAIT = 16, 5.0  # most adapters to load, and most seconds to wait for each
MERGED_ADAPTERS, REPEATS = 3, 5  # most adapters whose merging is timed, and merges of each
ROUNDS = 2  # of a CPU, which others use: of each step the fastest counts
SECONDS = 60.0  # most to spend on steps; the model is fitted to what was measured until then


class Step(NamedTuple):
    """A step to measure."""

    shape: StepShape
    works: list[Work]
    merged: str | None  # key of the adapter that is merged into the weights
    visuals: Sequence[Visual] = ()  # to encode before, as many for each work


def ensure_costs(engine: Engine) -> None:
    """Measure and save the costs of this machine, unless settings or requests forbid it."""
    if lacks_costs(engine) and not engine.busy and (costs := measure(engine)) is not None:
        adopt(engine, costs)


def lacks_costs(engine: Engine) -> bool:
    """Whether the costs of this machine should be measured, if only for those of adapters."""
    cost = engine.cost
    # What a token costs with a rank of 8 says little about one of 64.
    known = cost.measured and max(engine.registry.ranks.values(), default=0) <= cost.lora_rank
    return engine.settings.profile and not known


def adopt(engine: Engine, costs: CostModel) -> None:
    """Decide with costs from now on, and save them for later starts if the disk allows it."""
    folder = engine.settings.folder("cost")
    try:
        costs.save(folder)
    except OSError as error:
        log.warning(
            "the costs of this machine are measured again at the next start, as %s cannot be "
            "written (%s): let the server write there, or name another folder with --cost-folder",
            folder, error.strerror,
        )  # fmt: skip
    engine.use(costs)


def measure(engine: Engine, seconds: float = SECONDS) -> CostModel | None:
    """Measure an engine without requests, and fit a cost model; None (see the log) if it fails."""
    profiler = Profiler(engine, seconds)
    while profiler.found is None and not profiler.failed:
        profiler.go_on()
    return profiler.found


class Profiler:
    """Measures an engine piece by piece; `found` is the cost model, unless it has `failed`."""

    def __init__(self, engine: Engine, seconds: float = SECONDS) -> None:
        self.found: CostModel | None = None
        self.failed = False
        self._engine, self._seconds, self._spent = engine, seconds, 0.0
        self._points: dict[StepShape, list[float]] = {}
        self._loads: list[tuple[int, float]] = []
        self._uncaptured: float | None = None  # seconds of a step that no graph holds
        self._work: Iterator[CostModel | None] | None = None

    def go_on(self) -> None:
        """Measure one thing more; an adapter may be merged afterwards, until `pause`."""
        engine, start = self._engine, time.monotonic()
        assert not engine.busy
        self._work = self._work or self._measure()
        try:
            self.found = next(self._work)
        except StoppedError:
            raise
        except Exception:  # requests can be answered without it
            log.exception("costs are not measured: estimates stay in use")
            self.failed = True
            self.pause()
        self._spent += time.monotonic() - start
        if self.found is not None:
            log.info("measured %d steps in %.0f s", len(self._points), self._spent)
            self.pause()

    def pause(self) -> None:
        """Leave the engine to others; the weights are pristine afterwards."""
        if self._work is not None:
            self._work = None
            _merge(self._engine, None)

    def _measure(self) -> Iterator[CostModel | None]:
        """Measure what is not measured yet; yields None, and in the end the result."""
        engine, points = self._engine, self._points
        self._loads += _load(engine)
        yield None
        captured = engine.runner.captured_prompts
        if captured and captured[-1] < engine.settings.max_tokens and self._uncaptured is None:
            large = _uncaptured(engine, captured[-1])
            self._uncaptured = 0.0 if large is None else _time(engine, large)
            yield None
        for round_ in range(1 if engine.device.type == "cuda" else ROUNDS):
            for step in _steps(engine):
                if self._spent > self._seconds:
                    break
                times = points.setdefault(step.shape, [])
                if len(times) <= round_:
                    _merge(engine, step.merged)
                    times.append(_time(engine, step))
                    yield None
        merges, unmerges = [], []
        for key in _mergeable(engine)[:MERGED_ADAPTERS]:
            rank = int(engine.adapters.ranks[engine.adapters[key].slot])
            _merge(engine, key)  # the first time, the merged weights are checked
            _merge(engine, None)
            for _ in range(REPEATS):
                merges.append((rank, _switch_time(engine, key)))
                unmerges.append(_switch_time(engine, None))
            yield None
        yield engine.cost.fit(
            [(shape, min(times)) for shape, times in points.items()],
            machine=machine_of(engine.settings, engine.device, engine.lmm.dtype),
            model=engine.lmm.base,
            merges=merges,
            unmerges=unmerges,
            loads=self._loads,
            captured_rows=captured,
            uncaptured_seconds=self._uncaptured or 0.0,
            lora_rank=max(engine.registry.ranks.values(), default=0),
        )


def _mergeable(engine: Engine) -> list[str]:
    adapters = engine.adapters
    found = _widest(engine, adapters.resident - adapters.unmergeable.keys())
    return found if engine.lmm.linears.merged else []


def _widest(engine: Engine, keys: Iterable[str]) -> list[str]:
    """Adapters by rank, the largest first."""
    return sorted(keys, key=lambda key: (-engine.registry.ranks.get(key, 0), key))


def _load(engine: Engine) -> list[tuple[int, float]]:
    """Load adapters; return rank and seconds of each that was not on the device."""
    times = []
    adapters = engine.adapters
    for key in _widest(engine, engine.registry.ranks)[:ADAPTERS]:
        if key in adapters.resident:
            continue
        start = time.perf_counter()
        try:
            if not adapters.load(key):
                break
            while not adapters.ready(key) and time.perf_counter() - start < LOAD_WAIT:
                time.sleep(1e-4)
        except ServeError as error:  # its requests get the same answer
            log.warning("costs are measured without an adapter: %s", error)
            continue
        seconds = time.perf_counter() - start
        if key in adapters.resident:
            times.append((int(adapters.ranks[adapters[key].slot]), seconds))
    return times


def _steps(engine: Engine) -> Iterator[Step]:
    limit = min(len(engine.adapters.resident), engine.settings.max_adapters)
    mixes: list[tuple[Mode, str | None, int]] = [(Mode.UNMERGED, None, 0)]
    if limit:
        mixes += [(Mode.UNMERGED, None, 1), (Mode.UNMERGED, None, limit)]
        if mergeable := _mergeable(engine):
            mixes.append((Mode.MIXTURE, mergeable[0], limit))
    settings, cuda = engine.settings, engine.device.type == "cuda"
    max_rows = min(settings.max_requests, settings.max_tokens)
    batches: list[tuple[list[tuple[int, int]], Sequence[Visual]]] = [
        ([(context, 1)] * rows, ())
        for context in (CONTEXTS if cuda else FEW_CONTEXTS)
        for rows in (DECODE_ROWS if cuda else FEW_ROWS)
        if rows <= max_rows and context + 1 < engine.context_length
    ]
    if (prompt := _picture(engine)) is not None:
        for count in IMAGES if cuda else FEW_IMAGES:
            if count <= settings.max_requests and count * len(prompt.ids) <= settings.max_tokens:
                batches.append(([(0, len(prompt.ids))] * count, prompt.visuals))
    if settings.max_requests >= 4 and settings.max_tokens >= 4 * 64:  # whose tokens see few others
        batches.append(([(0, 64)] * 4, ()))
    batches += [(rows, ()) for rows in _prompts(engine)]
    # A step's mixes one after the other: whatever slows the machine down meanwhile slows all.
    for rows, visuals in batches:
        for mix in mixes:
            if (step := make_step(engine, *mix, rows, visuals)) is not None:
                yield step


def _prompts(engine: Engine) -> Iterator[list[tuple[int, int]]]:
    """Rows of steps with a prompt, alone and beside decoding requests."""
    settings, cuda = engine.settings, engine.device.type == "cuda"
    for tokens in PREFILL_TOKENS if cuda else FEW_TOKENS:
        if tokens > min(settings.max_tokens, settings.chunk, engine.context_length - 1):
            return
        yield [(0, tokens)]
        room = engine.pool.free * settings.block_size - tokens
        for count, length in BESIDE if cuda else BESIDE[:1]:
            context = min(length, engine.context_length - 2)
            fit = max(0, room // (context + settings.block_size))
            if tokens > max(64, few := min(count, settings.max_requests - 1, fit)):
                yield [(0, tokens - few), *[(context, 1)] * few]


def _picture(engine: Engine) -> Prompt | None:
    """A prompt about an image; None if the base model reads text alone."""
    images = [Image.new("RGB", (SIDE, SIDE))]
    asked = Request.about(images, "What is it?", video=False, id="picture")
    with contextlib.suppress(ServeError):
        return engine.prepare(asked).prompt
    return None


def _uncaptured(engine: Engine, captured: int) -> Step | None:
    """Return the smallest step that no graph holds: few prompts beside many decoding requests."""
    few = min(4, engine.settings.max_requests)
    rows = [(CONTEXTS[0], 1)] * min(64, engine.settings.max_requests - few, captured // 2)
    each, more = divmod(captured + 1 - len(rows), few)
    rows = [*((0, each + (number < more)) for number in range(few)), *rows]
    if any(context + tokens >= engine.context_length for context, tokens in rows):
        return None
    distinct = min(len(engine.adapters.resident), engine.settings.max_adapters)
    return make_step(engine, Mode.UNMERGED, None, distinct, rows)


def make_step(
    engine: Engine,
    mode: Mode,
    merged: str | None,
    distinct: int,
    rows: list[tuple[int, int]],
    visuals: Sequence[Visual] = (),
) -> Step | None:
    """Return a step of rows (tokens in the KV cache, tokens to compute), None if pages lack.

    Each has the `visuals`. Pages are free, and nobody takes them while the engine is idle.
    """
    adapters, size = engine.adapters, engine.settings.block_size
    resident = _widest(engine, adapters.resident)[:distinct]
    needed = sum(-(-(context + tokens) // size) for context, tokens in rows)
    pages = engine.pool.take(needed, Owner.KV) if needed <= engine.pool.free else None
    if pages is None:
        return None
    for page in pages:
        engine.pool.give(page)
    choice = TokenChoice(SamplingParams(max_tokens=1))
    works, batch = [], []
    rest = iter(pages)
    for number, (context, tokens) in enumerate(rows):
        key = resident[number % distinct] if distinct else None
        slot = NONE if key is None else adapters[key].slot
        rank = 0 if key is None else int(adapters.ranks[slot])
        table = [next(rest) for _ in range(-(-(context + tokens) // size))]
        decoding = tokens == 1
        ids = None if decoding else [3 + token % 1000 for token in range(tokens)]
        works.append(Work(number, context, tokens, ids, table, slot, choice=choice))
        left = 0 if decoding else tokens
        view = RequestView(str(number), key, rank, 0.0, left, context, images=len(visuals))
        batch.append((view, tokens))
    ranks = {key: int(adapters.ranks[adapters[key].slot]) for key in adapters.resident}
    return Step(step_shape(mode, merged, batch, ranks), works, merged, visuals)


def _time(engine: Engine, step: Step) -> float:
    """Return the seconds of a step among others.

    On a GPU these are what three more steps take: the planning of all but the first hides behind
    the one before. On a CPU, whatever else runs makes some steps slower: the fastest counts.
    """
    slot = engine.merge_state.slot
    visuals = [visual for _ in step.works for visual in step.visuals]
    slots = [work.adapter for work in step.works for _ in step.visuals]

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            if visuals:
                engine.runner.encode(visuals, slots, slot)
            last = engine.runner.step(step.works, slot)
        last.read()
        return time.perf_counter() - start

    run(1)
    once = min(run(1), run(1))
    return once if engine.device.type != "cuda" else (min(run(4), run(4)) - once) / 3


def _merge(engine: Engine, key: str | None) -> None:
    """Merge an adapter into the weights, or none; no request needed it, so it is not counted."""
    state, switches = engine.merge_state, engine.merge_state.switches
    state.switch(Mode.UNMERGED if key is None else Mode.MIXTURE, key)
    state.switches = switches


def _switch_time(engine: Engine, key: str | None) -> float:
    wait = torch.cuda.synchronize if engine.device.type == "cuda" else torch.cpu.synchronize
    wait(engine.device)
    start = time.perf_counter()
    _merge(engine, key)
    wait(engine.device)
    return time.perf_counter() - start
