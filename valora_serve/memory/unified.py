"""Unified memory: KV cache and adapters in one tensor of equal pages (S-LoRA §5.1).

A page holds keys and values of `block_size` tokens in all layers, or rank rows, one after another,
that address tables locate; so adapters of any rank fit wherever pages are free. Their copies run on
a CUDA stream of their own, beside steps.

All requests about a context read its prefix's pages, before their own; of a last page that is not
full each gets a copy, in which its own tokens follow.
"""

import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from valora_data.wording import first_line, plural
from valora_kernels.weights import LoraWeights
from valora_serve.catalogue.adapters import Adapter
from valora_serve.errors import AdapterError, SettingsError
from valora_serve.memory.block_manager import Owner, PagePool
from valora_serve.memory.residency import Entry, MemoryBudget, P, Packed, Residency

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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedAdapter(Packed):
    """An adapter in host memory, laid out as in its pages."""

    rank: int  # the largest of its modules; the others are filled up with zero rows
    scaling: float  # of B·A, for all modules
    groups: frozenset[str]  # names of the groups of linears that it changes
    vision: bool  # whether some of them are of the vision tower or the projector
    # [2, projections, rank], where rows of A and of Bᵀ start in its pages, counted in elements
    # from the start of the first one; -1 for no row.
    starts: NDArray[np.int64]
    buffer: torch.Tensor  # [elements] in the memory's dtype; pinned for a GPU


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedPrefix(Packed):
    """The prefix of a context in host memory, laid out as in its pages."""

    tokens: int
    buffer: torch.Tensor  # [pages · elements of a page], likewise


