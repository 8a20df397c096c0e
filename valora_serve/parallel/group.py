"""The processes of a tensor-parallel group, and the tensors that they exchange.

NCCL carries them between GPUs, in CUDA graphs too, gloo between processes on a CPU. All ranks must
call the same methods in the same order. Small tensors are summed in memory that the GPUs of a host
read from each other, in one kernel: NCCL takes ten microseconds and more, twice in every layer of a
decode step.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from valora_serve.errors import SettingsError

log = logging.getLogger(__name__)

LIMIT = 1 << 20  # bytes; every GPU reads all others' whole, so that NCCL wins with long tensors
ALIGNMENT = 16  # bytes that the kernel reads at once
SUMMED = (torch.bfloat16, torch.float32)  # data types of such sums
RELEASE_SECONDS = 2.0  # for which kernels that wait are let go; a step has a few hundred


def make_store(size: int, port: int = 0) -> Any:
    """The store at which processes meet; rank 0 leaves its port open, and others name it."""
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make("127.0.0.1", port, size, is_master=not port, wait_for_workers=False)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of this GPU that the others of a group can read."""

    name: str  # of the group
    buffer: Tensor  # [LIMIT] uint8
    handle: Any = None  # torch's, by which all ranks' are found
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
        try:
            buffer = symmetric.empty(LIMIT, dtype=torch.uint8, device=device)
            return cls(world.group_name, buffer, symmetric.rendezvous(buffer, world.group_name))
        except RuntimeError as error:  # containers may forbid to share memory
            log.warning("GPUs exchange small tensors through NCCL, which is slower: %s", error)
            return None

    def takes(self, values: Tensor) -> bool:
        """Whether a tensor can be summed here: the same answer in all ranks."""
        length, start = values.nbytes, int(values.storage_offset()) * values.itemsize
        fits = 0 < length <= LIMIT and not length % ALIGNMENT and not start % ALIGNMENT
        return fits and values.dtype in SUMMED and values.is_contiguous()

    def all_reduce(self, values: Tensor) -> None:
        """Replace a tensor by the sum over the ranks."""
        buffer = self.buffer[: values.nbytes].view(values.dtype).view(values.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer, values, "sum", self.name, values)

    def release(self) -> None:
        """Let kernels go on, with wrong sums, that wait for signals of a process that has ended."""
        size, rank = self.handle.world_size, self.handle.rank
        pads = [self.handle.get_signal_pad(n, dtype=torch.int32) for n in range(size)]
        until = time.monotonic() + RELEASE_SECONDS
        stream = torch.cuda.Stream(self.buffer.device)
        with torch.cuda.stream(stream):
            while time.monotonic() < until:
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
        if device.type != "cuda":
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            return cls(rank, size, device)
        torch.cuda.set_device(device)
        # torch would end this process without a word if another one were lost.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
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
        """Put the tensors of all ranks side by side: [..., width] → [..., size · width]."""
        width = values.shape[-1]
        found = values.new_zeros((*values.shape[:-1], self.size * width))
        found[..., self.rank * width : (self.rank + 1) * width] = values
        self.all_reduce(found)
        return found

    def minimum(self, value: int) -> int:
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
            self.peers.release()
            # Again, beside the end of NCCL's calls: sums may wait behind those.
            threading.Thread(target=self.peers.release, daemon=True).start()
        if self.device.type == "cuda" and dist.is_initialized():
            dist.distributed_c10d._get_default_group().abort()

    def leave(self) -> None:
        """Leave the group, whose other processes have ended."""
        if dist.is_initialized():
            if self.device.type == "cuda":  # which would wait for theirs
                dist.distributed_c10d._get_default_group().abort()
            dist.destroy_process_group()
