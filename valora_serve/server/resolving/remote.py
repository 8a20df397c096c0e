"""Adapters in any file system that fsspec opens: S3, Google Cloud Storage, Azure, HTTP, SFTP."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

from valora_serve.errors import SettingsError
from valora_serve.server.resolving.base import CONNECT_SECONDS, FILES, Found, Resolver

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from valora_serve.server.resolving.base import Stream

_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": CONNECT_SECONDS, "read_timeout": 30}}
}
"""Options of file systems; credentials and endpoints come from fsspec's own configuration
(FSSPEC_S3_KEY and so on, ~/.config/fsspec) or that of the service's client."""


class FsspecResolver(Resolver):
    """Finds the adapter ``name`` at ``scheme://place/name``."""

    def __init__(self, scheme: str, place: str) -> None:
        super().__init__(scheme, place.rstrip("/"))
        import fsspec

        try:
            options = _OPTIONS.get(scheme, {})
            self._files: Any = fsspec.filesystem(
                scheme, use_listings_cache=False, skip_instance_cache=True, **options
            )
        except (ImportError, ValueError, TypeError) as error:
            raise SettingsError(
                f"adapter_sources: {scheme}:// cannot be opened ({str(error).splitlines()[0]}): "
                "install the package of this file system, or name another place"
            ) from error

    def find(self, name: str) -> Found | None:
        """Look an adapter up; see `Resolver.find`."""
        sizes, facts = {}, []
        for file in FILES:
            try:
                info = self._files.info(self._url(name, file))
            except FileNotFoundError:
                return None
            size = info.get("size")
            sizes[file] = size if type(size) is int else None
            facts.append(sorted((key, str(value)) for key, value in info.items()))
        return Found(hashlib.sha256(repr(facts).encode()).hexdigest(), sizes)

    def open(self, name: str, file: str, found: Found) -> AbstractContextManager[Stream]:
        """Open a file; see `Resolver.open`."""
        opened = self._files.open(self._url(name, file), "rb", cache_type="readahead")
        return cast("AbstractContextManager[Stream]", opened)

    def _url(self, name: str, file: str) -> str:
        return f"{self.scheme}://{self.place}/{name}/{file}"
