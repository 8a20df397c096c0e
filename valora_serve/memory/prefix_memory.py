"""Prefixes of contexts: keys and values in pages that stand before those of a request's own.

A prefix is trained, or taken from a document, once; all requests about it read the same pages. It
is evicted and prefetched like an adapter (`residency`). If it does not fill its last page, each
request gets a copy of that page, in which its own tokens follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from valora_data.wording import plural
from valora_serve.errors import AdapterError
from valora_serve.memory.block_manager import Owner
from valora_serve.memory.device_residency import DeviceResidency
from valora_serve.memory.unified import host_memory, lock_memory

if TYPE_CHECKING:
    from valora_serve.memory.residency import Entry, Room
    from valora_serve.memory.unified import UnifiedMemory


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedPrefix:
    """A prefix in host memory, laid out as in its pages.

    Attributes:
        content: Content hash.
        tokens: Number of tokens.
        buffer: [pages, elements of a page] in the memory's dtype; in pinned memory if the memory is
            on a GPU.
    """

    content: str
    tokens: int
    buffer: torch.Tensor

    @property
    def pages(self) -> int:
        """Number of pages that it takes on the device."""
        return len(self.buffer)

    @property
    def bytes(self) -> int:
        """Bytes that it takes in host memory."""
        return self.buffer.numel() * self.buffer.element_size()


def pack_prefix(
    memory: UnifiedMemory, name: str, content: str, keys: torch.Tensor, values: torch.Tensor
) -> PackedPrefix:
    """Lay out a prefix in host memory as in its pages; may be called from any thread.

    Args:
        memory: The memory that it is for.
        name: Name of the context, for messages.
        content: Content hash.
        keys: [layers, kv_heads, tokens, head_dim], after their rotary positions.
        values: The same shape.

    Raises:
        AdapterError: It has another shape than the memory, more pages, or values beyond the range
            of the memory's dtype.
    """
    page, dtype = memory.page, memory.storage.dtype
    layers, heads, tokens, width = keys.shape
    if (layers, heads, width) != (page.layers, page.kv_heads, page.head_dim):
        raise AdapterError(
            f"context {name} has keys of {layers} layers with {heads} heads of {width}, the engine "
            f"has {page.layers} with {page.kv_heads} of {page.head_dim}: make it for this base "
            "model"
        )
    count = -(-tokens // page.block_size)
    if count > memory.pages - 1:
        raise AdapterError(
            f"context {name} needs {plural(count, 'page')}, there are {memory.pages - 1}: start "
            "the engine with more memory, or make a context of fewer tokens"
        )
    buffer = host_memory(count * page.elements, dtype)
    shape = (count, page.layers, 2, page.block_size, page.kv_heads, page.head_dim)
    # [2, layers, kv_heads, pages, block_size, head_dim]
    placed = buffer.view(shape).permute(2, 1, 4, 0, 3, 5)
    full, rest = divmod(tokens, page.block_size)
    for part, target in zip((keys, values), placed, strict=True):
        end = full * page.block_size
        if full:
            target[:, :, :full] = part[:, :, :end].unflatten(2, (full, page.block_size))
        if rest:
            target[:, :, full, :rest] = part[:, :, end:]
    if not bool(buffer.abs().max().isfinite()):
        raise AdapterError(
            f"context {name} has values beyond the range of {dtype}: serve it in another dtype"
        )
    packed = PackedPrefix(content, tokens, buffer.view(count, page.elements))
    if memory.device.type == "cuda":
        lock_memory(packed, buffer)
    return packed


class PrefixMemory(DeviceResidency[PackedPrefix]):
    """The prefixes of an engine's contexts, by key.

    Args:
        memory: Pages on the device.
        room: Pages and host memory, shared with the adapters.
    """

    kind = "context"
    owner = Owner.CONTEXT

    def __init__(self, memory: UnifiedMemory, room: Room) -> None:
        super().__init__(room, memory.device)
        self._memory = memory

    def copy_rest(self, key: str, page: int) -> None:
        """Copy the last page of a resident prefix, on the current stream.

        Args:
            key: Its key.
            page: Page of a request, whose own tokens follow in it.
        """
        self._memory.copy_page(self.held(key)[-1], page)

    def _write(self, entry: Entry[PackedPrefix]) -> None:
        assert entry.packed is not None
        self._memory.write_pages(entry.packed, entry.pages)
