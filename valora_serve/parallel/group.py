"""The processes of a tensor-parallel group, and the tensors that they exchange.

NCCL carries them between GPUs, in CUDA graphs too, gloo between processes on a CPU. All ranks must
call the same methods in the same order. Small tensors are summed in memory that the GPUs of a host
read from each other, in one kernel: NCCL takes ten microseconds and more, twice in every layer of a
decode step.
"""

from __future__ import annotations

import datetime
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from valora_serve.errors import SettingsError

log = logging.getLogger(__name__)

SECONDS = 600.0  # for which a process waits for the others in a call before it gives up
LIMIT = 1 << 20  # bytes; every GPU reads all others' whole, so that NCCL wins with long tensors
ALIGNMENT = 16  # bytes that the kernel reads at once
RELEASE_SECONDS = 2.0  # for which kernels that wait are let go; a step has a few hundred


def make_store(size: int, port: int = 0) -> Any:
    """The store at which processes meet; rank 0 leaves its port open, and others name it."""
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make("127.0.0.1", port, size, is_master=not port, wait_for_workers=False)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of this GPU by data type ([elements]) that other GPUs can read, and all `handles`."""

    name: str
    buffers: dict[torch.dtype, Tensor] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)

    # Torch keeps the store of a group's name: a second one of a process would wait at the first's.
    opened: ClassVar[bool] = False

    @classmethod
    def open(cls, rank: int, size: int, device: torch.device) -> PeerMemory | None:
        """Share memory with all ranks, which call this too; None where that is not possible."""
        others = [(device.index or 0) + n - rank for n in range(size) if n != rank]
        reads = all(torch.cuda.can_device_access_peer(device, other) for other in others)
        agreed = torch.tensor([int(reads and not cls.opened)], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        if not int(agreed):
            return None
        cls.opened = True
        from torch.distributed import _symmetric_memory as symmetric

        world: Any = dist.group.WORLD
        found = cls(world.group_name)
        try:
            for dtype in (torch.bfloat16, torch.float32):
                buffer = symmetric.empty(LIMIT // dtype.itemsize, dtype=dtype, device=device)
                found.handles.append(symmetric.rendezvous(buffer, world.group_name))
                found.buffers[dtype] = buffer
        except RuntimeError as error:  # containers may forbid to share memory
            log.warning("GPUs exchange small tensors through NCCL, which is slower: %s", error)
            return None
        return found

    def takes(self, values: Tensor) -> bool:
        """Whether a tensor can be summed here: the same answer in all ranks."""
        size = values.dtype.itemsize
        length, start = values.numel() * size, int(values.storage_offset()) * size
        fits = 0 < length <= LIMIT and not length % ALIGNMENT and not start % ALIGNMENT
        return fits and values.dtype in self.buffers and values.is_contiguous()

    def all_reduce(self, values: Tensor) -> None:
        """Replace a tensor by the sum over the ranks."""
        buffer = self.buffers[values.dtype][: values.numel()].view(values.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer, values, "sum", self.name, values)

    def release(self, rank: int, size: int) -> None:
        """Let kernels go on, with wrong sums, that wait for signals of a process that has ended."""
        until = time.monotonic() + RELEASE_SECONDS
        stream = torch.cuda.Stream(self.buffers[torch.float32].device)
        with torch.cuda.stream(stream):
            while time.monotonic() < until:
                for one in self.handles:
                    pads = [one.get_signal_pad(k, dtype=torch.int32) for k in range(size)]
                    signal_all(pads, rank)
                stream.synchronize()


def signal_all(pads: Sequence[Tensor], rank: int) -> None:
    """Write the signals that a process waits for, as if the others had come to every sum.

    In the pad of a process ([entries] int32), entry `block * size + sender` says that the sender
    has come. A kernel waits until its own entry of every pad is 0 and sets it to 1, then until all
    entries of its process's pad are 1 and sets them to 0; its entry there is its own doing.
    """
    size = len(pads)
    for receiver, pad in enumerate(pads):
        entries = pad[: pad.numel() // size * size].view(-1, size)
        if receiver == rank:
            entries[:, :rank] = 1
            entries[:, rank + 1 :] = 1
        else:
            entries[:, rank] = 0


@dataclass(frozen=True, slots=True)
class Group:
    """A rank's view of its tensor-parallel group, whose processes run on one machine."""

    rank: int  # 0 has the queue and the policy
    size: int  # number of processes
    device: torch.device  # of this one
    peers: PeerMemory | None = None  # memory that GPUs share, where they can
    beside: torch.cuda.Stream | None = None  # stream for sums beside other work; None without GPUs

    @classmethod
    def join(cls, rank: int, size: int, device: torch.device, store: Any) -> Group:
        """Meet the other processes at a store; a process belongs to one group at a time."""
        if dist.is_initialized():
            raise SettingsError(
                "tensor_parallel: this process belongs to a group of torch.distributed already: "
                "start the engine in a process of its own"
            )
        # gloo asks the system for the address of the host's name, which need not have any.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = datetime.timedelta(seconds=SECONDS)
        if device.type != "cuda":
            dist.init_process_group("gloo", None, timeout, size, rank, store)
            return cls(rank, size, device)
        torch.cuda.set_device(device)
        # torch would end this process without a word if another one were lost.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        dist.init_process_group("nccl", None, timeout, size, rank, store, device_id=device)
        peers = PeerMemory.open(rank, size, device)
        return cls(rank, size, device, peers, torch.cuda.Stream(device))

    def all_reduce(self, values: Tensor) -> None:
        """Replace a tensor by the sum over the ranks."""
        if self.peers is not None and self.peers.takes(values):
            self.peers.all_reduce(values)
        else:
            dist.all_reduce(values)

    def start_all_reduce(self, values: Tensor) -> Callable[[], object]:
        """Start `all_reduce`; no other sum may start before what is returned has been called."""
        if self.beside is None:
            self.all_reduce(values)
            return lambda: None
        here, beside = torch.cuda.current_stream(self.device), self.beside
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            self.all_reduce(values)
        return lambda: here.wait_stream(beside)

    def gather(self, values: Tensor) -> Tensor:
        """The tensors of all ranks: […] → [size, …]."""
        if self.peers is not None and values.numel() * values.element_size() * self.size <= LIMIT:
            found = values.new_zeros((self.size, *values.shape))
            found[self.rank] = values
            self.all_reduce(found)
            return found
        found = values.new_empty((self.size, *values.shape))
        dist.all_gather_into_tensor(found.view(-1), values.contiguous().view(-1))
        return found

    def least(self, value: int) -> int:
        """The smallest of the ranks' numbers; waits for the device."""
        found = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def broadcast(self, values: Tensor) -> None:
        """Replace a tensor by that of rank 0."""
        dist.broadcast(values, 0)

    def abort(self) -> None:
        """Give up all calls under way, so that nothing waits for a process that has ended."""
        if self.peers is not None:
            own = self.rank, self.size
            self.peers.release(*own)
            # Again, beside the end of NCCL's calls: sums may wait behind those.
            threading.Thread(target=self.peers.release, args=own, daemon=True).start()
        if self.device.type == "cuda" and dist.is_initialized():
            dist.distributed_c10d._get_default_group().abort()

    def leave(self) -> None:
        """Leave the group, whose other processes have ended."""
        if dist.is_initialized():
            if self.device.type == "cuda":  # which would wait for theirs
                dist.distributed_c10d._get_default_group().abort()
            dist.destroy_process_group()
