"""Chooses how LoRA matrices are split over the GPUs of a group, from measured times.

`LoraParallel.SLORA` divides all work and memory by the number of GPUs, and pays for it with one
collective of rows × rank numbers for every group of linear layers. `LoraParallel.REPLICATE_A` reads
one of the two matrices whole on every GPU, and pays with time and memory. Which one is faster
depends on the sizes, the number of rows and the link between the GPUs, so it is measured:
`tests/bench/valora_serve/bench_tensor_parallel.py --save` writes the table that is read here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from valora_serve.errors import SettingsError
from valora_serve.parallel.partition import LoraParallel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

AUTO = "auto"
CHOICES = (AUTO, *(str(one) for one in LoraParallel))
"""Values of the setting `lora_parallel`."""

TYPICAL_ROWS = 64
"""Rows of a step for which a way is chosen: a batch of decoding requests."""

LARGE_MATRIX = 64 << 20
"""Elements of a replicated matrix of one adapter, from which on it is split where nothing was
measured: reading it takes longer than a collective."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of both ways for one shape.

    Attributes:
        size: Number of GPUs.
        row: Whether the layers are split by their inputs.
        inputs: Inputs of the layers on one GPU.
        outputs: Outputs of all layers of the group on one GPU.
        rank: Largest rank of an adapter.
        rows: Rows of the step.
        slora: Microseconds of the LoRA terms with `LoraParallel.SLORA`.
        replicate_a: Microseconds with `LoraParallel.REPLICATE_A`.
    """

    size: int
    row: bool
    inputs: int
    outputs: int
    rank: int
    rows: int
    slora: float
    replicate_a: float

    @property
    def faster(self) -> LoraParallel:
        """The faster way."""
        return LoraParallel.SLORA if self.slora < self.replicate_a else LoraParallel.REPLICATE_A


@dataclass(frozen=True, slots=True)
class LoraChoice:
    """How LoRA matrices are split, for every group of linear layers.

    Attributes:
        setting: One of `CHOICES`.
        size: Number of GPUs.
        rank: Largest rank of an adapter.
        table: What was measured on this kind of machine.
    """

    setting: str
    size: int
    rank: int
    table: tuple[Measured, ...] = ()

    def choose(self, row: bool, inputs: int, outputs: Sequence[int]) -> LoraParallel:
        """Return how the LoRA matrices of a group are split.

        A measured shape is looked up by its sizes; of several, the one whose rank and rows are
        nearest counts. Where nothing was measured, only very large matrices are split, as their
        communication takes longer than reading them otherwise.

        Args:
            row: Whether the layers are split by their inputs.
            inputs: Inputs of the layers on this GPU.
            outputs: Outputs of each layer on this GPU.
        """
        if self.setting != AUTO:
            return LoraParallel(self.setting)
        same = [
            one
            for one in self.table
            if (one.size, one.row, one.inputs, one.outputs)
            == (self.size, row, inputs, sum(outputs))
        ]
        if same:
            return min(
                same, key=lambda one: (abs(one.rank - self.rank), abs(one.rows - TYPICAL_ROWS))
            ).faster
        # What every GPU would hold whole: the A of every column layer, the B of a row layer.
        whole = self.rank * (sum(outputs) if row else inputs * len(outputs))
        return LoraParallel.SLORA if whole >= LARGE_MATRIX else LoraParallel.REPLICATE_A


def table_file(folder: Path, machine: str) -> Path:
    """Return the file of what was measured on a kind of machine.

    Args:
        folder: Folder of measured costs.
        machine: Name of the GPU.
    """
    name = "".join(one if one.isalnum() else "-" for one in machine)
    return folder / f"lora-parallel-{name}.json"


def read_table(file: Path) -> tuple[Measured, ...]:
    """Return what was measured; nothing if there is no such file.

    Raises:
        SettingsError: The file is damaged.
    """
    try:
        return tuple(Measured(**one) for one in json.loads(file.read_text()))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise SettingsError(
            f"{file} cannot be read ({error}): measure again with --save, or delete it"
        ) from error


def save_table(file: Path, table: Sequence[Measured]) -> None:
    """Write what was measured."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps([asdict(one) for one in table], indent=1) + "\n")
    part.replace(file)
