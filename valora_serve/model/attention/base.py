"""The interface between transformers' attention modules and the libraries that compute attention.

transformers' modules call `attend`. An `AttentionPlan`, made once per step and shared by all
layers, says which pages the keys and values of each token are written to and which it sees.
"""

import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger(__name__)

IMPLEMENTATION = "valora_paged"  # name of `attend` in transformers' attention interface
ALIGNED = 16  # elements of at least 4 bytes, of which `send_together` aligns arrays to a multiple
# Room in the buffer of captured steps' page tables, as a multiple of the cache's pages: sequences
# that share a prefix all have its pages in their tables.
TABLES = 32
NICENESS = 10  # how far a compiler that nothing waits for is below its process, and requests


@dataclass
class KVCache:
    """The KV cache of all layers, in the page pool."""

    # Keys and values of each layer, each [pages, block_size, kv_heads, head_dim]; all are strided
    # views of one allocation.
    layers: Sequence[tuple[Tensor, Tensor]]
    block_size: int  # tokens per page
    heads: int  # query heads

    def __post_init__(self) -> None:
        keys = self.layers[0][0]
        self.kv_heads, self.head_dim = keys.shape[2:]
        self.dtype, self.device = keys.dtype, keys.device


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens that a step computes, one row each, grouped by sequence."""

    starts: NDArray[np.int32]  # [n + 1], first row of each sequence
    lengths: NDArray[np.int32]  # [n], tokens of each sequence in the KV cache after this step
    tables: Sequence[Sequence[int]]  # pages of each in order, possibly more than it needs yet
    # [rows], how many of its sequence's first tokens each row sees, as those of an image may see
    # later ones of it; None: each row sees those up to its own.
    seen: NDArray[np.int32] | None = None

    @property
    def positions(self) -> NDArray[np.int64]:
        """[rows] int64, index of each row's token in its sequence."""
        counts = np.diff(self.starts)
        first = self.lengths - counts
        return np.arange(self.starts[-1]) + np.repeat(first - self.starts[:-1], counts)

    @property
    def decoding(self) -> int:
        """Number of sequences with one row before the first with more."""
        longer = np.flatnonzero(np.diff(self.starts) != 1)
        return int(longer[0]) if longer.size else len(self.lengths)

    @property
    def owners(self) -> NDArray[np.int64]:
        """[rows] int64, index of each row's sequence."""
        counts = np.diff(self.starts)
        return np.repeat(np.arange(len(counts)), counts)

    def locations(self, block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Page of every row, and its offset in that page: ([rows], [rows])."""
        pages, indptr = self.indices(block_size)
        positions = self.positions
        found = pages[indptr[self.owners] + positions // block_size]
        return found.astype(np.int64), positions % block_size

    def indices(self, block_size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Pages of all sequences in CSR form: the pages ([pages]), and each start ([n + 1])."""
        pages = -(-self.lengths // block_size)
        indptr = np.zeros(len(pages) + 1, np.int32)
        np.cumsum(pages, out=indptr[1:])
        flat: list[int] = []
        for table, count in zip(self.tables, pages.tolist(), strict=True):
            flat += table[:count]
        return np.asarray(flat, np.int32), indptr


class AttentionPlan(Protocol):
    """The attention of one step, shared by all layers."""

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write the rows' keys and values to the cache, then attend causally to each sequence.

        `query` and what is returned are [rows, heads, head_dim], `key` and `value` [rows, kv_heads,
        head_dim]; `layer` indexes `KVCache.layers`.
        """


class FixedAttentionPlan(AttentionPlan, Protocol):
    """A plan in buffers of fixed size and address, which a CUDA graph can replay."""

    # In the page tables of a step together, where a page that several of them share counts for
    # each; None without a limit. Larger steps run without a graph.
    max_pages: int | None

    def update(self, rows: Rows) -> None:
        """Describe the next step; copies are enqueued, and nothing waits for the device."""


class AttentionBackend(ABC):
    """A library that computes attention over the KV cache."""

    # Order in which ``auto`` tries the backends, the lowest first; None: used by its name alone.
    auto_rank: ClassVar[int | None] = None
    # Name of the backend that attends while this one is compiled, with the same pages and with CUDA
    # graphs; None if requests wait for this one, as for one that was named.
    stand_in: str | None = None
    gpu_only: ClassVar[bool] = False  # whether it works on a CUDA GPU alone
    max_mixed: int = 256  # sequences for which `mixed_plan` is asked

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._tables: Tensor | None = None

    @classmethod
    def unsuitable(cls, cache: KVCache) -> str | None:
        """Why ``auto`` must not choose this backend for a cache; None if it may."""
        return None

    @abstractmethod
    def plan(self, rows: Rows) -> AttentionPlan:
        """Plan a step with any mix of prefilling and decoding rows."""

    def compile(self) -> None:  # noqa: B027
        """Compile all kernels now; those of a backend without this are compiled at first use."""

    def _table_buffer(self, sequences: int, rows: int) -> Tensor:
        """The buffer of page tables ([pages] int32), which every `update` writes before the replay.

        Each of at most so many sequences may need a page more.
        """
        needed = TABLES * int(self._cache.layers[0][0].shape[0]) + sequences + rows + 1
        if self._tables is None or len(self._tables) < needed:
            # Plans that were made before keep theirs.
            self._tables = torch.zeros(needed, dtype=torch.int32, device=self._cache.device)
        return self._tables

    def decode_plan(self, sequences: int) -> FixedAttentionPlan | None:
        """A plan for CUDA graphs of exactly `sequences` decoding rows; None if unsupported."""
        return None

    def mixed_plan(self, sequences: int, rows: int) -> FixedAttentionPlan | None:
        """A plan for CUDA graphs of any mix of rows in at most `sequences`; None if unsupported.

        Rows behind those of the sequences write to page 0, and their output is ignored.
        """
        return None

    def crowd(self, sequences: int) -> int | None:
        """Decoding rows from which on `crowded_plan` is faster; None if there is no such plan."""
        return None

    def crowded_plan(self, sequences: int, rows: int) -> FixedAttentionPlan | None:
        """A plan like `mixed_plan` that is faster where many rows decode; None as in `crowd`."""
        return None


class Compiling:
    """The compilation of a `backend`'s kernels, in a thread that does not outlive the process.

    `on_end` is called in it. Only if nothing is `awaited` its priority is low: other engines'
    compilers would leave it next to no time. `error` is what it ended with, and is in the log.
    """

    def __init__(
        self, backend: AttentionBackend, on_end: Callable[[], None], *, awaited: bool
    ) -> None:
        self.backend, self._on_end, self._awaited = backend, on_end, awaited
        self.error: BaseException | None = None
        self.running = True
        threading.Thread(target=self._run, name="compile-attention", daemon=True).start()

    def _run(self) -> None:
        # Elsewhere priorities are those of processes.
        if sys.platform == "linux" and not self._awaited:
            thread = threading.get_native_id()
            lower = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, lower)
        try:
            self.backend.compile()
        except BaseException as error:  # others would wait for ever
            self.error = error
            log.warning("the kernels of attention are not compiled", exc_info=True)
        self.running = False
        self._on_end()


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: AttentionPlan,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' attention modules, whose `layer_idx` selects the layer.

    `query` is [1, heads, rows, head_dim], `key` and `value` [1, kv_heads, rows, head_dim]. The mask
    is ignored. `scaling` is 1/√head_dim if None. Returns [1, rows, heads, head_dim], and None.
    """
    if scaling is None:
        scaling = float(query.shape[-1]) ** -0.5
    layer: Any = module.layer_idx
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return plan.run(layer, *rows, scaling)[None], None


@cache
def register_attention() -> str:
    """Register `attend` with transformers; returns the name to put into a model's config."""
    from transformers import AttentionInterface

    # Where torch compiles layers, attention and its plan stay in Python.
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attend))
    return IMPLEMENTATION


def pinned(values: NDArray[Any]) -> Tensor:
    """Copy to page-locked host memory where there is a GPU."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory() if torch.cuda.is_available() else host


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(values))
    return pinned(values).to(device, non_blocking=True)


def to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start a copy to the host; returns it, and the event of its end, None if it is there."""
    if not values.is_cuda:
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


def send_together(parts: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays of one type in one copy (60 us of the host), aligned to 64 bytes each."""
    sizes = [-(-part.size // ALIGNED) * ALIGNED for part in parts]
    together = np.zeros(sum(sizes), parts[0].dtype)
    ends = list(accumulate(sizes))
    for part, end, size in zip(parts, ends, sizes, strict=True):
        together[end - size : end - size + part.size] = part.ravel()
    sent = to_device(together, device)
    return [
        sent[end - size : end - size + part.size].view(part.shape)
        for part, end, size in zip(parts, ends, sizes, strict=True)
    ]
