"""The samples of domains as a trainer reads them: loaded and encoded when they are first needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from valora_data.contract.base_model import base_folder
from valora_data.cpu import usable_cores
from valora_data.schema import Split
from valora_train.fusion.samples import DomainData
from valora_train.tasks.registry import make_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from valora_data.schema import Sample
    from valora_train.model.lmm import Lmm
    from valora_train.settings import DomainSettings, Settings

TAUGHT = "taught"
"""Name of the samples that a teacher labelled, beside those of the splits."""


def load_domain(
    settings: Settings,
    domain: DomainSettings,
    required: float,
    lmm: Lmm,
    read: Callable[[str], list[Sample]],
) -> DomainData:
    """Read and encode the samples of a domain.

    Args:
        settings: All settings.
        domain: The domain.
        required: Accuracy that it must keep.
        lmm: Encodes the samples.
        read: Returns the samples of `TAUGHT`, `Split.VAL` or `Split.TEST`.
    """
    task = make_task(
        replace(domain.domain(), required=required),
        settings.heads,
        lmm,
        video=domain.video,
        first_head=pretraining_head(settings.model.id),
    )
    return DomainData(
        task,
        read(TAUGHT),
        {split: read(split) for split in (Split.VAL, Split.TEST)},
        lmm,
        settings.train.flip and domain.mirrors,
        settings.train.augment,
        settings.train.seed,
    )


class LazyMapping(Mapping[str, DomainData]):
    """A mapping whose values are loaded when they are first looked up.

    Args:
        names: The keys.
        load: Loads the value of a key.
    """

    def __init__(self, names: Iterable[str], load: Callable[[str], DomainData]) -> None:
        self._names = tuple(names)
        self._load = load
        self._loaded: dict[str, DomainData] = {}

    def __getitem__(self, name: str) -> DomainData:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def make_deterministic(threads: int) -> None:
    """Make the same seed give the same packing: sums depend on the number of threads.

    Args:
        threads: Number of CPU threads; 0 for all cores.
    """
    torch.set_num_threads(threads or usable_cores())
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Nothing reads what it did not write; filling every new tensor takes a twentieth of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def pretraining_head(base: str) -> Tensor | None:
    """The pretraining head that a base model may ship, (5, width + 1), bias last."""
    file = Path(base_folder(base)) / "detection_head.safetensors"
    if not file.is_file():
        return None
    parts = load_file(file)
    rows = [
        torch.cat([parts[f"{name}.weight"], parts[f"{name}.bias"][:, None]], dim=1)
        for name in ("objectness", "box")
    ]
    return torch.cat(rows).float()
