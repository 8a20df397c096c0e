"""Stages: functions from settings and inputs to a folder that is named by a hash of both.

The folder appears in one rename and never changes; a resumable stage continues in its unfinished
one. Its record has a hash of each part, by which later stages depend on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from valora_data.hashing import hash_path
from valora_train.errors import StageError

RECORD = "stage.json"
PARTS = "parts"


@dataclass(frozen=True)
class Stage:
    """A step of the pipeline whose output depends only on its settings and inputs."""

    name: str  # verb and object, e.g. ``teach-person``
    version: int  # raised whenever the code produces another output for the same settings
    settings: Mapping[str, Any]  # JSON values that the output depends on
    inputs: Mapping[str, str]  # content hashes of the inputs by name (see `digest`)
    resumable: bool = False  # an interrupted run continues in its unfinished folder
    shared: bool = False  # stages that differ only in the object of their names have one output

    @property
    def key(self) -> str:
        """Content hash of name, version, settings and inputs: 16 hexadecimal digits."""
        name = self._verb if self.shared else self.name
        facts = [name, self.version, self.settings, self.inputs]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def _verb(self) -> str:
        return self.name.partition("-")[0]

    def folder(self, work: Path) -> Path:
        """The output folder below that of all stages, whether or not it exists yet."""
        mine = work / f"{self.name}-{self.key}"
        if self.shared and not mine.is_dir():
            alike = work.glob(f"{self._verb}-*-{self.key}")
            return min((folder for folder in alike if folder.is_dir()), default=mine)
        return mine

    def partial(self, work: Path) -> Path:
        """The folder in which the output is built before it is renamed."""
        return work / f"{self.name}-{self.key}.partial"

    def run(
        self, work: Path, build: Callable[[Path], None], wait: bool = False
    ) -> tuple[Path, bool]:
        """Run `build` unless up to date; gives the folder, and whether it was. May wait."""
        if self.is_done(work):
            return self.folder(work), True
        done, partial = work / f"{self.name}-{self.key}", self.partial(work)
        work.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{done}.lock", timeout=-1 if wait else 0):
                if self.is_done(work):  # another process finished while this one waited
                    return self.folder(work), True
                self._build(partial, done, build)
        except Timeout as error:
            raise StageError(
                f"another process is running stage {self.name}: wait for it or stop it"
            ) from error
        return self.folder(work), False

    def is_done(self, work: Path) -> bool:
        """Whether the stage is up to date; raises `StageError` if its output is damaged."""
        folder = self.folder(work)
        if not folder.is_dir():
            return False
        for part in _parts(folder):
            if not (folder / part).exists():
                raise damaged(folder, f"{part} is missing")
        return True

    def _build(self, partial: Path, done: Path, build: Callable[[Path], None]) -> None:
        start = time.monotonic()
        if not self.resumable:
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)
        try:
            build(partial)
            record = {
                "name": self.name,
                "key": self.key,
                "settings": self.settings,
                "inputs": self.inputs,
                "seconds": round(time.monotonic() - start, 1),
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "versions": versions(),
                PARTS: {item.name: hash_path(item) for item in sorted(partial.iterdir())},
            }
            write_json(partial / RECORD, record)
            try:
                partial.rename(done)
            except OSError:
                # A network folder may have shown this machine too late that another one was done.
                if not (done / RECORD).is_file():
                    raise
                shutil.rmtree(partial, ignore_errors=True)
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:  # such as that of a full disk
                error.filename = str(partial)
            if not self.resumable:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def was_killed(work: Path, key: str) -> bool:
    """Whether a process that ran the stage of a key has ended without anybody running it now."""
    locks = list(work.glob(f"*-{key}.lock"))
    try:
        for lock in locks:  # a process that runs the stage holds its lock
            with FileLock(lock, timeout=0):
                pass
    except (Timeout, OSError):
        return False
    return bool(locks)


def digest(path: Path, cache: Path | None = None) -> str:
    """Content hash of an input: of a stage's output by its name or record."""
    if (path / RECORD).is_file():
        return path.name
    if not (path.parent / RECORD).is_file():
        return hash_path(path, cache)
    parts = _parts(path.parent)
    if path.name not in parts:
        raise damaged(path.parent, f"{path.name} is missing")
    return parts[path.name]


def intact(path: Path) -> Path:
    """Return a part of a stage's output, whose content is what the stage wrote."""
    folder = path.parent
    if folder.suffix == ".partial" or not (folder / RECORD).is_file():
        return path
    if not path.exists():
        raise damaged(folder, f"{path.name} is missing")
    if hash_path(path) != digest(path):
        raise damaged(folder, f"{path.name} is not what was written")
    return path


def _parts(folder: Path) -> dict[str, str]:
    """Content hashes of the parts of a stage's output."""
    try:
        return {str(name): str(value) for name, value in read_json(folder / RECORD)[PARTS].items()}
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"{RECORD} cannot be read") from error


def damaged(folder: Path, what: str) -> StageError:
    """The error of a stage's folder whose content cannot be used."""
    return StageError(
        f"the output of a stage is damaged ({what}): delete {folder} and run the same command again"
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    names = ("valora", "torch", "transformers", "peft", "bitsandbytes", "ultralytics", "datasets",
             "mlflow")  # fmt: skip
    found = {"python": platform.python_version()}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
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


class Span(NamedTuple):
    """A piece of work that has ended: its name, and when it began and ended, in ns since 1970."""

    name: str
    start: int
    end: int


@contextmanager
def timed(spans: list[Span], name: str) -> Iterator[None]:
    """Append the span of a `with` block that does not raise an error."""
    start = time.time_ns()
    yield
    spans.append(Span(name, start, time.time_ns()))