T = TypeVar("T", PackedAdapter, PackedPrefix)


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
            raise SettingsError(
                f"block_size: a page of {page.elements} elements is too small for a rank row of "
                f"{widest}; use blocks of at least {needed} tokens"
            )
        self.pages, self.page = pages, page
        self.slots, self.max_rank = slots, max_rank
        self._zeros = pages * page.elements
        count = sum(len(group.modules) for group in groups)
        try:
            # Zeros: attention multiplies values of masked tokens by 0, so they must be finite.
            # [pages · elements per page + widest rank row], flat. Behind the pages lie zeros, from
            # which absent rank rows are read.
            self.storage = torch.zeros(self._zeros + widest, dtype=dtype, device=device)
            self._tables = torch.full(
                (2, count, slots, max_rank), self._zeros, dtype=torch.int64, device=device
            )
            # Allocated once, as allocating pinned memory waits for the device. A slot's part is
            # written again only after its last copy.
            self._on_host = torch.zeros(
                (slots, 2, count, max_rank), dtype=torch.int64, pin_memory=self.storage.is_cuda
            )
        except RuntimeError as error:
            raise SettingsError(
                f"the memory of pages and adapters cannot be allocated ({first_line(error)}): "
                "lower pages, block_size, slots or max_rank"
            ) from error
        self.device = self.storage.device
        self._held = self.storage[: self._zeros].view(pages, page.elements)
        blocks = page.view(self._held)
        # Keys and values of each layer, two views [pages, block_size, kv_heads, head_dim].
        self.kv = [(blocks[:, layer, 0], blocks[:, layer, 1]) for layer in range(page.layers)]
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

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Lay out an adapter in host memory as in its pages, in any thread; or `AdapterError`."""
        called, size = f"adapter {adapter.folder}", self.page.elements
        if adapter.rank > self.max_rank:
            raise AdapterError(
                f"{called} has rank {adapter.rank}, the engine's max_rank is {self.max_rank}: "
                "start the engine with a larger max_rank"
            )
        for module in adapter.modules:
            if module not in self._projections:
                raise AdapterError(f"{called} changes {module}, which this engine cannot adapt")
        starts = np.full((2, len(self._projections), adapter.rank), -1, np.int64)
        runs = []  # rows that follow each other in a page, where they start, how far they are apart
        groups, vision, end = set(), False, 0
        for module, (number, index, group) in self._projections.items():
            if (pair := adapter.modules.get(module)) is None:
                continue
            groups.add(group.name)
            vision = vision or group.part == "vision"
            a, b = pair.a, pair.b.T
            if group.share is not None:
                a, b = a[:, group.share.inputs], b[:, group.share.outputs[index]]
            if pair.scaling != adapter.scaling:
                b = b.float() * (pair.scaling / adapter.scaling)
            for part, rows in enumerate((a, b)):
                step = min(-(-rows.shape[1] // ALIGNMENT) * ALIGNMENT, size)
                row = 0
                while row < len(rows):
                    if not (fitting := (size - end % size) // step):
                        end += size - end % size
                        continue
                    run = rows[row : row + fitting]
                    starts[part, number, row : row + len(run)] = end + step * np.arange(len(run))
                    runs.append((run, end, step))
                    row += len(run)
                    end += len(run) * step
        pages, buffer = self._allocate(end, called, "start the engine with more memory")
        for run, start, step in runs:
            target = buffer[start : start + len(run) * step].view(len(run), step)
            target[:, : run.shape[1]] = run
        return self._finish(
            PackedAdapter(
                content=adapter.content,
                pages=pages,
                bytes=buffer.nbytes,
                rank=adapter.rank,
                scaling=adapter.scaling,
                groups=frozenset(groups),
                vision=vision,
                starts=starts,
                buffer=buffer,
            ),
            called,
        )

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
        remedy = "start the engine with more memory, or make a context of fewer tokens"
        elements = -(-tokens // page.block_size) * page.elements
        count, buffer = self._allocate(elements, called, remedy)
        # [2, layers, kv_heads, pages, block_size, head_dim]
        placed = page.view(buffer).permute(2, 1, 4, 0, 3, 5)
        full, rest = divmod(tokens, page.block_size)
        end = full * page.block_size
        for part, target in zip((keys, values), placed, strict=True):
            if full:
                target[:, :, :full] = part[:, :, :end].unflatten(2, (full, page.block_size))
            if rest:
                target[:, :, full, :rest] = part[:, :, end:]
        return self._finish(PackedPrefix(content, count, buffer.nbytes, tokens, buffer), called)

    def _allocate(self, elements: int, called: str, remedy: str) -> tuple[int, torch.Tensor]:
        """Return pages that so many elements take, and as many zeros in host memory."""
        pages = -(-elements // self.page.elements)
        if pages > self.pages - 1:  # one is for rows that fill a step up
            raise AdapterError(
                f"{called} needs {plural(pages, 'page')}, there are {self.pages - 1}: {remedy}"
            )
        # On memory pages of their own, so that each buffer can be locked alone.
        dtype = self.storage.dtype
        return pages, torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize), dtype=dtype)

    def _finish(self, packed: T, called: str) -> T:
        """Check values and lock them for copies to a GPU (torch's such memory has powers of 2)."""
        buffer = packed.buffer
        if not bool(buffer.abs().max().isfinite()):  # of a NaN it is NaN; much faster than all()
            raise AdapterError(
                f"{called} has values beyond the range of {buffer.dtype}: serve it in another dtype"
            )
        if self.device.type == "cuda":
            status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
            if status != 0:
                raise AdapterError(
                    f"cannot lock {buffer.nbytes} bytes of host memory (CUDA error {status}): "
                    "serve fewer adapters and contexts, or set a smaller host_bytes"
                )
            weakref.finalize(packed, _unlock, buffer).atexit = False
        return packed

    def write(self, packed: PackedAdapter, pages: Sequence[int], slot: int) -> None:
        """Copy an adapter to its pages and its slot's address tables, on the current stream."""
        self.write_pages(packed, pages)
        size, starts = self.page.elements, packed.starts
        held = np.asarray(pages, dtype=np.int64)
        rows = np.where(starts < 0, self._zeros, held[starts // size] * size + starts % size)
        table = self._on_host[slot]
        table.fill_(self._zeros)
        table[:, :, : packed.rank] = torch.from_numpy(rows)
        self._table.copy_(table, non_blocking=True)
        self._tables[:, :, slot] = self._table

    def write_pages(self, packed: PackedAdapter | PackedPrefix, pages: Sequence[int]) -> None:
        """Copy an adapter or a prefix to its pages, on the current stream."""
        for page, part in zip(pages, packed.buffer.split(self.page.elements), strict=True):
            self._held[page, : len(part)].copy_(part, non_blocking=True)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page on the device, on the current stream."""
        self._held[target].copy_(self._held[source])

    def read_tokens(self, table: Sequence[int], tokens: int) -> torch.Tensor:
        """Copy a sequence's first keys and values: [2, layers, kv_heads, tokens, head_dim]."""
        where = torch.tensor(table[: -(-tokens // self.page.block_size)], device=self.device)
        held = self.page.view(self._held)[where]
        tokenwise = held.permute(2, 1, 4, 0, 3, 5).flatten(3, 4)
        return tokenwise[:, :, :, :tokens].contiguous()


_unlocking: list[torch.Tensor] = []


def _unlock(buffer: torch.Tensor) -> None:
    """Unlock host memory; later, if this thread captures a graph, which that would break."""
    _unlocking.append(buffer)
    while _unlocking and not torch.cuda.is_current_stream_capturing():
        torch.cuda.cudart().cudaHostUnregister(_unlocking.pop().data_ptr())


class DeviceResidency(Residency[P]):
    """Things of one kind, by key, in pages of a device."""

    def __init__(
        self, memory: UnifiedMemory, budget: MemoryBudget, slots: int | None = None
    ) -> None:
        cuda = memory.device.type == "cuda"
        super().__init__(budget, slots=slots, background=cuda)
        self.memory = memory
        self._stream = torch.cuda.Stream(memory.device) if cuda else None

    def _write(self, entry: Entry[P]) -> None:
        raise NotImplementedError

    def copy(self, entry: Entry[P]) -> torch.cuda.Event | None:
        """Copy an entry to its pages; return what is recorded behind the copy on a GPU."""
        if self._stream is None:
            self._write(entry)
            return None
        # Steps that were launched may still read what the pages held before.
        self._stream.wait_stream(torch.cuda.current_stream(self.memory.device))
        with torch.cuda.stream(self._stream):
            self._write(entry)
            copied = torch.cuda.Event()
            copied.record()
        return copied


class AdapterMemory(DeviceResidency[PackedAdapter]):
    """The adapters of an engine, by key."""

    kind = "adapter"
    owner = Owner.ADAPTER

    def __init__(
        self, memory: UnifiedMemory, pool: PagePool, *, host_bytes: int | None = None
    ) -> None:
        super().__init__(memory, MemoryBudget(pool, host_bytes), memory.slots)
        # [slots] int32, rank of the adapter in each slot, 0 for an empty slot.
        self.ranks: NDArray[np.int32] = np.zeros(memory.slots, np.int32)
        # [slots] float32, scaling of the adapter in each slot.
        self.scalings: NDArray[np.float32] = np.zeros(memory.slots, np.float32)
        # [slots] bool, whether it changes the vision tower or the projector.
        self.vision: NDArray[np.bool_] = np.zeros(memory.slots, np.bool_)
        # Adapters that must not be merged into the base weights, each with the reason.
        self.unmergeable: dict[str, str] = {}
        # Those of them that no request may use until they are loaded again.
        self.quarantined: dict[str, str] = {}
        # Keys of the adapters that were merged once, with finite weights.
        self.proven: set[str] = set()

    def add(
        self,
        key: str,
        packed: PackedAdapter,
        reload: Callable[[], PackedAdapter] | None = None,
        *,
        unmergeable: str | None = None,
    ) -> None:
        """Add an adapter, out of quarantine; `unmergeable` says why it must not be merged."""
        self._clear(key)
        if unmergeable is not None:
            self.unmergeable[key] = unmergeable
        super().add(key, packed, reload)

    def remove(self, key: str) -> None:
        """Forget an adapter and what was found out about it; see `Residency.remove`."""
        super().remove(key)
        self._clear(key)

    def _clear(self, key: str) -> None:
        self.unmergeable.pop(key, None)
        self.quarantined.pop(key, None)
        self.proven.discard(key)

    def evict(self, entry: Entry[PackedAdapter]) -> None:
        """Free the pages and the slot of a resident adapter."""
        self.ranks[entry.slot] = self.scalings[entry.slot] = 0
        super().evict(entry)

    def _write(self, entry: Entry[PackedAdapter]) -> None:
        assert entry.packed is not None
        self.memory.write(entry.packed, entry.pages, entry.slot)
        self.ranks[entry.slot] = entry.packed.rank
        self.scalings[entry.slot] = entry.packed.scaling
        self.vision[entry.slot] = entry.packed.vision


class PrefixMemory(DeviceResidency[PackedPrefix]):
    """The prefixes of an engine's contexts, by key."""

    kind = "context"
    owner = Owner.CONTEXT

    def _write(self, entry: Entry[PackedPrefix]) -> None:
        assert entry.packed is not None
        self.memory.write_pages(entry.packed, entry.pages)
