"""What the leader of a tensor-parallel group tells the others, and what they do: in lockstep.

The leader decides; it has the queue, the policy and the HTTP side. Before it touches its GPU it
tells the followers the same: a step's plan, a merge, the copy of an adapter. They do it in the same
order, so that their collectives meet. A plan holds no tensors, and of page tables only what is new.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from valora_data.contract.base_model import file_hash
from valora_data.contract.contexts import FILE_BYTES
from valora_data.contract.files import read_safetensors
from valora_serve.catalogue.adapters import read_adapter
from valora_serve.errors import AdapterError
from valora_serve.memory.prefix_memory import pack_prefix
from valora_serve.memory.unified import UnifiedMemory
from valora_serve.model.lmm import VisualRows
from valora_serve.model.prompt import VisualFeatures
from valora_serve.model.runner import ModelRunner
from valora_serve.model.sampler import TokenChoice, sample
from valora_serve.model.work import Work
from valora_serve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from valora_serve.catalogue.adapters import Adapter
    from valora_serve.engine.crew import Crew
    from valora_serve.memory.prefix_memory import PackedPrefix
    from valora_serve.memory.unified import PackedAdapter, PackedPages
    from valora_serve.model.preparation import Preparation
    from valora_serve.model.prompt import Visual
    from valora_serve.model.work import AdapterTable, StepResult
    from valora_serve.parallel.group import Group

NOTHING, ARGMAX, CHOSEN = range(3)
"""How a follower gets the next token of a row: none, from the logits, or from the leader."""

_CHOICES = (
    None,
    TokenChoice(SamplingParams(temperature=0.0)),
    TokenChoice(SamplingParams(temperature=1.0)),
)

IMAGES_EACH = 1
"""Images per GPU from which on they are shared out: one image is not worth sending its pixels."""


class WorkPlan(NamedTuple):
    """What a follower must know of a `Work`.

    Attributes:
        work: The work without what only the leader needs.
        kept: Pages of the place's last table that are still right.
        pages: Pages that follow them.
        choice: `NOTHING`, `ARGMAX` or `CHOSEN`.
        visuals: For each image in the share, its rows and the number of deeper features.
    """

    work: Work
    kept: int
    pages: list[int]
    choice: int
    visuals: list[tuple[NDArray[np.int64], int]]


class Tables:
    """The page table that each place had in the last step, on both sides."""

    def __init__(self) -> None:
        self._last: dict[int, list[int]] = {}

    def shorten(self, place: int, table: Sequence[int]) -> tuple[int, list[int]]:
        """Return how much of a place's last table still holds, and what follows."""
        last = self._last.get(place, [])
        kept = len(last)
        if list(table[:kept]) != last:
            kept = 0
        self._last[place] = list(table)
        return kept, list(table[kept:])

    def extend(self, place: int, kept: int, pages: list[int]) -> list[int]:
        """Return the whole table from what `shorten` returned."""
        self._last[place] = table = self._last.get(place, [])[:kept] + pages
        return table


