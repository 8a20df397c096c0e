"""Unified memory: KV cache and adapters in one tensor of equal pages (S-LoRA §5.1).

A page has room for the keys and values of `block_size` tokens in all layers. For the attention it
is one block of every layer. For LoRA it holds rank rows, one after another, which address tables
locate; so an adapter of any rank fits as long as enough pages are free, wherever they are.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from valora_data.wording import plural
from valora_kernels.weights import LoraWeights
from valora_serve.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from valora_serve.catalogue.adapters import Adapter, LoraPair
    from valora_serve.parallel.partition import Share

ALIGNMENT = 8
"""A rank row starts at a multiple of this many elements in its page: 16 bytes in 16 bits."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Names and sizes of linear layers that share their input.

    Attributes:
        name: Name of the group, which is that of its first module.
        modules: Full module names of the layers, in the order of their outputs.
        in_features: Width of the input.
        out_features: Width of each layer's output.
        part: ``text`` for the language model, ``vision`` for the vision tower and the projector.
        share: The part of the layers that this process of a tensor-parallel group holds; sizes are
            those of the part. None where the layers are whole.
    """

    name: str
    modules: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]
    part: str
    share: Share | None = None

    @property
    def a_width(self) -> int:
        """Width of the rows of each layer's A."""
        split = self.share is not None and self.share.exchanges and not self.share.row
        return self.in_features // self.share.size if split and self.share else self.in_features

    @property
    def b_widths(self) -> tuple[int, ...]:
        """Width of the rows of each layer's Bᵀ."""
        if self.share is None or not (self.share.exchanges and self.share.row):
            return self.out_features
        return tuple(width // self.share.size for width in self.out_features)


@dataclass(frozen=True, slots=True)
class PageShape:
    """Shape of a page as keys and values.

    Attributes:
        block_size: Tokens per page.
        layers: Layers of the language model.
        kv_heads: Heads of keys and values.
        head_dim: Elements per head.
    """

    block_size: int
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def elements(self) -> int:
        """Number of elements of a page."""
        return self.block_size * self.layers * 2 * self.kv_heads * self.head_dim


class PackedPages(Protocol):
    """Pages in host memory."""

    @property
    def buffer(self) -> torch.Tensor:
        """[pages, elements of a page] in the memory's dtype."""


class UnifiedMemory:
    """One tensor of pages, with its views as KV cache and as adapters.

    Args:
        pages: Number of pages.
        page: Shape of a page.
        groups: Groups of linears that adapters can change.
        slots: Most adapters on the device at a time.
        max_rank: Largest rank of an adapter.
        dtype: Dtype of keys, values and adapters.
        device: Device of the memory.

    Attributes:
        pages: Number of pages.
        page: Shape of a page.
        groups: Groups of linears that adapters can change, by name.
        slots: Most adapters on the device at a time.
        max_rank: Largest rank of an adapter.
        storage: [pages · elements per page + widest rank row], flat. Behind the pages lie zeros,
            from which absent rank rows are read.
        kv: Keys and values of each layer, two views [pages, block_size, kv_heads, head_dim].
        lora: Address tables into `storage` for the adapters of each group, by its name.

    Raises:
        ValueError: A page is too small for the widest rank row.
    """

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
        self.groups = {group.name: group for group in groups}
        # Zeros: attention multiplies values of masked tokens by 0, so they must be finite.
        self.storage = torch.zeros(pages * page.elements + widest, dtype=dtype, device=device)
        shape = (pages, page.layers, 2, page.block_size, page.kv_heads, page.head_dim)
        blocks = self.storage[: pages * page.elements].view(shape)
        self.kv = [(blocks[:, layer, 0], blocks[:, layer, 1]) for layer in range(page.layers)]
        self._zeros = pages * page.elements
        count = sum(len(group.out_features) for group in groups)
        self._tables = torch.full(
            (2, count, slots, max_rank), self._zeros, dtype=torch.int64, device=device
        )
        # Allocated once, as allocating pinned memory waits for the device. A slot's part is
        # written again only after its last copy.
        self._on_host = torch.zeros(
            (slots, 2, count, max_rank),
            dtype=torch.int64,
            pin_memory=self.storage.is_cuda,
        )
        self._table = torch.zeros_like(self._on_host[0], device=device)
        self._projections: dict[str, _Projection] = {}
        self.lora: dict[str, LoraWeights] = {}
        first = 0
        for group in groups:
            stop = first + len(group.out_features)
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
            for index, (module, width) in enumerate(
                zip(group.modules, group.b_widths, strict=True)
            ):
                self._projections[module] = _Projection(
                    first + index, index, group.a_width, width, group.share
                )
            first = stop
        self._layouts: dict[tuple[tuple[str, int], ...], Layout] = {}

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self.storage.device

    def layout(self, ranks: Mapping[str, int]) -> Layout:
        """Return where the rank rows of an adapter lie within its pages.

        Args:
            ranks: Rank by name of the module.
        """
        key = tuple((module, ranks[module]) for module in self._projections if module in ranks)
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(key)
        return self._layouts[key]

    def _lay_out(self, ranks: Sequence[tuple[str, int]]) -> Layout:
        size = self.page.elements
        most = max(rank for _, rank in ranks)
        place = np.full((2, self._tables.shape[1], most), -1, dtype=np.int64)
        runs = []
        end = 0
        for module, rank in ranks:
            found = self._projections[module]
            for part, width in enumerate((found.inputs, found.outputs)):
                step = min(-(-width // ALIGNMENT) * ALIGNMENT, size)
                row = 0
                while row < rank:
                    room = (size - end % size) // step
                    if not room:
                        end += size - end % size
                        continue
                    count = min(room, rank - row)
                    at = end + step * np.arange(count)
                    place[part, found.number, row : row + count] = at
                    runs.append(PageRun(module, part, row, count, end, step))
                    row += count
                    end += count * step
        return Layout(
            pages=-(-end // size),
            elements=end,
            runs=tuple(runs),
            present=place >= 0,
            page=np.where(place >= 0, place // size, 0),
            offset=np.where(place >= 0, place % size, 0),
        )

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Lay out an adapter in host memory as in its pages; may be called from any thread.

        If the scaling of a module differs from the adapter's, the quotient is multiplied into B in
        float32, before it is rounded to the memory's dtype.

        Raises:
            AdapterError: The adapter's rank is too large, it needs more pages than there are,
                changes modules that cannot be adapted, or has values beyond the dtype's range.
        """
        if adapter.rank > self.max_rank:
            raise AdapterError(
                f"adapter {adapter.folder} has rank {adapter.rank}, the engine's max_rank is "
                f"{self.max_rank}: start the engine with a larger max_rank"
            )
        for module in adapter.modules:
            if module not in self._projections:
                raise AdapterError(
                    f"adapter {adapter.folder} changes {module}, which this engine cannot adapt"
                )
        layout = self.layout({module: len(pair.a) for module, pair in adapter.modules.items()})
        if layout.pages > self.pages - 1:  # one is for rows that fill a step up
            raise AdapterError(
                f"adapter {adapter.folder} needs {plural(layout.pages, 'page')}, there are "
                f"{self.pages - 1}: start the engine with more memory"
            )
        buffer = host_memory(layout.elements, self.storage.dtype)
        for run in layout.runs:
            pair = adapter.modules[run.module]
            a, b = self._projections[run.module].cut(pair)
            rows = (a if run.part == 0 else b.T)[run.first : run.first + run.count]
            if run.part == 1 and pair.scaling != adapter.scaling:
                rows = rows.float() * (pair.scaling / adapter.scaling)
            end = run.place + run.count * run.step
            place = buffer[run.place : end].view(run.count, run.step)
            place[:, : rows.shape[1]] = rows
        if not bool(buffer.abs().max().isfinite()):  # of a NaN it is NaN; much faster than all()
            raise AdapterError(
                f"adapter {adapter.folder} has values beyond the range of {buffer.dtype}: serve "
                "it in another dtype"
            )
        packed = PackedAdapter(
            content=adapter.content,
            rank=adapter.rank,
            scaling=adapter.scaling,
            groups=frozenset(
                name
                for name, group in self.groups.items()
                if any(module in adapter.modules for module in group.modules)
            ),
            layout=layout,
            buffer=buffer,
        )
        if self.device.type == "cuda":
            lock_memory(packed, packed.buffer)
        return packed

    def write(self, packed: PackedAdapter, pages: Sequence[int], slot: int) -> None:
        """Copy an adapter to the device, on the current stream.

        Args:
            packed: The adapter in host memory.
            pages: Pages for it, as many as its layout needs.
            slot: Slot whose address tables are set to these pages.
        """
        size = self.page.elements
        layout = packed.layout
        for number, page in enumerate(pages):
            part = packed.buffer[number * size : (number + 1) * size]
            start = page * size
            self.storage[start : start + len(part)].copy_(part, non_blocking=True)
        held = np.asarray(pages, dtype=np.int64)
        rows = np.where(layout.present, held[layout.page] * size + layout.offset, self._zeros)
        table = self._on_host[slot]
        table.fill_(self._zeros)
        table[:, :, : packed.rank] = torch.from_numpy(rows)
        self._table.copy_(table, non_blocking=True)
        self._tables[:, :, slot] = self._table

    def write_pages(self, packed: PackedPages, pages: Sequence[int]) -> None:
        """Copy keys and values to the device, on the current stream.

        Args:
            packed: What is in host memory.
            pages: Pages for it.
        """
        size = self.page.elements
        for page, part in zip(pages, packed.buffer, strict=True):
            self.storage[page * size : (page + 1) * size].copy_(part, non_blocking=True)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page on the device, on the current stream."""
        size = self.page.elements
        part = self.storage[source * size : (source + 1) * size]
        self.storage[target * size : (target + 1) * size].copy_(part)

    def read_tokens(self, table: Sequence[int], tokens: int) -> torch.Tensor:
        """Copy keys and values of a sequence, on the current stream.

        Args:
            table: Its pages, in order.
            tokens: Number of its tokens, from the first one on.

        Returns:
            [2, layers, kv_heads, tokens, head_dim], keys and then values, on the device.
        """
        count = -(-tokens // self.page.block_size)
        where = torch.tensor(list(table[:count]), device=self.device)
        shape = (self.pages, self.page.elements)
        held = self.storage[: self._zeros].view(shape)[where]
        page = self.page
        parts = held.view(count, page.layers, 2, page.block_size, page.kv_heads, page.head_dim)
        tokenwise = parts.permute(2, 1, 4, 0, 3, 5).flatten(3, 4)
        return tokenwise[:, :, :, :tokens].contiguous()


@dataclass(frozen=True, slots=True)
class _Projection:
    """A linear layer, as far as the layout of adapters needs it.

    Attributes:
        number: Its number among those of all groups.
        index: Its index in its group.
        inputs: Width of a row of A.
        outputs: Width of a row of Bᵀ.
        share: The part of its group that this process holds, None if it is whole.
    """

    number: int
    index: int
    inputs: int
    outputs: int
    share: Share | None

    def cut(self, pair: LoraPair) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parts of A and B that this process holds."""
        if self.share is None:
            return pair.a, pair.b
        return (
            pair.a[:, self.share.inputs(self.index, pair.a.shape[1])],
            pair.b[self.share.outputs(self.index, len(pair.b))],
        )


@dataclass(frozen=True, slots=True)
class PageRun:
    """Rank rows that lie one after another in a page.

    Attributes:
        module: Name of the linear.
        part: 0 for A, 1 for Bᵀ.
        first: Index of the first row.
        count: Number of rows.
        place: Start of the first row, in elements from the start of the adapter's first page.
        step: Elements from the start of a row to the start of the next.
    """

    module: str
    part: int
    first: int
    count: int
    place: int
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where rank rows lie within an adapter's pages; one layout for all adapters of equal ranks.

    Attributes:
        pages: Number of pages.
        elements: Elements from the start of the first page to the end of the last row.
        runs: All rows, in order.
        present: [2, projections, rank] bool, which rows of A and of Bᵀ there are.
        page: [2, projections, rank] int64, index of each row's page among the adapter's pages.
        offset: [2, projections, rank] int64, start of each row in its page, in elements.
    """

    pages: int
    elements: int
    runs: tuple[PageRun, ...]
    present: NDArray[np.bool_]
    page: NDArray[np.int64]
    offset: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedAdapter:
    """An adapter in host memory, laid out as in its pages.

    Attributes:
        content: Content hash of the adapter.
        rank: Largest rank of its modules; modules of smaller rank are filled up with zero rows.
        scaling: Factor of B·A, for all modules.
        groups: Names of the groups of linears that it changes.
        layout: Places of its rank rows.
        buffer: [elements] in the memory's dtype; in pinned memory if the memory is on a GPU.
    """

    content: str
    rank: int
    scaling: float
    groups: frozenset[str]
    layout: Layout
    buffer: torch.Tensor

    @property
    def pages(self) -> int:
        """Number of pages that it takes on the device."""
        return self.layout.pages

    @property
    def bytes(self) -> int:
        """Bytes that it takes in host memory."""
        return self.buffer.numel() * self.buffer.element_size()


def host_memory(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on memory pages of their own, so that each buffer can be locked alone."""
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize), dtype=dtype)


def lock_memory(packed: object, buffer: torch.Tensor) -> None:
    """Lock host memory for asynchronous copies, for as long as what it belongs to lives.

    Args:
        packed: The adapter or prefix in it.
        buffer: The memory, from `host_memory`.

    torch's allocator of pinned memory rounds up to powers of two, which wastes too much memory for
    thousands of adapters.
    """
    runtime = torch.cuda.cudart()
    size = buffer.numel() * buffer.element_size()
    status = int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0))
    if status != 0:
        raise AdapterError(
            f"cannot lock {size} bytes of host memory (CUDA error {status}): serve fewer adapters "
            "and contexts, or set a smaller host_bytes"
        )
    weakref.finalize(packed, _unlock, buffer).atexit = False


_unlocking: list[torch.Tensor] = []


def _unlock(buffer: torch.Tensor) -> None:
    """Unlock host memory; later, if this thread captures a graph, which that would break."""
    _unlocking.append(buffer)
    while _unlocking and not torch.cuda.is_current_stream_capturing():
        torch.cuda.cudart().cudaHostUnregister(_unlocking.pop().data_ptr())
