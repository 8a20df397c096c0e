"""Named extensions: the built-in ones, and those that other installed packages bring."""

import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Generic, TypeVar, cast

from valora_data.errors import UnknownNameError, ValoraError

T = TypeVar("T")


@lru_cache(maxsize=64)  # reading the metadata of all packages takes 20 ms
def _installed(group: str, _folders: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=group)


class Registry(Mapping[str, T], Generic[T]):
    """Extensions of one kind by name, each imported when it is first looked up.

    Another package adds one with an entry point in the `group`; `builtin` has ``module:attribute``
    by name. `error` is raised for a name that is no such `kind`, or cannot be imported.
    """

    def __init__(
        self, group: str, kind: str, builtin: Mapping[str, str],
        error: type[ValoraError] = UnknownNameError,
    ) -> None:  # fmt: skip
        self.group, self.kind, self._error = group, kind, error
        self._builtin = {name: EntryPoint(name, at, group) for name, at in builtin.items()}
        self._loaded: dict[str, T] = {}

    def _entries(self) -> dict[str, EntryPoint]:
        # Built-in names win, and come first: what they mean must not depend on what is installed.
        others = _installed(self.group, tuple(sys.path))
        return self._builtin | {entry.name: entry for entry in others} | self._builtin

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            entry = self._builtin.get(name) or self._entries().get(name)
            if entry is None:
                known = ", ".join(sorted(self))
                raise self._error(f"unknown {self.kind} {name!r}: choose one of {known}")
            try:
                self._loaded[name] = cast("T", entry.load())
            except Exception as error:
                if name in self._builtin:  # a missing extra is reported as it is
                    raise
                text = f"{self.kind} {name!r} ({entry.value}) cannot be imported: {error}; fix or"
                raise self._error(f"{text} uninstall the package that registers it") from error
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._entries()
