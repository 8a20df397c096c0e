"""The processes of a tensor-parallel group, and the tensors that they exchange.

torch.distributed carries them: NCCL between GPUs (small tensors go through memory that they share),
gloo between processes on a CPU. All ranks must call the same methods in the same order; on a GPU
the calls are enqueued on the current stream, and can be captured in a CUDA graph.
"""

from __future__ import annotations

import datetime
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from valora_serve.errors import SettingsError
from valora_serve.parallel.peer_memory import PeerMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HOST = "127.0.0.1"
SECONDS = 600.0
"""Seconds for which a process waits for the others in a call before it gives up."""


def make_store(size: int, port: int = 0) -> Any:
    """Return the store at which processes meet; rank 0 leaves its port open, and others name it."""
    return dist.TCPStore(HOST, port, size, is_master=not port, wait_for_workers=False)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Group:
    """A rank's view of its tensor-parallel group, whose processes run on one machine.

    Attributes:
        rank: Number of this process; 0 has the queue and the policy.
        size: Number of processes.
        device: Device of this process.
        peers: Memory that the GPUs share; None without GPUs, or where they cannot.
    """

    rank: int
    size: int
    device: torch.device
    peers: PeerMemory | None = None

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
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
            # torch would end this process without a word if another one were lost.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=SECONDS),
            device_id=device if cuda else None,
        )
        return cls(rank, size, device, PeerMemory.open(rank, size, device) if cuda else None)

    def all_reduce(self, values: Tensor) -> None:
        """Replace a tensor by the sum over the ranks."""
        if self.peers is not None and self.peers.takes(values):
            self.peers.all_reduce(values)
        else:
            dist.all_reduce(values)

    def start_all_reduce(self, values: Tensor) -> Callable[[], object]:
        """Start `all_reduce`; the function that is returned makes later work wait for it."""
        if self.peers is not None and self.peers.takes(values):
            return self.peers.start_all_reduce(values)
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        return work.wait

    def gather(self, values: Tensor) -> Tensor:
        """Return the tensors of all ranks: […] → [size, …]."""
        values = values.contiguous()
        if self.peers is not None and (small := self.peers.gather(values)) is not None:
            return small
        found = values.new_empty((self.size, *values.shape))
        dist.all_gather_into_tensor(found.view(-1), values.view(-1))
        return found

    def least(self, value: int) -> int:
        """Return the smallest of the ranks' numbers; waits for the device."""
        found = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def broadcast(self, values: Tensor) -> None:
        """Replace a tensor by that of rank 0."""
        dist.broadcast(values, src=0)

    def send(self, values: Tensor, target: int) -> None:
        """Send a tensor to another rank."""
        dist.send(values.contiguous(), dst=target)

    def receive(self, values: Tensor, source: int) -> None:
        """Fill a tensor with one that another rank sends to this one."""
        dist.recv(values, src=source)

    def abort(self) -> None:
        """Give up all calls under way, so that nothing waits for a process that has ended."""
        if self.peers is not None:
            self.peers.release()
            # Again, beside the end of NCCL's calls: sums may wait behind those.
            threading.Thread(target=self.peers.release, daemon=True).start()
        if self.device.type == "cuda" and dist.is_initialized():
            dist.distributed_c10d._get_default_group().abort()

    def leave(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()
