"""Extensions of the kernels by name: the built-in ones, and those of other installed packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class UnknownNameError(ValueError):
    """A name that nothing usable is registered under; the message lists the names there are."""


class Registry(Mapping[str, T], Generic[T]):
    """Extensions of one kind by name, each imported when it is first looked up.

    Another package adds one with an entry point, without any change here::

        [project.entry-points."valora.arrangements"]
        mine = "my_package.arrangement:MyArrangement"

    Built-in names come first and cannot be replaced, so that a table means the same whatever else
    is installed.

    Args:
        group: Entry-point group, e.g. ``valora.arrangements``.
        kind: What the names stand for, in error messages, e.g. ``arrangement``.
        builtin: ``module:attribute`` of each built-in extension by its name.

    Raises:
        UnknownNameError: On look-up, if the name is not registered or cannot be imported.
    """

    def __init__(self, group: str, kind: str, builtin: Mapping[str, str]) -> None:
        self.group, self.kind = group, kind
        self._builtin = {name: EntryPoint(name, at, group) for name, at in builtin.items()}
        self._loaded: dict[str, T] = {}

    def register(self, name: str, at: str) -> None:
        """Add ``module:attribute`` in this process, as an entry point would in all of them."""
        self._builtin[name] = EntryPoint(name, at, self.group)

    def _entries(self) -> dict[str, EntryPoint]:
        others = {entry.name: entry for entry in entry_points(group=self.group)}
        return self._builtin | {
            name: others[name] for name in sorted(others.keys() - self._builtin)
        }

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            entry = self._builtin.get(name) or self._entries().get(name)
            if entry is None:
                known = ", ".join(sorted(self))
                raise UnknownNameError(f"unknown {self.kind} {name!r}: choose one of {known}")
            self._loaded[name] = self._load(entry)
        return self._loaded[name]

    def _load(self, entry: EntryPoint) -> T:
        if entry.name in self._builtin:
            return cast("T", getattr(import_module(entry.module), entry.attr))
        try:
            return cast("T", entry.load())
        except Exception as error:
            raise UnknownNameError(
                f"{self.kind} {entry.name!r} ({entry.value}) cannot be imported: {error}; fix or "
                "uninstall the package that registers it"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._entries()
