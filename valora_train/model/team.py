"""Processes that train one adapter together, as `accelerate launch` or `torchrun` start them.

Every process draws the same batch and computes the gradients of its share; gradients are summed.
Every process holds the LoRA weights and heads; the frozen model's layers may be sharded.
"""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn


class Team:
    """The processes of one training run; all of them make the same calls in the same order.

    Args:
        device: Device that they train on, such as ``cuda`` or ``cpu``.

    Attributes:
        rank: Index of this process, from 0.
        size: Number of processes.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.rank, self.size = 0, 1
        self._kind = torch.device(device).type
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            # The leader may train teachers for hours while the others wait.
            state = PartialState(cpu=self._kind == "cpu", timeout=timedelta(days=7))
            self.rank, self.size = state.process_index, state.num_processes

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.size > 1 and kind is None:  # after an error the others may be gone
            torch.distributed.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes files and logs."""
        return self.rank == 0

    def share(self, items: Any) -> Any:
        """Return the rows of a tensor, or the items of a list, that this process computes."""
        return items[self.rank :: self.size]

    def collect(self, mine: Any) -> Any:
        """Gather the results of all processes, in the order of the items that `share` divided.

        Args:
            mine: Results for this process's share: a tensor's rows or a list.
        """
        if self.size == 1:
            return mine
        parts: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(parts, mine)
        rows = [
            part[place]
            for place in range(max(map(len, parts)))
            for part in parts
            if place < len(part)
        ]
        return torch.stack(rows) if torch.is_tensor(mine) else rows

    def add_up(self, parameters: Iterable[nn.Parameter], loss: float) -> float:
        """Replace gradients by their sum over the processes.

        Args:
            parameters: Parameters, the same ones on every process.
            loss: Loss of this process's share.

        Returns:
            The sum of the losses over the processes.
        """
        if self.size == 1:
            return loss
        trained = [p for p in parameters if p.requires_grad]
        for parameter in trained:
            if parameter.grad is None:  # this process's share had no sample for it
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in trained if p.grad is not None]
        told = torch.tensor([loss], device=gradients[0].device)
        flat = torch.cat([*(g.float().flatten() for g in gradients), told])
        torch.distributed.all_reduce(flat)
        *pieces, told = flat.split([*(g.numel() for g in gradients), 1])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
        return float(told)

    def agree(self, value: Any) -> Any:
        """Return the leader's value on every process, so that all decide alike."""
        if self.size == 1:
            return value
        told = [value]
        torch.distributed.broadcast_object_list(told)
        return told[0]

    def wait(self) -> None:
        """Wait until every process has come here."""
        self.agree(None)

    def shard(self, decoder: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Shard the layers of a frozen model (FSDP2); a layer is gathered while it runs.

        Adapters that are added later are whole on every process.

        Args:
            decoder: The module that runs the layers; its other weights stay whole.
            layers: The layers.
        """
        if self.size == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self._kind, (self.size,))
        whole = set(decoder.parameters()) - {p for layer in layers for p in layer.parameters()}
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(decoder, mesh=mesh, ignored_params=whole)


def end_process() -> None:
    """End a process of a team that has done its work; one that works alone goes on.

    torch's caches of sharded tensors keep a group's threads alive after the group was destroyed. On
    CPUs such a thread may ask for the interpreter's lock while the interpreter is taken down, which
    aborts the process. So what was registered for the exit runs, and the interpreter stays.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
