"""Residency on a device: copies run on a CUDA stream of their own, beside the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from valora_serve.memory.residency import P, Residency

if TYPE_CHECKING:
    from valora_serve.memory.residency import Entry, Room


class DeviceResidency(Residency[P]):
    """Things of one kind, by key, in pages of a device.

    Args:
        room: Pages and host memory.
        device: Device of the pages.
    """

    def __init__(self, room: Room, device: torch.device) -> None:
        super().__init__(room, background=device.type == "cuda")
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _write(self, entry: Entry[P]) -> None:
        """Copy an entry to its pages, on the current stream."""
        raise NotImplementedError

    def copy(self, entry: Entry[P]) -> torch.cuda.Event | None:
        """Copy an entry to its pages; return what is recorded behind the copy on a GPU."""
        if self._stream is None:
            self._write(entry)
            return None
        # Steps that were launched may still read what the pages held before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._write(entry)
            copied = torch.cuda.Event()
            copied.record()
        return copied
