"""MLflow stores for tests: the migrations of a new one take seconds, a copy takes none."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

from valora_train.settings import PathSettings


@cache
def _migrated():
    from mlflow import MlflowClient

    folder = tempfile.TemporaryDirectory()
    _KEPT.append(folder)
    file = Path(folder.name, "mlflow.db")
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


_KEPT = []
"""Deleted when the process ends."""


def new_store(folder):
    """Put an empty store into a folder, where `valora-train` looks for one; one there is kept.

    Returns:
        Its tracking URI.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "mlflow.db"
    if not file.exists():
        shutil.copy(_migrated(), file)
    return f"sqlite:///{file}"


def paths_in(folder):
    """Settings of paths below a folder, with the store that `run_quietly` puts there."""
    work, bundles = folder / "work", folder / "bundles"
    return PathSettings(str(work), str(bundles), f"sqlite:///{folder}/mlflow.db")


def run_quietly(settings, folder):
    """Run the factory with a new store in a folder."""
    from rich.console import Console

    from valora_train.cli import run
    from valora_train.reporting.progress import Display

    new_store(folder)
    run(settings, Display(Console(quiet=True)))
