"""Adapters in folders of a local or mounted file system."""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager
from pathlib import Path

from valora_data.contract.files import UnreadableError, expanded, open_regular
from valora_serve.errors import AdapterError, SettingsError
from valora_serve.server.resolving.base import Found, Resolver, Stream, leads_inside


class FolderResolver(Resolver):
    """Finds the adapter ``name`` in the folder ``place/name``, which links must not lead out of."""

    def __init__(self, scheme: str, location: str) -> None:
        super().__init__(scheme, location)
        self._root = expanded(location).absolute()
        if not self._root.is_dir():
            raise SettingsError(
                f"adapter_sources: {location} is no folder: make it, or name another"
            )

    def find(self, name: str) -> Found | None:

        def look(file: str) -> tuple[int, object] | None:
            try:
                status = self._path(name, file).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size, (status.st_ino, status.st_mtime_ns, status.st_size)

        return self._found(name, look)

    def open(self, name: str, file: str, found: Found) -> AbstractContextManager[Stream]:
        try:
            return open_regular(self._path(name, file), max_bytes=1 << 62)  # the reader bounds it
        except UnreadableError as error:
            if isinstance(error.__cause__, PermissionError):
                raise error.__cause__ from error
            raise AdapterError(f"{file} of adapter {name} {error.reason}: save it again") from error

    def _path(self, name: str, file: str) -> Path:
        try:
            path = (self._root / name / file).resolve(strict=True)
        except (RuntimeError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ELOOP:
                raise
            raise AdapterError(
                f"{file} of adapter {name} is a link that leads to itself: copy the file"
            ) from error
        if not leads_inside((root := self._root.resolve()) / name, path, root):
            raise AdapterError(
                f"{file} of adapter {name} is a link that leads out of its source: copy the file"
            )
        return path
