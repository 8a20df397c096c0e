"""Results of trials on disk: one file that processes append to, and a lock for each trial.

A trial is named by a hash of everything that its result depends on, so the file may hold results of
any number of oracles and comparisons, and what is in it is never computed again.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from valora_train.errors import SettingsError, StageError
from valora_train.fusion.packing import DedicatedAdapter
from valora_train.fusion.state import SNAPSHOTS, read_snapshot, write_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

RESULTS = "trials.jsonl"
CLAIMS = "claims"
KEY = "trial"


@dataclass(frozen=True)
class Trial:
    """One training (or several, of one method) with its measurements.

    Attributes:
        method: Name of the method (see `valora_train.trials.methods`).
        domains: Names of the domains, in the order in which the method reads them.
        seed: Seed of everything random in it.
        options: Settings of the method, as JSON values.
    """

    method: str
    domains: tuple[str, ...]
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name for people, e.g. ``joint person + vehicle, seed 0``."""
        return f"{self.method} {' + '.join(self.domains)}, seed {self.seed}"


class TrialStore:
    """The results in a folder.

    Args:
        folder: The folder; it is made if needed.

    Attributes:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / RESULTS
        (folder / CLAIMS).mkdir(parents=True, exist_ok=True)

    def results(self) -> dict[str, dict[str, Any]]:
        """Every result by the key of its trial; of several with one key, the first."""
        return _read(self._file) if self._file.exists() else {}

    def write_snapshot(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep the adapter of a domain alone.

        Args:
            key: Key of the trial.
            tensors: Snapshot of the adapter, as `Trainer.snapshot` returns it.
        """
        (self.folder / SNAPSHOTS).mkdir(exist_ok=True)
        write_snapshot(self.folder, _snapshot_file(key), tensors)

    def dedicated(self, key: str) -> DedicatedAdapter | None:
        """The adapter of a domain alone; None if it is not kept here.

        Args:
            key: Key of the trial.
        """
        file = _snapshot_file(key)
        if not (self.folder / SNAPSHOTS / file).is_file():
            return None
        return DedicatedAdapter(key, partial(_read_snapshot, self.folder, file))

    def take_over(self, file: Path) -> set[str]:
        """Copy results of another machine that are not known here, and the adapters beside them.

        Args:
            file: The file of its results.

        Returns:
            Keys of all its results, known or new.

        Raises:
            SettingsError: If the file cannot be read, or holds no results.
            StageError: If an adapter beside it is damaged.
        """
        try:
            offered = _read(file)
        except OSError as error:
            raise SettingsError(
                f"cannot read the results {file} ({error.strerror}): correct oracle.results"
            ) from error
        if not offered:
            raise SettingsError(
                f"{file} holds no results of trials: name the {RESULTS} of the other machine"
            )
        known = self.results()
        new = {key: row for key, row in offered.items() if key not in known}
        for key, row in new.items():
            if (file.parent / SNAPSHOTS / _snapshot_file(key)).is_file():
                self.write_snapshot(key, _read_snapshot(file.parent, _snapshot_file(key)))
            self.add(key, {name: value for name, value in row.items() if name != KEY})
        return set(offered)

    def add(self, key: str, result: Mapping[str, Any]) -> None:
        """Append the result of a trial.

        Args:
            key: Key of the trial.
            result: JSON values; no NaN.
        """
        line = json.dumps({KEY: key, **result}, ensure_ascii=False, allow_nan=False)
        with FileLock(self.folder / f"{RESULTS}.lock"), self._file.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a process was killed while it wrote
                    file.write(b"\n")
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Claim a trial within a `with` block, so that no other process computes it meanwhile.

        Args:
            key: Key of the trial.

        Yields:
            Whether it is this process's to compute: nobody else has claimed it, and there is no
            result.
        """
        lock = FileLock(self.folder / CLAIMS / f"{key}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        try:
            yield key not in self.results()
            if key in self.results():  # whoever gets hold of the old file sees the result
                Path(lock.lock_file).unlink(missing_ok=True)
        finally:
            lock.release()


def _snapshot_file(key: str) -> str:
    return f"{key}.safetensors"


def _read_snapshot(folder: Path, file: str) -> dict[str, Tensor]:
    try:
        return read_snapshot(folder, file)
    except StageError as error:
        raise StageError(
            f"the adapter {folder / SNAPSHOTS / file} is damaged: delete it and run the same "
            "command again"
        ) from error


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """The results in a file by the keys of their trials.

    What is no result, such as a line that was cut off when a process was killed, is left out, so
    that its trial is repeated.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in file.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if _is_result(row):
            found.setdefault(row[KEY], row)
    return found


def _is_result(row: Any) -> bool:
    """Whether a line's value holds what is read of every result."""
    if not isinstance(row, dict) or not isinstance(row.get("accuracy"), dict):
        return False
    kinds = {KEY: str, "method": str, "domains": list, "seed": int, "seconds": int | float}
    return all(isinstance(row.get(key), kind) for key, kind in kinds.items()) and all(
        isinstance(reached, dict) and all(map(_is_accuracy, map(reached.get, ("val", "test"))))
        for reached in row["accuracy"].values()
    )


def _is_accuracy(value: Any) -> bool:
    """Whether a value is an accuracy; None is that of a training that diverged."""
    return value is None or (isinstance(value, int | float) and math.isfinite(value))
