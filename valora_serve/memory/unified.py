"""Unified memory: KV cache and adapters in one tensor of equal pages (S-LoRA §5.1).

A page holds keys and values of `block_size` tokens in all layers, or rank rows, one after another,
that address tables locate; so adapters of any rank fit wherever pages are free.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from valora_data.wording import plural
from valora_kernels.weights import LoraWeights
from valora_serve.catalogue.adapters import Adapter
from valora_serve.errors import AdapterError
from valora_serve.memory.residency import Packed

ALIGNMENT = 8
"""A rank row starts at a multiple of this many elements in its page: 16 bytes in 16 bits."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank of a tensor-parallel group holds of the LoRA matrices of linear layers."""

    row: bool  # whether the layers are split by their inputs
    inputs: slice  # columns of every A
    outputs: tuple[slice, ...]  # rows of each B
    exchanges: bool  # whether no matrix is whole, so that x·Aᵀ must be summed


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Names and sizes of linear layers that share their input, or of a rank's `share` of them."""

    name: str  # that of its first module
    modules: tuple[str, ...]  # full names, in the order of their outputs
    in_features: int
    out_features: tuple[int, ...]
    part: str  # ``text``, or ``vision`` for vision tower and projector
    share: Share | None = None

    @property
    def a_width(self) -> int:
        """Width of the rows of each layer's A."""
        return self.in_features if self.share is None else _length(self.share.inputs)

    @property
    def b_widths(self) -> tuple[int, ...]:
        """Width of the rows of each layer's Bᵀ."""
        return self.out_features if self.share is None else tuple(map(_length, self.share.outputs))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


@dataclass(frozen=True, slots=True)
class PageShape:
    """Shape of a page as keys and values: tokens, layers, heads, and elements per head."""

    block_size: int
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def elements(self) -> int:
        """Number of elements of a page."""
        return self.block_size * self.layers * 2 * self.kv_heads * self.head_dim

    def view(self, pages: torch.Tensor) -> torch.Tensor:
        """View pages as [pages, layers, keys and values, block_size, kv_heads, head_dim]."""
        return pages.view(-1, self.layers, 2, self.block_size, self.kv_heads, self.head_dim)


class PageRun(NamedTuple):
    """Rank rows that lie one after another in a page."""

    module: str
    part: int  # 0 for A, 1 for Bᵀ
    first: int  # index of the first row
    rows: int
    start: int  # of the first row, in elements from the start of the adapter's first page
    step: int  # elements from the start of a row to the start of the next


class Layout(NamedTuple):
    """Where rank rows lie within an adapter's pages; one layout for all adapters of equal ranks."""

    pages: int
    elements: int  # from the start of the first page to the end of the last row
    runs: tuple[PageRun, ...]
    starts: NDArray[np.int64]  # [2, projections, rank], of rows of A and of Bᵀ; -1 for none


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedAdapter(Packed):
    """An adapter in host memory, laid out as in its pages."""

    rank: int  # the largest of its modules; the others are filled up with zero rows
    scaling: float  # of B·A, for all modules
    groups: frozenset[str]  # names of the groups of linears that it changes
    layout: Layout
    buffer: torch.Tensor  # [elements] in the memory's dtype; pinned for a GPU


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedPrefix(Packed):
    """The prefix of a context in host memory, laid out as in its pages."""

    tokens: int
    buffer: torch.Tensor  # [pages, elements of a page] in the memory's dtype; pinned for a GPU


