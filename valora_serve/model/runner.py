"""Runs the model: one step of many requests, with their adapters, through paged attention."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from valora_data.cpu import usable_cores
from valora_data.wording import first_line
from valora_kernels.launching import compiling_together
from valora_kernels.metadata import NONE, LoraBatch
from valora_serve.errors import SettingsError
from valora_serve.memory.unified import AdapterMemory
from valora_serve.model.attention.base import (
    AttentionBackend,
    Compiling,
    KVCache,
    Rows,
    send_together,
    to_device,
    to_host,
)
from valora_serve.model.attention.registry import make_backend
from valora_serve.model.graphs import DecodeGraphs, Graph, Graphs, PromptGraphs, image_graphs
from valora_serve.model.linears import LinearGroup
from valora_serve.model.lmm import Lmm, VisualRows
from valora_serve.model.prompt import Visual, VisualFeatures
from valora_serve.model.sampler import (
    StepLogprobs,
    TokenChoice,
    finite_rows,
    mark_broken,
    sample,
    top_logprobs,
)
from valora_serve.model.work import (
    CROWDED,
    DECODE,
    KERNELS,
    MIXTURE,
    PROMPT,
    VISION,
    LoraTerms,
    Preparation,
    StepResources,
    StepResult,
    Work,
)

log = logging.getLogger(__name__)

MAX_THREADS = 16  # that compile kernels together
SCORED_ROWS = 256  # of a prompt whose logits are in memory at a time: 150 MB for 150,000 tokens


class ModelRunner(StepResources):
    """Computes steps, eagerly or by replaying a CUDA graph, and encodes images."""

    def __init__(
        self,
        lmm: Lmm,
        cache: KVCache,
        adapters: AdapterMemory,
        *,
        backend: str,  # name of the attention backend, or `AUTO`
        max_tokens: int,  # rows in a step
        max_requests: int,  # that run
        max_adapters: int,  # distinct ones in a step
        sizes: Mapping[str, Sequence[int]],  # of the graphs, by their kind
        left: Mapping[Preparation, None],  # see `StepResources.left`
    ) -> None:
        made = make_backend(backend, cache)
        super().__init__(lmm, cache, adapters, made, max_requests, max_adapters + 1, left)
        self._group = lmm.linears.group  # whose ranks make the same steps
        self._lora = LoraBatch(max_tokens, self.max_segments, self.device, scratch=self.scratch)
        self._decode_graphs = DecodeGraphs(self, sizes[DECODE])
        self._prompt_graphs = PromptGraphs(self, sizes.get(PROMPT, ()))
        self._crowded_graphs = self._make_crowded()
        self._vision_graphs = image_graphs(self, sizes.get(VISION, ()))
        self._compiling: Compiling | None = None
        # Set once that has ended, or nobody waits any more.
        self._wait_on = threading.Event()
        # Called in another thread once `adopt` may have something to do.
        self.on_compiled: Callable[[], None] = lambda: None
        # Whether any adapter was registered; until then no graph with LoRA is captured.
        self.has_lora = False

    def _make_crowded(self) -> PromptGraphs:
        """Graphs for steps in which many rows decode; of no size where the backend has none."""
        sizes = () if self.backend.crowd(1) is None else self._prompt_graphs.sizes
        return PromptGraphs(self, sizes, CROWDED)

    # ------------------------------------------------------------------ steps

    def step(self, works: Sequence[Work], merged: int) -> StepResult:
        """Enqueue a step of different requests; `merged` is the merged slot, or `NONE`."""
        terms = LoraTerms.of(works, merged)
        graph = self._decode_graphs.find(works, terms)
        with torch.inference_mode():
            if graph is not None:
                return self._replay(graph, works, terms)
            return self._eager(works, terms)

    def _replay(self, graph: Graph, works: Sequence[Work], terms: LoraTerms | None) -> StepResult:
        """A decode step from a graph; the graph itself takes the argmax of the logits."""
        logits, tokens, finite, slots = self._decode_graphs.replay(graph, works, terms)
        choices = [work.choice for work in works if work.choice is not None]
        if not all(choice.is_argmax for choice in choices):
            tokens = self._sample(logits, choices)
            self.last_tokens[slots] = tokens
        logprobs = self._logprobs(works, logits, tokens)
        told, copied = to_host(mark_broken(tokens, finite))
        return StepResult(told, logprobs, [None] * len(works), [], copied)

    def _eager(self, works: Sequence[Work], terms: LoraTerms | None) -> StepResult:
        counts = np.array([work.count for work in works], np.int64)
        starts = np.zeros(len(works) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        total = int(starts[-1])
        ids = np.zeros(total, np.int64)
        positions = np.empty((3, total), np.int64)
        placed = list(zip(works, starts.tolist(), strict=False))
        for work, at in placed:
            end = at + work.count
            positions[:, at:end] = np.arange(work.start, work.start + work.count) + work.delta
            if work.positions is not None:
                positions[:, at:end] = work.positions
            if work.tokens is not None:
                ids[at:end] = work.tokens
        decoding = [i for i, work in enumerate(works) if work.tokens is None]
        choosing = [i for i, work in enumerate(works) if work.choice is not None]
        chosen = [works[i] for i in choosing]
        keeping = [work.keep + at for work, at in placed if work.keep is not None]
        # Positions first: torch compiles layers again for one that begins elsewhere in memory.
        shown, tokens, own, at_own, ends, slots, keep = send_together(
            [
                positions if self.lmm.three_positions else positions[0],
                ids,
                starts[decoding].astype(np.int64),
                np.array([works[i].slot for i in decoding], np.int64),
                starts[1:][choosing].astype(np.int64) - 1,
                np.array([work.slot for work in chosen], np.int64),
                np.concatenate([np.zeros(0, np.int64), *keeping]),
            ],
            self.device,
        )
        if decoding:
            tokens[own] = self.last_tokens[at_own]
        lengths = np.array([work.start + work.count for work in works], np.int32)
        seen = _seen(works) if any(work.blocks for work in works) else None
        rows = Rows(starts, lengths, [work.table for work in works], seen)
        hidden = self._layers(tokens, shown, rows, terms, self._visual_rows(works, starts))
        parts = iter(hidden[keep].split([*map(len, keeping)]) if keeping else ())
        kept = [None if work.keep is None else next(parts) for work in works]
        prompts = [
            self._prompt_logprobs(work, hidden[at : at + len(work.targets)])
            for work, at in placed
            if work.targets
        ]
        if not chosen:  # the host still waits for its end before it is two steps ahead
            told, copied = to_host(torch.empty(0, dtype=torch.int64, device=self.device))
            return StepResult(told, None, kept, prompts, copied)
        logits = self.lmm.logits(hidden[ends])
        found = self._sample(logits, [work.choice for work in chosen if work.choice is not None])
        self.last_tokens[slots] = found
        logprobs = self._logprobs(chosen, logits, found)
        told, copied = to_host(mark_broken(found, finite_rows(logits)))
        return StepResult(told, logprobs, kept, prompts, copied)

    def _layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Rows,
        terms: LoraTerms | None,
        visual: VisualRows | None,
    ) -> Tensor:
        found = [self._prompt_graphs.find(rows, terms, visual)]
        # Asked first with those of the rows alone: `find` notes what is not captured yet.
        if self._is_crowd(rows, self._crowded_graphs.sequences_of(int(rows.starts[-1]))):
            crowded = self._crowded_graphs.find(rows, terms, visual)
            if crowded is not None and self._is_crowd(rows, crowded.sequences):
                found.insert(0, crowded)
        # Until all are captured, the one for crowds may have many times the rows of the other.
        fitting = [graph for graph in found if graph is not None]
        graph = min(fitting, key=lambda graph: len(graph.inputs[0]), default=None)
        if graph is not None:
            embedded = self.lmm.embed(tokens, visual)
            return self._prompt_graphs.replay(graph, embedded, positions, rows, terms)
        lora = None
        if terms is not None:
            lora = self._lora
            terms.fill(lora, self.adapters)
        with self.lmm.linears.scope.text(lora):
            plan = self.backend.plan(rows)
            return self.lmm.hidden(tokens, positions, plan, visual)

    def _is_crowd(self, rows: Rows, sequences: int) -> bool:
        crowd = self.backend.crowd(sequences)
        return crowd is not None and rows.decoding >= crowd

    def _visual_rows(self, works: Sequence[Work], starts: NDArray[np.int32]) -> VisualRows | None:
        rows, embeddings, deep = [], [], []
        for work, at in zip(works, starts.tolist(), strict=False):
            for offsets, features, which in work.visuals:
                rows.append(offsets + at)
                parts = [features.embeddings, *features.deep]
                if len(which) < len(features.embeddings):
                    index = self._send(which)
                    parts = [part[index] for part in parts]
                embeddings.append(parts[0])
                deep.append(parts[1:])
        if not rows:
            return None
        layers = max(map(len, deep))
        # Memory tokens have no such features, also beside images that do.
        whole = [
            own or [torch.zeros_like(embedded)] * layers
            for own, embedded in zip(deep, embeddings, strict=True)
        ]
        together = [torch.cat(layer) for layer in zip(*whole, strict=True)]
        found = VisualRows(self._send(np.concatenate(rows)), torch.cat(embeddings), together)
        if self._group is not None:  # images are encoded by rank 0
            for part in (found.embeddings, *found.deep):
                self._group.broadcast(part)
        return found

    def _sample(self, logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
        # The logits are the same in all ranks of a group, and chance is that of rank 0.
        if self._group is None or all(choice.is_argmax for choice in choices):
            return sample(logits, choices)
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=self.device)
        if self._group.rank == 0:
            tokens = sample(logits, choices)
        self._group.broadcast(tokens)
        return tokens

    def _logprobs(
        self, works: Sequence[Work], logits: Tensor, tokens: Tensor
    ) -> StepLogprobs | None:
        wanted = [work.logprobs for work in works if work.logprobs is not None]
        return top_logprobs(logits, tokens, max(wanted)) if wanted else None

    def _prompt_logprobs(self, work: Work, hidden: Tensor) -> StepLogprobs:
        targets = self._send(np.array(work.targets, np.int64)).split(SCORED_ROWS)
        parts = [
            top_logprobs(self.lmm.logits(rows), tokens, work.prompt_logprobs)
            for rows, tokens in zip(hidden.split(SCORED_ROWS), targets, strict=True)
        ]
        return StepLogprobs(*map(torch.cat, zip(*parts, strict=True)))

    def _send(self, values: NDArray[np.int64]) -> Tensor:
        return to_device(values, self.device)

    # ------------------------------------------------------------------ warm-up

    def take_lora(self) -> None:
        """Capture graphs with LoRA terms, too, from now on."""
        self.has_lora = True

    @property
    def _graphs(self) -> dict[str, Graphs]:
        return {
            DECODE: self._decode_graphs,
            PROMPT: self._prompt_graphs,
            CROWDED: self._crowded_graphs,
            VISION: self._vision_graphs,
        }

    def _terms(self, terms: Sequence[int]) -> list[int]:
        return [count for count in terms if self.has_lora or not count]

    @property
    def captured_prompts(self) -> tuple[int, ...]:
        """Numbers of rows of the steps with prompts that have a graph, ascending."""
        return tuple(self._prompt_graphs.sizes)

    def preparations(
        self, terms: Sequence[int] = (0, 1, 2)
    ) -> tuple[list[Preparation], list[Preparation]]:
        """Graphs that are not captured yet, and kernels: what serving waits for, and the rest.

        `terms` are numbers of LoRA terms per row: 0 without LoRA, 1 in unmerged mode, 2 in mixture
        mode, which needs a merged adapter and requests of others: no server has these at once.
        """
        found = [
            Preparation(kind, size, count)
            for kind, graphs in self._graphs.items()
            for count in self._terms(terms)
            for size in graphs.missing(count)
        ]
        largest = {kind: max(graphs.sizes, default=0) for kind, graphs in self._graphs.items()}
        found.sort(key=lambda one: one.order(largest[one.kind]))
        first = [
            one for one in found
            if one.terms != MIXTURE and (one.size == largest[one.kind] or one.likely)
            and one.kind != CROWDED  # graphs of any steps with prompts hold them until then
        ]  # fmt: skip
        rest = [one for one in found if one not in first]
        if self.device.type == "cuda":
            rest += self._kernel_runs(terms)
        return first, rest

    def prepare(self, wanted: Preparation) -> bool:
        """Capture a graph, or run kernels, between two steps; False if the backend has none."""
        if wanted.kind != KERNELS:
            return self._graphs[wanted.kind].capture(wanted.size, wanted.terms)
        self._compile(wanted)
        return True

    def give_up(self, wanted: Preparation) -> None:
        """Capture no graphs of a size, as there is no memory for them."""
        if wanted.kind != KERNELS:
            self._graphs[wanted.kind].give_up(wanted.size)

    def next_missed(self) -> Preparation | None:
        """Return the graph that a step has missed, the longest ago; None if none was missed."""
        return next((wanted for wanted in self.missed if wanted in self.left), None)

    def forget_graphs(self) -> None:
        """Drop all graphs, because weights or adapters have moved in memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for graphs in self._graphs.values():
            graphs.forget()
        self.recorder.forget()

    def tiled(self, terms: Sequence[int]) -> list[Preparation]:
        """Return what is prepared with tilings of the LoRA kernels: kernels and graphs."""
        held = (Preparation(kind, *k) for kind, one in self._graphs.items() for k in one.held)
        return [one for one in (*self._kernel_runs(terms), *held) if one.terms]

    def renew(self, wanted: Preparation) -> None:
        """Prepare something again, with the tilings that are chosen now, between two steps."""
        try:
            self.prepare(wanted)
        except torch.OutOfMemoryError:
            log.info("no memory to prepare %s with new tilings", wanted)

    # ------------------------------------------------------------------ kernels

    def compile_together(
        self, wanted: Sequence[Preparation], patience: float | None = None
    ) -> None:
        """Compile kernels on all cores: attention's, and those of `wanted` graphs."""
        if self._group is not None:  # split linears compute with all ranks only
            return
        backend = self.backend
        if self._compiling is None:
            awaited = patience is None or backend.stand_in is None
            self._compiling = Compiling(backend, self._end_waiting, awaited=awaited)
        compiling = self._compiling
        threads = usable_cores()
        if self.device.type == "cuda" and threads > 1:
            try:
                with compiling_together(min(threads, MAX_THREADS)):
                    self.run_linears(wanted)
            except Exception:
                log.warning("kernels are compiled one after the other", exc_info=True)
        if backend is not compiling.backend:
            return
        stand_in = backend.stand_in
        self._wait_on.wait(None if stand_in is None else patience)
        error = compiling.error
        if stand_in is None and error is not None:
            raise SettingsError(
                f"the kernels of the attention backend cannot be compiled ({first_line(error)}): "
                "see the log and `valora-serve --check`, or choose attention=auto or triton"
            ) from error
        if stand_in is not None and (compiling.running or error is not None):
            self._use(make_backend(stand_in, self.cache))
            why = "are being compiled" if error is None else "cannot be compiled"
            log.info("attention backend: %s, as kernels of the chosen one %s", stand_in, why)

    def _end_waiting(self) -> None:
        self._wait_on.set()
        self.on_compiled()

    def interrupt(self) -> None:
        """Let `compile_together` wait for attention's kernels no more; for any thread."""
        self._wait_on.set()

    def _use(self, backend: AttentionBackend) -> None:
        """Attend with another backend; graphs are replayed until they are captured with it."""
        self.backend = backend
        self._decode_graphs.renew_plans()
        self._prompt_graphs.renew_plans()
        self._crowded_graphs = self._make_crowded()

    @property
    def provisional(self) -> bool:
        """Whether a backend stands in for another one, until `adopt`."""
        compiling = self._compiling
        if compiling is None or compiling.error is not None:
            return False
        return self.backend is not compiling.backend

    def adopt(self) -> bool:
        """Let a backend take over that another stood in for; all graphs are left again."""
        compiling = self._compiling
        if compiling is None or compiling.running or not self.provisional:
            return False
        self._use(compiling.backend)
        log.info("attention's kernels are compiled, and used from now on")
        return True

    def run_linears(self, wanted: Sequence[Preparation]) -> None:
        """Run the language model's linears as the steps of graphs do, each shape of them once."""
        linears = self._linears_by_shape()
        for one in wanted:
            if one.kind in (DECODE, PROMPT):  # crowded ones have the linears of prompts
                lora = self._graphs[one.kind].typical(one.size, one.terms)
                with torch.inference_mode(), self.lmm.linears.scope.text(lora):
                    self._run(linears, one.size)
        self.lmm.linears.scope.last = None

    def _linears_by_shape(self) -> list[LinearGroup]:
        found = {
            (group.spec.in_features, group.spec.out_features, group.lora is None): group
            for group in self.lmm.linears.groups.values()
            if group.spec.part == "text"
        }
        return list(found.values())

    def _run(self, linears: Iterable[LinearGroup], rows: int) -> None:
        for group in linears:
            shape = (rows, group.spec.in_features)
            group.compute(torch.zeros(shape, dtype=self.lmm.dtype, device=self.device))

    def _kernel_runs(self, terms: Sequence[int]) -> Iterator[Preparation]:
        """Yield runs of a whole step (size 0), and of linears by rows with an adapter."""
        for count in self._terms(terms):
            yield Preparation(KERNELS, 0, count)
            if count:
                for active in _doublings(self._lora.max_rows):
                    yield Preparation(KERNELS, active, count)

    def _compile(self, wanted: Preparation) -> None:
        lmm = self.lmm
        max_rows, active = self._lora.max_rows, wanted.size
        min_rows = min(max(self.captured_prompts, default=0) + 1, max_rows)
        lora = self._lora if wanted.terms else None
        with torch.inference_mode(), lmm.linears.scope.text(lora):
            if not active:
                self._run_prompt(min(2 * min_rows, max_rows), wanted.terms)
            else:
                linears = [one for one in self._linears_by_shape() if one.lora is not None]
                rows = max(active, min_rows)
                for distinct in _doublings(self.max_segments - 1):
                    if distinct > active:
                        break
                    self.fill_typical(self._lora, rows, wanted.terms, active, distinct)
                    self._run(linears, rows)
        lmm.linears.scope.last = None

    def _run_prompt(self, rows: int, terms: int) -> None:
        """Run a step of one prompt, whose keys and values are written to page 0."""
        shape = (3, rows) if self.lmm.three_positions else (rows,)
        positions = torch.zeros(shape, dtype=torch.int64, device=self.device)
        table = [0] * -(-rows // self.cache.block_size)
        one = Rows(np.array([0, rows], np.int32), np.array([rows], np.int32), [table])
        if terms:
            self.fill_typical(self._lora, rows, terms, rows, 1)
        kinds = [one]
        if self.lmm.block:  # another kernel computes steps with images
            kinds.append(replace(one, seen=np.full(rows, rows, np.int32)))
        for kind in kinds:
            plan = self.backend.plan(kind)
            self.lmm.hidden(positions.new_zeros(rows), positions, plan)

    # ------------------------------------------------------------------ images

    def encode(
        self, visuals: Sequence[Visual], adapters: Sequence[int], merged: int = NONE
    ) -> list[VisualFeatures]:
        """Encode visuals of one kind and shape; `adapters` and `merged` are slots, or `NONE`.

        Images of others beside the merged adapter's have all pristine weights: no term has to take
        it out again, which would cost time and digits.
        """
        changes = np.append(self.adapters.vision, False)  # that of `NONE` at the end
        own = np.array(adapters, np.int64)
        own[~changes[own]] = NONE
        merged = merged if changes[merged] else NONE
        counts = [next(iter(visual.tensors.values())).shape[0] for visual in visuals]
        batches: dict[int, LoraBatch] = {}

        def batch_of(rows: int) -> LoraBatch:
            """Adapters of the `rows` rows of a linear's input, a fixed share for each visual."""
            if rows not in batches:
                each = np.array(counts, np.int64) * rows // sum(counts)
                batches[rows] = LoraBatch(rows, len(own), self.device)
                terms = LoraTerms(own[:, None], np.ones((len(own), 1), np.float32), each)
                terms.fill(batches[rows], self.adapters)
            return batches[rows]

        linears = self.lmm.linears
        with torch.inference_mode():
            if (own == merged).all():
                found = self._vision_graphs.encode(visuals)
                return self.lmm.encode(visuals) if found is None else found
            apart = nullcontext() if merged == NONE else linears.without_merged("vision")
            with apart, linears.scope.part("vision", batch_of):
                return self.lmm.encode(visuals)


def _seen(works: Sequence[Work]) -> NDArray[np.int32]:
    """Return how many tokens of its sequence each row sees, see `Rows.seen`."""
    found = [np.arange(one.start + 1, one.start + one.count + 1, dtype=np.int32) for one in works]
    for work, own in zip(works, found, strict=True):
        for first, end in work.blocks:
            own[first - work.start : end - work.start] = end
    return np.concatenate(found)


def _doublings(max_rows: int) -> list[int]:
    """Numbers from 1 to `max_rows` in geometric steps, two for each doubling."""
    steps = np.geomspace(1, max_rows, num=1 + 2 * max(max_rows - 1, 0).bit_length())
    return sorted({round(step) for step in steps.tolist()})
