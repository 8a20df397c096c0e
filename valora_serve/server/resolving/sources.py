"""Where adapters are looked for: folders, the Hugging Face hub, and all that fsspec opens.

Other packages add sources with an entry point.
"""

import contextlib
import errno
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from valora_data.contract.files import UnreadableError, expanded, open_regular
from valora_data.registry import Registry
from valora_data.wording import first_line
from valora_serve.errors import AdapterError, SettingsError, pickle_error
from valora_serve.server.settings import existing_folder

Look = Callable[[str], tuple[int | None, object] | None]
"""Returns the size of a file, and what changes with its content."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)  # files of an adapter in PEFT's format
LABELS = "config.json"
"""Names a classifier's labels; it may be absent."""
FETCHED = (*FILES, LABELS)  # files that are fetched
PICKLE = "adapter_model.bin"
"""What older versions of PEFT write in place of `WEIGHTS`; it is never opened."""
PIECE = 1 << 20  # bytes of a file that are read at a time
_CONNECT_SECONDS = 10.0  # seconds after which a host that does not answer counts as unreachable


@dataclass(frozen=True, slots=True)
class Found:
    """An adapter at its source."""

    version: str  # changes whenever its files do, e.g. a commit, or a hash of their ETags
    sizes: Mapping[str, int | None]  # bytes of each of `FETCHED` that is there, if known


def leads_inside(folder: Path, target: Path, root: Path) -> bool:
    """Return whether the file `target` of an adapter's folder may be read; paths have no links."""
    # Files of a Hugging Face cache are links from ``models--…/snapshots/<revision>/`` to
    # ``models--…/blobs/``, which belong to it, too.
    blobs = (
        one.parent / "blobs" for one in (folder, *folder.parents)
        if one.name == "snapshots" and one.parent.name.startswith("models--")
    )  # fmt: skip
    return any(target.is_relative_to(path) for path in (root, *blobs))


def without_password(said: object) -> str:
    """What an error says, without user and password of the URLs in it."""
    return re.sub(r"(?<=//)[^/@\s]*@", "", str(said))


def is_denied(error: BaseException) -> bool:
    """Return whether a source denies access: a service says so in a way of its own."""
    refused = isinstance(error, PermissionError) or status_of(error) in (401, 403)
    return refused or "Credentials" in type(error).__name__ or str(error).startswith("Forbidden")


def status_of(error: BaseException) -> int | None:
    """The status of HTTP that an error of a client has, as their packages name it."""
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, getattr(getattr(error, "response", None), name, None))
        if isinstance(status, int | str) and str(status).isdecimal():
            return int(status)
    return None


class Resolver(ABC):
    """Finds adapters by name at one place; its methods are called in threads.

    They may raise `PermissionError` if the source denies access, any other `OSError` if it cannot
    be reached, and a `ServeError` that says what else is wrong.
    """

    remedy = "put it there"  # what whoever asks for an adapter that it does not have may do

    def __init__(self, scheme: str, location: str) -> None:
        self.scheme, self.location = scheme, location

    @property
    def url(self) -> str:
        """The place with its scheme."""
        return f"{self.scheme}://{self.location}"

    @abstractmethod
    def find(self, name: str) -> Found | None:
        """Look an adapter up without reading it; None if the place has none of this name.

        Names have letters, digits, ``.``, ``_``, ``-`` and slashes; no part begins with a dot.
        """

    def _found(self, name: str, look: Look) -> Found | None:
        """Make what `find` returns; `look` says what a file is, None if it is absent."""
        known = {}
        for file in FETCHED:
            if (one := look(file)) is not None:
                known[file] = one
            elif file in FILES:
                if file == WEIGHTS and look(PICKLE) is not None:
                    raise pickle_error(name, PICKLE)
                return None
        facts = [fact for _, fact in known.values()]
        version = hashlib.sha256(repr(facts).encode()).hexdigest()
        return Found(version, {file: size for file, (size, _) in known.items()})

    @abstractmethod
    def open(self, name: str, file: str, found: Found) -> AbstractContextManager[Any]:
        """Open one of `FETCHED` of an adapter that was found, which is read in order."""


_ANY = "fsspec"
RESOLVERS: Registry[Callable[[str, str], Resolver]] = Registry(
    "valora.resolvers",
    "resolver",
    {
        "file": f"{__name__}:FolderResolver",
        "hf": f"{__name__}:HubResolver",
        _ANY: f"{__name__}:FsspecResolver",
    },
    SettingsError,
)


def make_resolvers(sources: Iterable[str]) -> list[Resolver]:
    """Make the resolver of each location; a scheme that nobody has registered is one of fsspec."""
    made = []
    for source in sources:
        if not source.strip():
            raise SettingsError("adapter_sources has an empty entry: name a folder or a URL")
        scheme, separator, location = source.partition("://")
        if not separator:
            scheme, location = "file", source
        kind = scheme if scheme in RESOLVERS and scheme != _ANY else _ANY
        made.append(RESOLVERS[kind](scheme, location))
    return made


class FolderResolver(Resolver):
    """Finds the adapter ``name`` in the folder ``place/name``, which links must not lead out of."""

    def __init__(self, scheme: str, location: str) -> None:
        super().__init__(scheme, location)
        self._root = expanded(location).absolute()
        existing_folder("adapter_sources", self._root)

    def find(self, name: str) -> Found | None:

        def look(file: str) -> tuple[int, object] | None:
            try:
                status = self._path(name, file).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size, (status.st_ino, status.st_mtime_ns, status.st_size)

        return self._found(name, look)

    def open(self, name: str, file: str, found: Found) -> AbstractContextManager[Any]:
        try:
            return open_regular(self._path(name, file), max_bytes=1 << 62)  # the reader bounds it
        except UnreadableError as error:
            if isinstance(error.__cause__, PermissionError):
                raise error.__cause__ from error
            raise AdapterError(f"{file} of adapter {name} {error.reason}: save it again") from error

    def _path(self, name: str, file: str) -> Path:
        root = self._root.resolve()
        said = f"{file} of adapter {name} is a link that leads"
        try:
            path = Path(os.path.realpath(root / name / file, strict=True))
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise AdapterError(f"{said} to itself: copy the file") from error
        if not leads_inside(root / name, path, root):
            raise AdapterError(f"{said} out of its source: copy the file")
        return path


