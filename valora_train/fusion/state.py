"""What a fusion keeps on disk while it runs, so that an interrupted one can be resumed.

The folder holds `state.json`, one snapshot per adapter in `snapshots/`, the checkpoint of the
attempt that is running, and in the end `fusion.json` with the result.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from valora_data.checkpoint import Checkpoint
from valora_train.errors import StageError
from valora_train.stage import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from valora_train.fusion.decision import Attempt

FUSION = "fusion.json"
STATE = "state.json"
SNAPSHOTS = "snapshots"
CHECKPOINT = "checkpoint"


class FusionState:
    """Progress of a fusion, read from its folder if it was started before.

    Changes are written to `state.json` by `save`; snapshots are written at once.

    Args:
        folder: Folder of the fusion.
        head_only: Accuracies without LoRA that an earlier fusion measured, for a new fusion.
        checkpoint_seconds: Seconds between checkpoints; None for the default.

    Raises:
        StageError: If `state.json` is damaged.

    Attributes:
        folder: Folder of the fusion.
        head_only: Accuracy of each domain without LoRA, with the keys `val` and `test`.
        told: Validation accuracies of every attempt that was decided, in order.
        seconds: Duration of every attempt that was decided, in seconds.
        attempts: Every attempt that was decided (see `attempt_facts`).
        snapshots: File of the latest committed snapshot, by adapter.
        mlflow_run_id: The MLflow run of the fusion, once it is started.
        checkpoint: The checkpoint of the attempt that is running.
    """

    def __init__(
        self,
        folder: Path,
        head_only: Mapping[str, dict[str, float]],
        checkpoint_seconds: float | None = None,
    ) -> None:
        self.folder = folder
        self.checkpoint = Checkpoint(folder / CHECKPOINT, checkpoint_seconds)
        (folder / SNAPSHOTS).mkdir(exist_ok=True)
        saved = self._read()
        self.head_only: dict[str, dict[str, float]] = saved.get("head_only", dict(head_only))
        self.told: list[dict[str, float]] = saved.get("told", [])
        self.seconds: list[float] = saved.get("seconds", [])
        self.attempts: list[dict[str, Any]] = saved.get("attempts", [])
        self.snapshots: dict[str, str] = saved.get("snapshots", {})
        self.mlflow_run_id: str | None = saved.get("mlflow_run_id")

    def _read(self) -> dict[str, Any]:
        file = self.folder / STATE
        if not file.is_file():
            return {}
        try:
            saved = read_json(file)
            missing = [
                name
                for name in saved.get("snapshots", {}).values()
                if not (self.folder / SNAPSHOTS / name).is_file()
            ]
        except (ValueError, AttributeError) as error:
            raise _damaged(self.folder, f"{STATE} cannot be read") from error
        if missing:
            raise _damaged(self.folder, f"{SNAPSHOTS}/{missing[0]} is missing")
        found: dict[str, Any] = saved
        return found

    def save(self) -> None:
        """Write `state.json`."""
        values = {
            "head_only": self.head_only,
            "told": self.told,
            "seconds": self.seconds,
            "attempts": self.attempts,
            "snapshots": self.snapshots,
            "mlflow_run_id": self.mlflow_run_id,
        }
        write_json(self.folder / STATE, values)

    def write_snapshot(self, adapter: str, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a snapshot of an adapter; the previous one stays until it is discarded.

        Args:
            adapter: The adapter.
            number: The attempt that the snapshot follows; 0 for an adapter of an earlier fusion.
            tensors: Snapshot of the adapter, as `Trainer.snapshot` returns it.
        """
        file = snapshot_file(adapter, number)
        write_snapshot(self.folder, file, tensors)
        self.snapshots[adapter] = file

    def read_snapshot(self, adapter: str) -> dict[str, Tensor]:
        """The latest snapshot of an adapter.

        Raises:
            StageError: If its file is damaged.
        """
        return read_snapshot(self.folder, self.snapshots[adapter])

    def forget(self, adapters: Iterable[str]) -> None:
        """Forget the snapshots of all adapters but these."""
        self.snapshots = {name: self.snapshots[name] for name in adapters if name in self.snapshots}

    def discard_old_snapshots(self) -> None:
        """Delete the snapshots that newer ones have replaced."""
        for file in (self.folder / SNAPSHOTS).iterdir():
            if file.name not in self.snapshots.values():
                file.unlink()


def of_domains(state: Mapping[str, Tensor], domains: Iterable[str]) -> dict[str, Tensor]:
    """The part of an adapter's snapshot that is left when it holds these domains only.

    Args:
        state: A snapshot of the adapter, as `Trainer.snapshot` returns it.
        domains: Domains whose heads stay, with their part of the optimiser's state.
    """
    names = "|".join(map(re.escape, domains)) or "$"
    mine = re.compile(rf"(lora|random)/|head/({names})/|optimizer/[^/]+/(({names})/|[^/]+$)")
    return {key: value for key, value in state.items() if mine.match(key)}


def snapshot_file(adapter: str, number: int) -> str:
    """Name of the file of an adapter's snapshot after an attempt."""
    return f"{adapter}-{number:02d}.safetensors"


def attempt_facts(attempt: Attempt, dedicated: str | None = None) -> dict[str, Any]:
    """What identifies the training of an attempt among those of the same data, as JSON.

    Args:
        attempt: The attempt.
        dedicated: Key of the dedicated adapter that it takes instead of training, if it does.
    """
    return {
        "new": list(attempt.new),
        "adapter": attempt.adapter,
        "held": list(attempt.held),
        "rehearse": attempt.rehearse,
        "rank": None,  # in earlier versions, a strategy could raise it
        "dedicated": dedicated,
    }


def write_snapshot(folder: Path, file: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a snapshot of an adapter, whole or not at all.

    Args:
        folder: Folder of the fusion, or of trials.
        file: Name of the snapshot's file, in the folder `SNAPSHOTS` there.
        tensors: Snapshot of the adapter, as `Trainer.snapshot` returns it.
    """
    from safetensors.torch import save_file

    temporary = folder / SNAPSHOTS / f"{file}.tmp"
    # The order of the heads is that of their gradients, whose norm depends on it.
    facts = {"order": json.dumps(list(tensors)), "sha256": _hash(tensors)}
    save_file(dict(tensors), temporary, facts)
    temporary.replace(temporary.with_suffix(""))


def read_snapshot(folder: Path, file: str) -> dict[str, Tensor]:
    """Read a snapshot of an adapter, with its tensors in the order in which they were written.

    Args:
        folder: Folder of the fusion, or of trials.
        file: Name of the snapshot's file.

    Raises:
        StageError: If the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / SNAPSHOTS / file, "pt") as opened:
            facts = opened.metadata() or {}
            order = json.loads(facts["order"]) if "order" in facts else list(opened.keys())
            tensors = {name: opened.get_tensor(name) for name in order}
    except (SafetensorError, FileNotFoundError, ValueError, KeyError) as error:
        raise _damaged(folder, f"{SNAPSHOTS}/{file} cannot be read") from error
    if facts.get("sha256") not in (None, _hash(tensors)):
        raise _damaged(folder, f"{SNAPSHOTS}/{file} is not what was written")
    return tensors


def _hash(tensors: Mapping[str, Tensor]) -> str:
    from torch import uint8

    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(name.encode())
        total.update(tensor.contiguous().reshape(-1).view(uint8).numpy().data)
    return total.hexdigest()


def _damaged(folder: Path, what: str) -> StageError:
    return StageError(
        f"the state of a fusion is damaged ({what}): delete {folder} and run the same command again"
    )
