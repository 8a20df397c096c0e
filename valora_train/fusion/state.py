"""What a fusion keeps on disk while it runs, so that an interrupted one can be resumed.

The folder holds `state.json`, one snapshot per adapter in `snapshots/`, and in the end
`fusion.json` with the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_train.stage import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

FUSION = "fusion.json"
STATE = "state.json"
SNAPSHOTS = "snapshots"


class FusionState:
    """Progress of a fusion, read from its folder if it was started before.

    Changes are written to `state.json` by `save`; snapshots are written at once.

    Args:
        folder: Folder of the fusion.
        head_only: Accuracies without LoRA that an earlier fusion measured, for a new fusion.

    Attributes:
        folder: Folder of the fusion.
        head_only: Accuracy of each domain without LoRA, with the keys `val` and `test`.
        told: Validation accuracies of every attempt that was decided, in order.
        seconds: Duration of every attempt that was decided, in seconds.
        snapshots: File of the latest committed snapshot, by adapter.
        mlflow_run_id: The MLflow run of the fusion, once it is started.
    """

    def __init__(self, folder: Path, head_only: Mapping[str, dict[str, float]]) -> None:
        self.folder = folder
        (folder / SNAPSHOTS).mkdir(exist_ok=True)
        file = folder / STATE
        saved: dict[str, Any] = read_json(file) if file.is_file() else {}
        self.head_only: dict[str, dict[str, float]] = saved.get("head_only", dict(head_only))
        self.told: list[dict[str, float]] = saved.get("told", [])
        self.seconds: list[float] = saved.get("seconds", [])
        self.snapshots: dict[str, str] = saved.get("snapshots", {})
        self.mlflow_run_id: str | None = saved.get("mlflow_run_id")

    def save(self) -> None:
        """Write `state.json`."""
        values = {
            "head_only": self.head_only,
            "told": self.told,
            "seconds": self.seconds,
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
        from safetensors.torch import save_file

        file = f"{adapter}-{number:02d}.safetensors"
        temporary = self.folder / SNAPSHOTS / f"{file}.tmp"
        save_file(dict(tensors), temporary)
        temporary.replace(temporary.with_suffix(""))
        self.snapshots[adapter] = file

    def read_snapshot(self, adapter: str) -> dict[str, Tensor]:
        """The latest snapshot of an adapter."""
        from safetensors.torch import load_file

        return load_file(self.folder / SNAPSHOTS / self.snapshots[adapter])

    def discard_old_snapshots(self) -> None:
        """Delete the snapshots that newer ones have replaced."""
        for file in (self.folder / SNAPSHOTS).iterdir():
            if file.name not in self.snapshots.values():
                file.unlink()
