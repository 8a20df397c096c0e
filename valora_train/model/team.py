"""Processes that train one adapter together, as `accelerate launch` or `torchrun` start them.

Every process draws the same batch and learns its share of it; gradients are added up. LoRA weights
and heads are on every process; the layers of the frozen model may be parted among them.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn


class Team:
    """The processes of this training, in lockstep: what one calls, all call.

    Args:
        device: What they train on, such as ``cuda`` or ``cpu``.

    Attributes:
        rank: Of this process, from 0.
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
        """Whether this process writes files and speaks for all."""
        return self.rank == 0

    def share(self, items: Any) -> Any:
        """Every `size`-th of a tensor's rows or a list's items: those of this process."""
        return items[self.rank :: self.size]

    def collect(self, mine: Any) -> Any:
        """Put the shares of all processes together again, in the order that `share` took them from.

        Args:
            mine: What came out for the own share: a tensor's rows or a list.
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
            parameters: The same on every process.
            loss: Of the own share.

        Returns:
            The sum of the losses.
        """
        if self.size == 1:
            return loss
        trained = [p for p in parameters if p.requires_grad]
        for parameter in trained:
            if parameter.grad is None:  # no sample of it in the own share
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
        """What the leader has, so that all decide alike."""
        if self.size == 1:
            return value
        told = [value]
        torch.distributed.broadcast_object_list(told)
        return told[0]

    def wait(self) -> None:
        """Go on when all have come here."""
        self.agree(None)

    def part(self, core: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Part a frozen model's layers among the processes (FSDP2); each is gathered when it runs.

        Adapters that are added later stay whole on every process.

        Args:
            core: What runs the layers; its other weights stay whole.
            layers: They.
        """
        if self.size == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self._kind, (self.size,))
        whole = set(core.parameters()) - {p for layer in layers for p in layer.parameters()}
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(core, mesh=mesh, ignored_params=whole)
