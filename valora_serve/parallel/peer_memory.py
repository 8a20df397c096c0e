"""Sums of small tensors through memory that the GPUs of one host read from each other.

NCCL takes ten microseconds and more for a few kilobytes, twice in every layer of a decode step.
torch's symmetric memory reads the other GPUs' tensors over NVLink in one kernel.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

log = logging.getLogger(__name__)

LIMIT = 1 << 20
"""Most bytes of a tensor; every GPU reads all others' whole, so that NCCL wins with long ones."""
ALIGNMENT = 16
"""Bytes that the kernel reads at once."""
RELEASE_SECONDS = 2.0
"""Seconds for which kernels that wait for an ended process are let go; a step has a few hundred."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of this GPU that the other GPUs of a group can read, and theirs.

    Attributes:
        buffers: Memory of this GPU by data type: [elements].
        beside: The same for sums on `stream`, which need memory and signals of their own.
        handles: All of it, of all GPUs.
    """

    name: str
    rank: int
    size: int
    buffers: dict[torch.dtype, Tensor] = field(default_factory=dict)
    beside: dict[torch.dtype, Tensor] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)
    stream: torch.cuda.Stream | None = None

    opened: ClassVar[bool] = False
    """Whether this process has opened one: torch keeps the store of a group's name for the life of
    the process, so that a second group would wait at the first one's."""

    @classmethod
    def open(cls, rank: int, size: int, device: torch.device) -> PeerMemory | None:
        """Share memory with the other ranks, which must call this, too.

        Returns:
            None where a GPU cannot read the others' memory, or for the second group of a process.
        """
        first = (device.index or 0) - rank
        others = [first + number for number in range(size) if number != rank]
        reads = all(torch.cuda.can_device_access_peer(device, other) for other in others)
        agreed = torch.tensor([int(reads and not cls.opened)], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        if not int(agreed):
            return None
        cls.opened = True
        from torch.distributed import _symmetric_memory

        symmetric: Any = _symmetric_memory
        world: Any = dist.group.WORLD
        found = cls(world.group_name, rank, size, stream=torch.cuda.Stream(device))
        try:
            for buffers in (found.buffers, found.beside):
                for dtype in (torch.bfloat16, torch.float32):
                    buffer = symmetric.empty(LIMIT // dtype.itemsize, dtype=dtype, device=device)
                    found.handles.append(symmetric.rendezvous(buffer, found.name))
                    buffers[dtype] = buffer
        except RuntimeError as error:  # containers may forbid to share memory
            log.warning("GPUs exchange small tensors through NCCL, which is slower: %s", error)
            return None
        return found

    def takes(self, values: Tensor) -> bool:
        """Whether a tensor can be summed here: the same answer in all processes."""
        size = values.dtype.itemsize
        length, start = values.numel() * size, int(values.storage_offset()) * size
        return (
            values.dtype in self.buffers
            and values.is_contiguous()
            and 0 < length <= LIMIT
            and length % ALIGNMENT == 0
            and start % ALIGNMENT == 0
        )

    def all_reduce(self, values: Tensor) -> None:
        """Replace a tensor by the sum over the ranks."""
        self._sum(self.buffers, values)

    def start_all_reduce(self, values: Tensor) -> Callable[[], object]:
        """Start `all_reduce` on another stream; what is returned makes later work wait for it."""
        assert self.stream is not None
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(stream):
            self._sum(self.beside, values)
        return lambda: torch.cuda.current_stream(values.device).wait_stream(stream)

    def _sum(self, buffers: Mapping[torch.dtype, Tensor], values: Tensor) -> None:
        buffer = buffers[values.dtype][: values.numel()].view(values.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer, values, "sum", self.name, values)

    def gather(self, values: Tensor) -> Tensor | None:
        """Return the tensors of all ranks, […] → [size, …]; None if they are too long."""
        if values.numel() * values.dtype.itemsize * self.size > LIMIT or not self.takes(values):
            return None
        found = values.new_zeros((self.size, *values.shape))
        found[self.rank] = values
        self.all_reduce(found)
        return found

    def release(self) -> None:
        """Let kernels that wait for a process that has ended go on, with wrong sums.

        A kernel waits until the others' signals are in its GPU's memory; nothing else ends it.
        """
        until = time.monotonic() + RELEASE_SECONDS
        stream = torch.cuda.Stream(self.buffers[torch.float32].device)
        everyone = range(self.size)
        with torch.cuda.stream(stream):
            while time.monotonic() < until:
                for handle in self.handles:
                    pads = [handle.get_signal_pad(rank, dtype=torch.int32) for rank in everyone]
                    signal_all(pads, self.rank)
                stream.synchronize()


def signal_all(pads: Sequence[Tensor], rank: int) -> None:
    """Write the signals that a process waits for, as if the others had come to every sum.

    In the pad of a process ([entries] int32), entry `block * size + sender` says that the sender
    has come. A kernel waits until its own entry of every pad is 0 and sets it to 1, then waits
    until all entries of its process's pad are 1 and sets them to 0. Its entry in the pad of its own
    process is between 0 and 1 by its own doing: written here, it would wait for that forever.
    """
    size = len(pads)
    for receiver, pad in enumerate(pads):
        entries = pad[: pad.numel() // size * size].view(-1, size)
        if receiver == rank:
            entries[:, :rank] = 1
            entries[:, rank + 1 :] = 1
        else:
            entries[:, rank] = 0
