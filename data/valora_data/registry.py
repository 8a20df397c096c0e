"""Named extensions: the built-in ones, and those that other installed packages bring."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Generic, TypeVar, cast

from valora_data.errors import UnknownNameError, ValoraError

T = TypeVar("T")


def _installed(group: str) -> EntryPoints:
    """Entry points of a group, which are read again when a folder of `sys.path` has changed."""
    return _read_installed(group, tuple((folder, _changed(folder)) for folder in sys.path))


def _changed(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=64)  # reading the metadata of all packages takes 20 ms
def _read_installed(group: str, _state: tuple[tuple[str, int], ...]) -> EntryPoints:
    return entry_points(group=group)


class Registry(Mapping[str, T], Generic[T]):
    """Extensions of one kind by name, each imported when it is first looked up.

    Another package adds one with an entry point, without any change here::

        [project.entry-points."valora.policies"]
        mine = "my_package.policy:MyPolicy"

    Args:
        group: Entry-point group, e.g. ``valora.policies``.
        kind: What the names stand for, in error messages, e.g. ``policy``.
        builtin: ``module:attribute`` of each built-in extension by its name.
        error: Raised for an unknown name, or for an entry point that cannot be imported.

    Raises:
        UnknownNameError: By look-up: there is no extension of this name; the message lists all.
    """

    def __init__(
        self,
        group: str,
        kind: str,
        builtin: Mapping[str, str],
        error: type[ValoraError] = UnknownNameError,
    ) -> None:
        self.group, self.kind, self._error = group, kind, error
        self._builtin = {name: EntryPoint(name, at, group) for name, at in builtin.items()}
        self._loaded: dict[str, T] = {}

    def _entries(self) -> dict[str, EntryPoint]:
        # A built-in name cannot be taken over: what a configuration means must not depend on
        # what else is installed.
        return {entry.name: entry for entry in _installed(self.group)} | self._builtin

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            entry = self._builtin.get(name) or self._entries().get(name)
            if entry is None:
                known = ", ".join(sorted(self))
                raise self._error(f"unknown {self.kind} {name!r}: choose one of {known}")
            self._loaded[name] = self._load(entry)
        return self._loaded[name]

    def _load(self, entry: EntryPoint) -> T:
        if entry.name in self._builtin:
            found = import_module(entry.module)  # a missing extra is reported as it is
            for part in entry.attr.split("."):
                found = getattr(found, part)
            return cast("T", found)
        try:
            return cast("T", entry.load())
        except Exception as error:
            raise self._error(
                f"{self.kind} {entry.name!r} ({entry.value}) cannot be imported: {error}; mend or "
                "uninstall the package that registers it"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._entries()