class HubResolver(Resolver):
    """Finds the adapter ``name`` in the repository ``place/name``, or ``name`` if place is empty.

    The host is the Hugging Face hub, or another one that speaks its protocol (HF_ENDPOINT). Files
    are read from the commit that was found; a token comes from HF_TOKEN, or from the login.
    """

    remedy = "put it there, or give the server a token (HF_TOKEN) if its repository is private"

    def __init__(self, scheme: str, location: str) -> None:
        super().__init__(scheme, location.strip("/"))
        if "/" in self.location:
            raise SettingsError(
                f"adapter_sources: {scheme}://{location} names more than an owner: name "
                f"{scheme}://OWNER, whose repositories are adapters, or {scheme}:// for names with "
                "their owner"
            )

    def find(self, name: str) -> Found | None:
        from huggingface_hub import HfApi, errors

        repository = self._repository(name)
        try:
            info = HfApi().model_info(repository, files_metadata=True, timeout=_CONNECT_SECONDS)
        except errors.GatedRepoError:
            raise
        except (errors.RepositoryNotFoundError, errors.HFValidationError):
            return None
        listed = {item.rfilename: item.size for item in info.siblings or ()}
        found = self._found(name, lambda file: (listed[file], None) if file in listed else None)
        return found and replace(found, version=str(info.sha))

    @contextlib.contextmanager
    def open(self, name: str, file: str, found: Found) -> Iterator[Any]:
        from huggingface_hub import get_session, hf_hub_url, utils

        url = hf_hub_url(self._repository(name), file, revision=found.version)
        # Compressed, a file of the size that the hub names could grow without bound.
        sent = utils.build_hf_headers()  # type: ignore[attr-defined]
        headers, session = {**sent, "accept-encoding": "identity"}, get_session()
        with session.stream("GET", url, headers=headers, timeout=_CONNECT_SECONDS) as one:
            utils.hf_raise_for_status(one)  # type: ignore[attr-defined]
            pieces = filter(None, one.iter_raw(PIECE))
            yield SimpleNamespace(read=lambda _: next(pieces, b""))

    def _repository(self, name: str) -> str:
        return f"{self.location}/{name}" if self.location else name


# Credentials and endpoints come from fsspec's own configuration (FSSPEC_S3_KEY and so on,
# ~/.config/fsspec) or that of the service's client.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": _CONNECT_SECONDS, "read_timeout": 30}}
}
# Facts about a file that change with its content. Others change by themselves, such as the time it
# was last read and the URL that a server redirects to.
_VERSION = re.compile(
    "size|etag|mod|mtime|created|md5|crc|digest|hash|checksum|sha|generation|version|^ino$", re.I
)


class FsspecResolver(Resolver):
    """Finds the adapter ``name`` at ``scheme://place/name``: S3, Google Cloud Storage, HTTP."""

    def __init__(self, scheme: str, location: str) -> None:
        super().__init__(scheme, location.rstrip("/"))
        try:
            self._opened()
        except Exception as error:
            raise SettingsError(
                f"adapter_sources: {scheme}:// cannot be opened ({type(error).__name__}: "
                f"{without_password(first_line(error))}): install the package of this file "
                "system, start its host, or correct its address or user"
            ) from error

    def _opened(self) -> tuple[Any, str]:
        """The file system, made anew as some have a connection for one thread, and its path."""
        from fsspec.core import url_to_fs

        options = {"use_listings_cache": False, "skip_instance_cache": True}
        files, root = url_to_fs(self.url, **options, **_OPTIONS.get(self.scheme, {}))
        return files, root.rstrip("/")

    def find(self, name: str) -> Found | None:
        files, root = self._opened()

        def look(file: str) -> tuple[int | None, object] | None:
            try:
                try:
                    info = files.info(f"{root}/{name}/{file}")
                except FileNotFoundError as error:
                    if (hidden := self._hidden(error)) is None:
                        return None
                    raise hidden from error
            except Exception as error:
                if file in FILES or not is_denied(error):
                    raise
                return None  # S3 denies access to what is absent where listing is not allowed
            size = info.get("size")
            facts = sorted((k, str(v)) for k, v in info.items() if _VERSION.search(k))
            return size if type(size) is int else None, facts

        return self._found(name, look)

    @contextlib.contextmanager
    def open(self, name: str, file: str, found: Found) -> Iterator[Any]:
        # In pieces a file is asked for with ranges, which not all servers of HTTP have.
        whole = {"block_size": 0} if self.scheme in ("http", "https") else {}
        files, root = self._opened()
        with files.open(f"{root}/{name}/{file}", "rb", cache_type="readahead", **whole) as opened:
            yield opened

    def _hidden(self, error: FileNotFoundError) -> BaseException | None:
        """What a file system of HTTP hides: it calls every failure a file that is absent."""
        cause, web = error.__cause__, self.scheme in ("http", "https")
        if cause is None or isinstance(cause, FileNotFoundError):
            return None
        absent = status_of(cause) in ((404, 410) if web else (None, 404, 410))
        return None if absent else cause