class _GroupRunner(ModelRunner):
    """What leader and followers share.

    Args:
        group: The processes.
        arguments: Arguments of `ModelRunner`.
        more: Further ones.
    """

    def __init__(self, group: Group, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._group = group

    def compile_together(
        self, wanted: Sequence[Preparation], patience: float | None = None
    ) -> None:
        """Do nothing: split linears compute with all processes only, in the same order."""

    def _sample(self, logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
        """Choose tokens; where chance or a constraint decides, the leader does for all."""
        if all(choice.is_argmax for choice in choices):
            return sample(logits, choices)  # the logits are the same in all processes
        tokens = sample(logits, choices) if self._group.leads else self._empty_tokens(len(logits))
        self._group.broadcast(tokens)
        return tokens

    def _empty_tokens(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._device)


class LeadingRunner(_GroupRunner):
    """The runner of the leader: tells the followers every step before it computes it.

    Args:
        crew: The followers.
        arguments: Arguments of `ModelRunner`.
        more: Further ones.
    """

    def __init__(self, crew: Crew, *arguments: Any, **more: Any) -> None:
        super().__init__(crew.group, *arguments, **more)
        self._crew, self._tables = crew, Tables()
        self._told = b""

    def step(self, works: Sequence[Work], merged: int) -> StepResult:
        """Enqueue a step on all GPUs; see `ModelRunner.step`."""
        self._tell("step", [self._plan(work) for work in works], merged)
        return super().step(works, merged)

    def _plan(self, work: Work) -> WorkPlan:
        kept, pages = self._tables.shorten(work.place, work.table)
        choice = NOTHING
        if work.choice is not None:
            choice = ARGMAX if work.choice.is_argmax else CHOSEN
        visuals = [(rows, len(features.deep)) for rows, features, _ in work.visuals]
        told = replace(work, table=(), visuals=(), choice=None, logprobs=None, prompt_logprobs=0)
        return WorkPlan(told, kept, pages, choice, visuals)

    def _visual_rows(self, works: Sequence[Work], starts: NDArray[np.int32]) -> VisualRows | None:
        found = super()._visual_rows(works, starts)
        if found is None:
            return None
        dtype = self._lmm.dtype
        found.embeddings = found.embeddings.to(dtype).contiguous()
        found.deep = [layer.to(dtype).contiguous() for layer in found.deep]
        for part in (found.embeddings, *found.deep):
            self._group.broadcast(part)
        return found

    def capture(self, terms: Sequence[int] = (0, 1, 2)) -> int:
        """Capture graphs on all GPUs, in the same order; see `ModelRunner.capture`."""
        self._tell("capture", tuple(terms))
        return super().capture(terms)

    def prepare(self, wanted: Preparation) -> bool:
        """Capture a graph, or run kernels, on all GPUs; see `ModelRunner.prepare`."""
        self._tell("prepare", wanted)
        return super().prepare(wanted)

    def give_up(self, wanted: Preparation) -> None:
        """Capture no graphs of a size on any GPU; see `ModelRunner.give_up`."""
        self._tell("give_up", wanted)
        super().give_up(wanted)

    def forget_graphs(self) -> None:
        """Drop all graphs on all GPUs."""
        self._tell("forget_graphs")
        super().forget_graphs()

    def compile_kernels(self, terms: Sequence[int] = (0, 1, 2)) -> None:
        """Run the kernels of all other steps on all GPUs; see `ModelRunner.compile_kernels`."""
        self._tell("compile_kernels", tuple(terms))
        super().compile_kernels(terms)

    def encode(self, visuals: Sequence[Visual], adapters: Sequence[int]) -> list[VisualFeatures]:
        """Encode images or videos, shared out over the GPUs if there are enough of them.

        Args:
            visuals: As in `ModelRunner.encode`.
            adapters: As there.

        Raises:
            RuntimeError: A follower could not encode its share.
        """
        size = self._group.size
        if len(visuals) < size * IMAGES_EACH:
            return super().encode(visuals, adapters)
        shares = _deal([_pixels(visual) for visual in visuals], size)
        with self._crew.explained():
            for number, share in enumerate(shares[1:], start=1):
                own = slice(*share)
                self._send_images(number, visuals[own], adapters[own])
        found: list[VisualFeatures] = []
        error: Exception | None = None
        try:
            own = slice(*shares[0])
            found += super().encode(visuals[own], adapters[own])
        except Exception as wrong:  # noqa: BLE001 - the others' shares must be taken first
            error = wrong
        for number, share in enumerate(shares[1:], start=1):
            with self._crew.explained():
                taken = self._take(number, [len(visuals[i].at) for i in range(*share)])
            if taken is None:
                error = error or RuntimeError(f"GPU {number} could not encode its images")
            else:
                found += taken
        if error is not None:
            raise error
        return found

    def _send_images(self, rank: int, visuals: Sequence[Visual], adapters: Sequence[int]) -> None:
        """Let a follower encode images: pixels go from GPU to GPU, all else with the plan."""
        pixels, plans = [], []
        for visual in visuals:
            first, *others = visual.tensors.items()
            pixels.append(first[1].reshape(-1))
            plans.append((first[0], tuple(first[1].shape), [(n, v.numpy()) for n, v in others]))
        self._tell_one(rank, "encode", plans, list(adapters))
        flat = torch.cat(pixels).to(self._device).to(self._lmm.dtype)
        self._group.send(flat, rank)

    def _take(self, source: int, counts: Sequence[int]) -> list[VisualFeatures] | None:
        """Receive what a follower encoded; None if it could not."""
        deep = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._group.receive(deep, source)
        if int(deep) < 0:
            return None
        layers = []
        for _ in range(1 + int(deep)):
            layer = torch.zeros(
                (sum(counts), self._lmm.width), dtype=self._lmm.dtype, device=self._device
            )
            self._group.receive(layer, source)
            layers.append(layer.split(list(counts)))
        return [VisualFeatures(one[0], one[1:]) for one in zip(*layers, strict=True)]

    def _tell(self, name: str, *arguments: object) -> None:
        self._crew.tell(name, *arguments, table=self._news())

    def _tell_one(self, rank: int, name: str, *arguments: object) -> None:
        if (news := self._news()) is not None:
            self._crew.tell("adapters", table=news)
        self._crew.tell_one(rank, name, *arguments)

    def _news(self) -> tuple[bytes, bytes] | None:
        """Ranks and scalings of the slots, if they have changed since the followers heard them."""
        ranks, scalings = self._adapters.ranks.tobytes(), self._adapters.scalings.tobytes()
        if ranks + scalings == self._told:
            return None
        self._told = ranks + scalings
        return ranks, scalings


class FollowingRunner(_GroupRunner):
    """The runner of a follower: computes what the leader's does."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._tables = Tables()

    def follow(self, plans: Sequence[WorkPlan], merged: int) -> None:
        """Enqueue a step of the leader."""
        works = []
        for plan in plans:
            work = plan.work
            work.table = self._tables.extend(work.place, plan.kept, plan.pages)
            work.choice = _CHOICES[plan.choice]
            work.visuals = plan.visuals  # type: ignore[assignment]
            works.append(work)
        self.step(works, merged)

    def _visual_rows(self, works: Sequence[Work], starts: NDArray[np.int32]) -> VisualRows | None:
        images: list[tuple[NDArray[np.int64], int]] = []
        for work, at in zip(works, starts.tolist(), strict=False):
            told: Any = work.visuals
            images += [(offsets + at, deep) for offsets, deep in told]
        if not images:
            return None
        rows = np.concatenate([one for one, _ in images])
        shape = (len(rows), self._lmm.width)
        parts = []
        for _ in range(1 + max(deep for _, deep in images)):
            part = torch.zeros(shape, dtype=self._lmm.dtype, device=self._device)
            self._group.broadcast(part)
            parts.append(part)
        return VisualRows(self._send(rows), parts[0], parts[1:])

    def encode_share(
        self,
        plans: Sequence[tuple[str, tuple[int, ...], list[tuple[str, NDArray[np.int64]]]]],
        adapters: Sequence[int],
    ) -> None:
        """Encode images for the leader, and send it their features.

        Args:
            plans: For each image, name and shape of its pixels, and its other tensors by name.
            adapters: Slots, as in `ModelRunner.encode`.
        """
        sizes = [math.prod(shape) for _, shape, _ in plans]
        flat = torch.zeros(sum(sizes), dtype=self._lmm.dtype, device=self._device)
        self._group.receive(flat, 0)
        visuals: list[Any] = []
        for (name, shape, others), pixels in zip(plans, flat.split(sizes), strict=True):
            tensors = {name: pixels.view(shape)}
            tensors |= {other: torch.from_numpy(values) for other, values in others}
            visuals.append(SimpleNamespace(tensors=tensors))
        try:
            found = self.encode(visuals, adapters)
        except Exception:  # noqa: BLE001 - the leader finds out which image it is
            self._group.send(torch.full((1,), -1, dtype=torch.int64, device=self._device), 0)
            return
        deep = len(found[0].deep)
        self._group.send(torch.full((1,), deep, dtype=torch.int64, device=self._device), 0)
        dtype = self._lmm.dtype
        self._group.send(torch.cat([one.embeddings for one in found]).to(dtype), 0)
        for layer in range(deep):
            self._group.send(torch.cat([one.deep[layer] for one in found]).to(dtype), 0)


class LeadingMemory(UnifiedMemory):
    """The leader's memory: the followers pack and copy their parts of the same adapters.

    Args:
        crew: The followers.
        arguments: Arguments of `UnifiedMemory`.
        more: Further ones.
    """

    def __init__(self, crew: Crew, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._crew = crew
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()
        self._tickets: dict[int, int] = {}  # of the last copy into each slot
        self._page_tickets: dict[int, int] = {}  # of the last prefix from each page on

    @contextlib.contextmanager
    def packing(self, source: Path, content: str) -> Iterator[Callable[[object], None]]:
        """Context in which all processes pack their part; see `UnifiedMemory.packing`."""
        number = next(self._next)
        made: list[object] = []
        finish = self._crew.start_packing(number, source, content)
        try:
            try:
                yield made.append
            finally:
                finish()
        except BaseException:
            self._crew.drop(number)
            raise
        (packed,) = made
        self._numbers[packed] = number
        weakref.finalize(packed, self._crew.drop, number).atexit = False

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Lay out an adapter in the host memory of all processes; see `UnifiedMemory.pack`."""
        with self.packing(adapter.folder, adapter.content) as note:
            packed = super().pack(adapter)
            note(packed)
        return packed

    def write_pages(self, packed: PackedPages, pages: Sequence[int]) -> None:
        """Copy a prefix to all devices, on the current stream; see `UnifiedMemory.write_pages`."""
        self._page_tickets[pages[0]] = ticket = self._crew.ticket()
        self._crew.tell("write_pages", self._numbers[packed], list(pages), ticket)
        super().write_pages(packed, pages)
        if self.device.type != "cuda":
            self._crew.wait(ticket)

    def pages_have_arrived(self, pages: Sequence[int]) -> bool:
        """Return whether every follower has copied its part of a prefix."""
        return self._crew.is_done(self._page_tickets[pages[0]])

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page on all devices, on the current stream."""
        self._crew.tell("copy_page", source, target)
        super().copy_page(source, target)

    def write(self, packed: PackedAdapter, pages: Sequence[int], slot: int) -> None:
        """Copy an adapter to all devices, on the current stream; see `UnifiedMemory.write`."""
        self._tickets[slot] = ticket = self._crew.ticket()
        self._crew.tell("write", self._numbers[packed], list(pages), slot, ticket)
        super().write(packed, pages, slot)
        if self.device.type != "cuda":
            self._crew.wait(ticket)

    def has_arrived(self, slot: int) -> bool:
        """Return whether every follower has the adapter of a slot."""
        return self._crew.is_done(self._tickets[slot])


class FollowingAdapters:
    """A follower's parts of adapters and prefixes: packed and copied when the leader does.

    Args:
        memory: The follower's memory.
        table: Its ranks and scalings of the slots, which steps read.
        targets: Linear layers that adapters name.
        heads: Heads of keys and values that the follower holds.
        done: Called with the ticket of a copy that is complete, from any thread.
    """

    def __init__(
        self,
        memory: UnifiedMemory,
        table: AdapterTable,
        targets: Any,
        heads: slice,
        done: Callable[[int], None],
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._memory, self._table, self._targets, self._done = memory, table, targets, done
        self._heads = heads
        self._packed: dict[int, Any] = {}  # `PackedAdapter` or `PackedPrefix`
        self._cuda = memory.device.type == "cuda"
        self._stream = torch.cuda.Stream(memory.device) if self._cuda else None
        self._waiting = ThreadPoolExecutor(1, "copies")

    def pack(self, number: int, folder: Path, content: str) -> None:
        """Read an adapter and pack this process's part; called from the loading thread.

        Raises:
            AdapterError: The folder cannot be read, or holds another adapter by now.
        """
        if folder.is_file():
            self._packed[number] = self._pack_prefix(folder, content)
            return
        adapter = read_adapter(folder, self._targets)
        if adapter.content != content:
            raise AdapterError(f"adapter {folder} was changed while it was loaded: load it again")
        self._packed[number] = self._memory.pack(adapter)

    def _pack_prefix(self, file: Path, content: str) -> PackedPrefix:
        """Pack the part of a prefix whose file the leader has checked."""
        if file_hash(file) != content:
            raise AdapterError(f"{file} was changed while it was loaded: load it again")
        _, tensors = read_safetensors(file, FILE_BYTES)
        keys, values = (tensors[name][:, self._heads] for name in ("keys", "values"))
        return pack_prefix(self._memory, file.stem, content, keys, values)

    def drop(self, number: int) -> None:
        """Free the host memory of an adapter."""
        self._packed.pop(number, None)

    def write(self, number: int, pages: Sequence[int], slot: int, ticket: int) -> None:
        """Copy an adapter to the device."""
        packed = self._packed[number]
        self._copy(lambda: self._memory.write(packed, pages, slot), ticket)

    def write_pages(self, number: int, pages: Sequence[int], ticket: int) -> None:
        """Copy a prefix to the device."""
        packed = self._packed[number]
        self._copy(lambda: self._memory.write_pages(packed, pages), ticket)

    def _copy(self, write: Callable[[], None], ticket: int) -> None:
        """Copy something on the stream for copies, and report when that is done."""
        if self._stream is None:
            write()
            self._done(ticket)
            return
        # Steps that were launched may still read what the pages held before.
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        with torch.cuda.stream(self._stream):
            write()
            copied = torch.cuda.Event()
            copied.record()

        def wait() -> None:
            copied.synchronize()
            self._done(ticket)

        self._waiting.submit(wait)

    def learn(self, table: tuple[bytes, bytes]) -> None:
        """Take over the leader's ranks and scalings of the slots."""
        self._table.ranks[:] = np.frombuffer(table[0], self._table.ranks.dtype)
        self._table.scalings[:] = np.frombuffer(table[1], self._table.scalings.dtype)


def _pixels(visual: Visual) -> int:
    """Numbers that the encoder reads of an image, by which work is dealt out."""
    return int(next(iter(visual.tensors.values())).numel())


def _deal(weights: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Deal items out in runs of about equal weight, at least one each: (start, stop) of each."""
    ends = np.cumsum(weights)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, size) / size)
    found, start = [], 0
    for number in range(size):
        left = size - number - 1
        stop = len(weights) if not left else int(cuts[number]) + 1
        stop = min(max(stop, start + 1), len(weights) - left)
        found.append((start, stop))
        start = stop
    return found
