"""Stages: functions from settings and inputs to a folder that is named by a hash of both.

A finished folder appears in one rename and never changes; the same work asked again is a look-up.
A stage that saves its own progress finds it again when it was interrupted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from valora_train.errors import StageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RECORD = "stage.json"


@dataclass(frozen=True)
class Stage:
    """A piece of work that its settings and inputs determine.

    Attributes:
        name: What it does to what, e.g. ``teach-person``.
        version: Raised whenever the code gives other results for the same settings.
        settings: JSON values that its output depends on.
        inputs: Names and content hashes of what it reads (see `digest`).
        resumable: Whether an interrupted build is continued in its unfinished folder.
    """

    name: str
    version: int
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    resumable: bool = False

    @property
    def key(self) -> str:
        """Content hash of settings and inputs, 16 hexadecimal digits."""
        facts = [self.name, self.version, self.settings, self.inputs]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def folder(self, work: Path) -> Path:
        """Where its output is, or will be."""
        return work / f"{self.name}-{self.key}"

    def partial(self, work: Path) -> Path:
        """Where it is while it is made."""
        return self.folder(work).with_suffix(".partial")

    def run(
        self, work: Path, build: Callable[[Path], None], wait: bool = False
    ) -> tuple[Path, bool]:
        """Make the output unless it is there.

        Args:
            work: Folder of all stages.
            build: Fills the folder that it is given.
            wait: Wait for another process that is making it, instead of an error.

        Returns:
            The finished folder, and whether it was there already.

        Raises:
            StageError: If another process is making it, or the disk is full.
        """
        done = self.folder(work)
        if done.is_dir():
            return done, True
        partial = self.partial(work)
        try:
            work.mkdir(parents=True, exist_ok=True)
            with FileLock(done.with_suffix(".lock"), timeout=-1 if wait else 0):
                if done.is_dir():  # by another process, while we waited
                    return done, True
                self._build(partial, done, build)
        except Timeout as error:
            raise StageError(
                f"stage {self.name} is being made by another process: wait for it or stop it"
            ) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            if not self.resumable:
                shutil.rmtree(partial, ignore_errors=True)
            raise StageError(
                f"no space left on the disk for stage {self.name} in {work}: free some and run "
                "again"
            ) from error
        return done, False

    def _build(self, partial: Path, done: Path, build: Callable[[Path], None]) -> None:
        start = time.monotonic()
        if not self.resumable:
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)
        build(partial)
        record = {
            "name": self.name,
            "key": self.key,
            "settings": self.settings,
            "inputs": self.inputs,
            "seconds": round(time.monotonic() - start, 1),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
        }
        write_json(partial / RECORD, record)
        partial.rename(done)


def digest(path: Path) -> str:
    """Content hash of an input file or folder.

    A finished stage's folder bears its hash in its name. Of other folders, the names, sizes and
    times of the files stand for their content, so that large image folders stay cheap.
    """
    if (path / RECORD).is_file():
        return path.name
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    listing = [
        (item.relative_to(path).as_posix(), item.stat().st_size, item.stat().st_mtime_ns)
        for item in sorted(path.rglob("*"))
        if item.is_file()
    ]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of what the results depend on."""
    names = ("valora", "torch", "transformers", "peft", "ultralytics", "datasets", "mlflow")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is either the old or the new one, whenever we are killed."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