class UnifiedMemory:
    """One tensor of pages, with its views as KV cache and as adapters, of which `slots` fit."""

    def __init__(
        self,
        pages: int,
        page: PageShape,
        groups: Sequence[GroupSpec],
        *,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        widest = max((max(group.a_width, *group.b_widths) for group in groups), default=0)
        if widest > page.elements:
            needed = -(-widest * page.block_size // page.elements)
            raise ValueError(
                f"block_size: a page of {page.elements} elements is too small for a rank row of "
                f"{widest}; use blocks of at least {needed} tokens"
            )
        self.pages, self.page = pages, page
        self.slots, self.max_rank = slots, max_rank
        self._zeros = pages * page.elements
        # Zeros: attention multiplies values of masked tokens by 0, so they must be finite.
        # [pages · elements per page + widest rank row], flat. Behind the pages lie zeros, from
        # which absent rank rows are read.
        self.storage = torch.zeros(self._zeros + widest, dtype=dtype, device=device)
        self.device = self.storage.device
        blocks = page.view(self.storage[: self._zeros])
        # Keys and values of each layer, two views [pages, block_size, kv_heads, head_dim].
        self.kv = [(blocks[:, layer, 0], blocks[:, layer, 1]) for layer in range(page.layers)]
        count = sum(len(group.modules) for group in groups)
        self._tables = torch.full(
            (2, count, slots, max_rank), self._zeros, dtype=torch.int64, device=device
        )
        # Allocated once, as allocating pinned memory waits for the device. A slot's part is
        # written again only after its last copy.
        self._on_host = torch.zeros(
            (slots, 2, count, max_rank), dtype=torch.int64, pin_memory=self.storage.is_cuda
        )
        self._table = torch.zeros_like(self._on_host[0], device=device)
        self._projections: dict[str, tuple[int, int, GroupSpec]] = {}  # number, index in its group
        # Address tables into `storage` for the adapters of each group, by its name.
        self.lora: dict[str, LoraWeights] = {}
        for group in groups:
            first = len(self._projections)
            stop = first + len(group.modules)
            self.lora[group.name] = LoraWeights(
                in_features=group.a_width,
                out_features=group.b_widths,
                slots=slots,
                max_rank=max_rank,
                a=self.storage,
                b=self.storage,
                a_table=self._tables[0, first:stop],
                b_table=self._tables[1, first:stop],
            )
            for index, module in enumerate(group.modules):
                self._projections[module] = first + index, index, group
        self._layouts: dict[tuple[tuple[str, int], ...], Layout] = {}

    def _layout(self, ranks: Mapping[str, int]) -> Layout:
        key = tuple((module, ranks[module]) for module in self._projections if module in ranks)
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(key)
        return self._layouts[key]

    def _lay_out(self, ranks: Sequence[tuple[str, int]]) -> Layout:
        size = self.page.elements
        largest = max(rank for _, rank in ranks)
        starts = np.full((2, len(self._projections), largest), -1, dtype=np.int64)
        runs = []
        end = 0
        for module, rank in ranks:
            number, index, group = self._projections[module]
            for part, width in enumerate((group.a_width, group.b_widths[index])):
                step = min(-(-width // ALIGNMENT) * ALIGNMENT, size)
                row = 0
                while row < rank:
                    free = (size - end % size) // step
                    if not free:
                        end += size - end % size
                        continue
                    count = min(free, rank - row)
                    starts[part, number, row : row + count] = end + step * np.arange(count)
                    runs.append(PageRun(module, part, row, count, end, step))
                    row += count
                    end += count * step
        return Layout(-(-end // size), end, tuple(runs), starts)

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Lay out an adapter in host memory as in its pages, in any thread; or `AdapterError`."""
        called = f"adapter {adapter.folder}"
        if adapter.rank > self.max_rank:
            raise AdapterError(
                f"{called} has rank {adapter.rank}, the engine's max_rank is {self.max_rank}: "
                "start the engine with a larger max_rank"
            )
        for module in adapter.modules:
            if module not in self._projections:
                raise AdapterError(f"{called} changes {module}, which this engine cannot adapt")
        layout = self._layout({module: len(pair.a) for module, pair in adapter.modules.items()})
        self._check_pages(layout.pages, called, "start the engine with more memory")
        buffer = host_memory(layout.elements, self.storage.dtype)
        for run in layout.runs:
            pair = adapter.modules[run.module]
            _, index, group = self._projections[run.module]
            a, b = pair.a, pair.b
            if group.share is not None:
                a, b = a[:, group.share.inputs], b[group.share.outputs[index]]
            part = (b.T if run.part else a)[run.first : run.first + run.rows]
            if run.part == 1 and pair.scaling != adapter.scaling:
                part = part.float() * (pair.scaling / adapter.scaling)
            end = run.start + run.rows * run.step
            target = buffer[run.start : end].view(run.rows, run.step)
            target[:, : part.shape[1]] = part
        self._check_finite(buffer, called)
        packed = PackedAdapter(
            content=adapter.content,
            pages=layout.pages,
            bytes=buffer.nbytes,
            rank=adapter.rank,
            scaling=adapter.scaling,
            groups=frozenset(self._projections[module][2].name for module in adapter.modules),
            layout=layout,
            buffer=buffer,
        )
        self._lock(packed, buffer)
        return packed

    def pack_prefix(
        self, name: str, content: str, keys: torch.Tensor, values: torch.Tensor
    ) -> PackedPrefix:
        """Lay out a prefix in host memory as in its pages, in any thread; or `AdapterError`.

        `keys` (after their rotary positions) and `values` are [layers, kv_heads, tokens, head_dim].
        """
        page, called = self.page, f"context {name}"
        layers, heads, tokens, width = keys.shape
        if (layers, heads, width) != (page.layers, page.kv_heads, page.head_dim):
            raise AdapterError(
                f"{called} has keys of {layers} layers with {heads} heads of {width}, the engine "
                f"has {page.layers} with {page.kv_heads} of {page.head_dim}: make it for this base "
                "model"
            )
        count = -(-tokens // page.block_size)
        remedy = "start the engine with more memory, or make a context of fewer tokens"
        self._check_pages(count, called, remedy)
        buffer = host_memory(count * page.elements, self.storage.dtype)
        # [2, layers, kv_heads, pages, block_size, head_dim]
        placed = page.view(buffer).permute(2, 1, 4, 0, 3, 5)
        full, rest = divmod(tokens, page.block_size)
        end = full * page.block_size
        for part, target in zip((keys, values), placed, strict=True):
            if full:
                target[:, :, :full] = part[:, :, :end].unflatten(2, (full, page.block_size))
            if rest:
                target[:, :, full, :rest] = part[:, :, end:]
        self._check_finite(buffer, called)
        packed = PackedPrefix(content, count, buffer.nbytes, tokens, buffer.view(count, -1))
        self._lock(packed, buffer)
        return packed

    def _check_pages(self, pages: int, called: str, remedy: str) -> None:
        if pages > self.pages - 1:  # one is for rows that fill a step up
            raise AdapterError(
                f"{called} needs {plural(pages, 'page')}, there are {self.pages - 1}: {remedy}"
            )

    def write(self, packed: PackedAdapter, pages: Sequence[int], slot: int) -> None:
        """Copy an adapter to its pages and its slot's address tables, on the current stream."""
        size, starts = self.page.elements, packed.layout.starts
        for number, page in enumerate(pages):
            part = packed.buffer[number * size : (number + 1) * size]
            self.storage[page * size : page * size + len(part)].copy_(part, non_blocking=True)
        held = np.asarray(pages, dtype=np.int64)
        rows = np.where(starts < 0, self._zeros, held[starts // size] * size + starts % size)
        table = self._on_host[slot]
        table.fill_(self._zeros)
        table[:, :, : packed.rank] = torch.from_numpy(rows)
        self._table.copy_(table, non_blocking=True)
        self._tables[:, :, slot] = self._table

    def write_pages(self, packed: PackedPrefix, pages: Sequence[int]) -> None:
        """Copy a prefix to its pages, on the current stream."""
        size = self.page.elements
        for page, part in zip(pages, packed.buffer, strict=True):
            self.storage[page * size : (page + 1) * size].copy_(part, non_blocking=True)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page on the device, on the current stream."""
        size = self.page.elements
        part = self.storage[source * size : (source + 1) * size]
        self.storage[target * size : (target + 1) * size].copy_(part)

    def read_tokens(self, table: Sequence[int], tokens: int) -> torch.Tensor:
        """Copy a sequence's first keys and values: [2, layers, kv_heads, tokens, head_dim]."""
        where = torch.tensor(table[: -(-tokens // self.page.block_size)], device=self.device)
        held = self.page.view(self.storage[: self._zeros])[where]
        tokenwise = held.permute(2, 1, 4, 0, 3, 5).flatten(3, 4)
        return tokenwise[:, :, :, :tokens].contiguous()

    def _check_finite(self, buffer: torch.Tensor, called: str) -> None:
        if not bool(buffer.abs().max().isfinite()):  # of a NaN it is NaN; much faster than all()
            raise AdapterError(
                f"{called} has values beyond the range of {buffer.dtype}: serve it in another dtype"
            )

    def _lock(self, packed: Packed, buffer: torch.Tensor) -> None:
        """Lock memory for copies to a GPU while `packed` lives; torch's has powers of two."""
        if self.device.type != "cuda":
            return
        status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if status != 0:
            raise AdapterError(
                f"cannot lock {buffer.nbytes} bytes of host memory (CUDA error {status}): serve "
                "fewer adapters and contexts, or set a smaller host_bytes"
            )
        weakref.finalize(packed, _unlock, buffer).atexit = False


def host_memory(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on memory pages of their own, so that each buffer can be locked alone."""
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize), dtype=dtype)


_unlocking: list[torch.Tensor] = []


def _unlock(buffer: torch.Tensor) -> None:
    """Unlock host memory; later, if this thread captures a graph, which that would break."""
    _unlocking.append(buffer)
    while _unlocking and not torch.cuda.is_current_stream_capturing():
        torch.cuda.cudart().cudaHostUnregister(_unlocking.pop().data_ptr())
