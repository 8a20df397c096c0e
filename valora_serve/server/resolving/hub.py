"""Adapters of the Hugging Face hub, or of another host that speaks its protocol (HF_ENDPOINT)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from valora_serve.errors import SettingsError
from valora_serve.server.resolving.base import CONNECT_SECONDS, Found, Resolver, Stream, denials


class HubResolver(Resolver):
    """Finds the adapter ``name`` in the repository ``place/name``, or ``name`` if place is empty.

    Files are read from the commit that was found; a token comes from HF_TOKEN, or from the login.
    """

    def __init__(self, scheme: str, location: str) -> None:
        super().__init__(scheme, location.strip("/"))
        if "/" in self.location:
            raise SettingsError(
                f"adapter_sources: {scheme}://{location} names more than an owner: name "
                f"{scheme}://OWNER, whose repositories are adapters, or {scheme}:// for names with "
                "their owner"
            )

    remedy = "put it there, or give the server a token (HF_TOKEN) if its repository is private"

    def find(self, name: str) -> Found | None:
        from huggingface_hub import HfApi, errors

        with denials():
            try:
                info = HfApi().model_info(
                    self._repository(name), files_metadata=True, timeout=CONNECT_SECONDS
                )
            except errors.GatedRepoError:
                raise
            except (errors.RepositoryNotFoundError, errors.HFValidationError):
                return None
        listed = {item.rfilename: item.size for item in info.siblings or ()}
        found = self._found(name, lambda file: (listed[file], None) if file in listed else None)
        return found and replace(found, version=str(info.sha))

    @contextlib.contextmanager
    def open(self, name: str, file: str, found: Found) -> Iterator[Stream]:
        from huggingface_hub import get_session, hf_hub_url, utils

        url = hf_hub_url(self._repository(name), file, revision=found.version)
        # Compressed, a file of the size that the hub names could grow without bound.
        sent = utils.build_hf_headers()  # type: ignore[attr-defined]
        headers, session = {**sent, "accept-encoding": "identity"}, get_session()
        with denials(), session.stream("GET", url, headers=headers, timeout=CONNECT_SECONDS) as one:
            utils.hf_raise_for_status(one)  # type: ignore[attr-defined]
            yield _Pieces(one.iter_raw(1 << 20))

    def _repository(self, name: str) -> str:
        return f"{self.location}/{name}" if self.location else name


class _Pieces:
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._left = pieces, b""

    def read(self, size: int, /) -> bytes:
        if not self._left:
            self._left = next((piece for piece in self._pieces if piece), b"")
        read, self._left = self._left[:size], self._left[size:]
        return read
