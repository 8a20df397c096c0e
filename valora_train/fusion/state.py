"""What a fusion keeps on disk, to be resumed: state, snapshots, checkpoint, result."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from valora_data.checkpoint import Checkpoint
from valora_train.fusion.decision import Attempt
from valora_train.stage import damaged, read_json, write_json

FUSION = "fusion.json"
STATE = "state.json"
SNAPSHOTS = "snapshots"
CHECKPOINT = "checkpoint"
HEAD_ONLY = "head_only"  # folder of what domains reach without LoRA: figures, heads and pictures
SAVED = {  # attributes, and what files call them since the first version
    "head_only": "head_only", "accuracies": "told", "seconds": "seconds", "attempts": "attempts",
    "snapshots": "snapshots", "mlflow_run_id": "mlflow_run_id",
}  # fmt: skip


class FusionState:
    """Progress of a fusion, read from its folder; `head_only` are figures of an earlier one."""

    def __init__(
        self,
        folder: Path,
        head_only: Mapping[str, dict[str, float]],
        checkpoint_seconds: float | None = None,
    ) -> None:
        self.folder = folder
        self.checkpoint = Checkpoint(folder / CHECKPOINT, checkpoint_seconds)
        (folder / SNAPSHOTS).mkdir(exist_ok=True)
        self.head_only: dict[str, dict[str, float]] = dict(head_only)  # keys `val` and `test`
        self.accuracies: list[dict[str, float]] = []  # on validation, of every decided attempt
        self.seconds: list[float] = []  # duration of each
        self.attempts: list[dict[str, Any]] = []  # what identifies each, see `attempt_facts`
        self.snapshots: dict[str, str] = {}  # file of the latest committed one, by adapter
        self.mlflow_run_id: str | None = None
        if (folder / STATE).is_file():
            try:
                saved = dict(read_json(folder / STATE))
                vars(self).update({ours: saved[key] for ours, key in SAVED.items() if key in saved})
            except (ValueError, TypeError) as error:
                raise damaged(folder, f"{STATE} cannot be read") from error
        for name in self.snapshots.values():
            if not (folder / SNAPSHOTS / name).is_file():
                raise damaged(folder, f"{SNAPSHOTS}/{name} is missing")

    def save(self) -> None:
        """Write `state.json`."""
        write_json(self.folder / STATE, {key: getattr(self, ours) for ours, key in SAVED.items()})

    def write_snapshot(self, adapter: str, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write what `Trainer.snapshot` returns; the adapter's last one stays until discarded."""
        self.snapshots[adapter] = snapshot_file(adapter, number)
        write_snapshot(self.folder, self.snapshots[adapter], tensors)

    def read_snapshot(self, adapter: str) -> dict[str, Tensor]:
        """The latest snapshot of an adapter."""
        return read_snapshot(self.folder, self.snapshots[adapter])

    def discard_old_snapshots(self) -> None:
        """Delete the snapshots that newer ones have replaced."""
        for file in (self.folder / SNAPSHOTS).iterdir():
            if file.name not in self.snapshots.values():
                file.unlink()


def of_domains(state: Mapping[str, Tensor], domains: Iterable[str]) -> dict[str, Tensor]:
    """The part of an adapter's snapshot that is left when it holds these domains only."""
    names = "|".join(map(re.escape, domains)) or "$"
    mine = re.compile(rf"(lora|random)/|head/({names})/|optimizer/[^/]+/(({names})/|[^/]+$)")
    return {key: value for key, value in state.items() if mine.match(key)}


def snapshot_file(adapter: str, number: int) -> str:
    """Name of the file of an adapter's snapshot after an attempt; 0 is an earlier fusion."""
    return f"{adapter}-{number:02d}.safetensors"


def attempt_facts(attempt: Attempt, dedicated: str | None = None) -> dict[str, Any]:
    """What identifies the training of an attempt, or the dedicated adapter that it takes."""
    return {
        "new": list(attempt.new), "adapter": attempt.adapter, "held": list(attempt.held),
        "rehearse": attempt.rehearse, "dedicated": dedicated,
        "rank": None,  # in earlier versions, a strategy could raise it
    }  # fmt: skip


def write_snapshot(folder: Path, file: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a snapshot of an adapter below `SNAPSHOTS` in a folder, whole or not at all."""
    from safetensors.torch import save_file

    temporary = folder / SNAPSHOTS / f"{file}.tmp"
    # The order of the heads is that of their gradients, whose norm depends on it.
    facts = {"order": json.dumps(list(tensors)), "sha256": _hash(tensors)}
    save_file(dict(tensors), temporary, facts)
    temporary.replace(temporary.with_suffix(""))


def read_snapshot(folder: Path, file: str) -> dict[str, Tensor]:
    """Read a snapshot of an adapter, with its tensors in the order in which they were written."""
    try:
        with safe_open(folder / SNAPSHOTS / file, "pt") as opened:
            facts = opened.metadata() or {}
            order = json.loads(facts["order"]) if "order" in facts else list(opened.keys())
            tensors = {name: opened.get_tensor(name) for name in order}
    except (SafetensorError, FileNotFoundError, ValueError, KeyError) as error:
        raise damaged(folder, f"{SNAPSHOTS}/{file} cannot be read") from error
    if facts.get("sha256") not in (None, _hash(tensors)):
        raise damaged(folder, f"{SNAPSHOTS}/{file} is not what was written")
    return tensors


def _hash(tensors: Mapping[str, Tensor]) -> str:
    from torch import uint8

    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(name.encode())
        total.update(tensor.contiguous().reshape(-1).view(uint8).numpy().data)
    return total.hexdigest()
