"""Adapters in any file system that fsspec opens: S3, Google Cloud Storage, Azure, HTTP, SFTP."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

from valora_data.wording import first_line
from valora_serve.errors import SettingsError
from valora_serve.server.resolving import base

_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": base.CONNECT_SECONDS, "read_timeout": 30}}
}
"""Options of file systems; credentials and endpoints come from fsspec's own configuration
(FSSPEC_S3_KEY and so on, ~/.config/fsspec) or that of the service's client."""

_VERSION = re.compile(
    "size|etag|mod|mtime|created|md5|crc|digest|hash|checksum|sha|generation|version|^ino$", re.I
)
"""Facts about a file that change with its content. Others change by themselves, such as the time it
was last read and the URL that a server redirects to."""


class FsspecResolver(base.Resolver):
    """Finds the adapter ``name`` at ``scheme://place/name``."""

    def __init__(self, scheme: str, location: str) -> None:
        super().__init__(scheme, location.rstrip("/"))
        self._own = threading.local()
        try:
            self._files, self._root = self._open_files()
        except Exception as error:
            raise SettingsError(
                f"adapter_sources: {scheme}:// cannot be opened ({type(error).__name__}: "
                f"{base.without_password(first_line(error))}): install the package of this file "
                "system, start its host, or correct its address or user"
            ) from error

    def _open_files(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        options = _OPTIONS.get(self.scheme, {})
        files, root = url_to_fs(
            self.url, use_listings_cache=False, skip_instance_cache=True, **options
        )
        return files, root.rstrip("/")

    @property
    def _mine(self) -> Any:
        """The file system, for this thread: some have one connection, for one thread at a time."""
        if self._files.async_impl:
            return self._files
        if not hasattr(self._own, "files"):
            self._own.files, _ = self._open_files()
        return self._own.files

    def find(self, name: str) -> base.Found | None:

        def look(file: str) -> tuple[int | None, object] | None:
            try:
                with base.denials():
                    try:
                        info = self._mine.info(self._path(name, file))
                    except FileNotFoundError as error:
                        self._check_absent(error)
                        return None
            except PermissionError:
                if file in base.FILES:
                    raise
                return None  # S3 denies access to what is absent where listing is not allowed
            size = info.get("size")
            facts = sorted((k, str(v)) for k, v in info.items() if _VERSION.search(k))
            return size if type(size) is int else None, facts

        return self._found(name, look)

    @contextlib.contextmanager
    def open(self, name: str, file: str, found: base.Found) -> Iterator[base.Stream]:
        # In pieces a file is asked for with ranges, which not all servers of HTTP have.
        whole = {"block_size": 0} if self.scheme in ("http", "https") else {}
        with base.denials():
            opened = self._mine.open(self._path(name, file), "rb", cache_type="readahead", **whole)
        with opened:
            yield opened

    def _check_absent(self, error: FileNotFoundError) -> None:
        """Raise what a file system of HTTP hides: it calls every failure a file that is absent."""
        cause = error.__cause__
        if cause is None or isinstance(cause, FileNotFoundError):
            return
        status = base.status_of(cause)
        if status not in (None, 404, 410) or (status is None and self.scheme in ("http", "https")):
            raise cause

    def _path(self, name: str, file: str) -> str:
        return f"{self._root}/{name}/{file}"
