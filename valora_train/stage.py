"""Stages: functions from settings and inputs to a folder that is named by a hash of both.

The output folder appears in one rename and never changes afterwards, so a stage whose folder exists
is up to date and is skipped. A resumable stage that was interrupted continues in its unfinished
folder.
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
    """A step of the pipeline whose output depends only on its settings and inputs.

    Attributes:
        name: Verb and object, e.g. ``teach-person``.
        version: Raised whenever the code produces another output for the same settings.
        settings: JSON values that the output depends on.
        inputs: Content hashes of the inputs by name (see `digest`).
        resumable: Whether an interrupted run continues in its unfinished folder.
    """

    name: str
    version: int
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    resumable: bool = False

    @property
    def key(self) -> str:
        """Content hash of name, version, settings and inputs: 16 hexadecimal digits."""
        facts = [self.name, self.version, self.settings, self.inputs]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def folder(self, work: Path) -> Path:
        """The output folder, whether or not it exists yet."""
        return work / f"{self.name}-{self.key}"

    def partial(self, work: Path) -> Path:
        """The folder in which the output is built before it is renamed."""
        return self.folder(work).with_suffix(".partial")

    def run(
        self, work: Path, build: Callable[[Path], None], wait: bool = False
    ) -> tuple[Path, bool]:
        """Build the output, unless the stage is up to date.

        Args:
            work: Folder of all stages.
            build: Writes the output into the folder that it is given.
            wait: Whether to wait for another process that runs this stage, instead of raising.

        Returns:
            The output folder, and whether the stage was up to date.

        Raises:
            StageError: If another process runs this stage, or the disk is full.
        """
        done = self.folder(work)
        if done.is_dir():
            return done, True
        partial = self.partial(work)
        try:
            work.mkdir(parents=True, exist_ok=True)
            with FileLock(done.with_suffix(".lock"), timeout=-1 if wait else 0):
                if done.is_dir():  # another process finished while this one waited
                    return done, True
                self._build(partial, done, build)
        except Timeout as error:
            raise StageError(
                f"another process is running stage {self.name}: wait for it or stop it"
            ) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            if not self.resumable:
                shutil.rmtree(partial, ignore_errors=True)
            raise StageError(
                f"no space left on the disk for stage {self.name} in {work}: free some space and "
                "run again"
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

    The output folder of a stage has its hash in its name. Other folders are hashed by the names,
    sizes and modification times of their files, so that large image folders need not be read.
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
    """Versions of Python and of the packages that results depend on."""
    names = ("valora", "torch", "transformers", "peft", "ultralytics", "datasets", "mlflow")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: after a kill, the file holds either the old or the new content."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
