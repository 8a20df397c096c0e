"""Fetches what URLs of a request name: data: URLs, and allowed hosts and folders.

Remote hosts and local folders are closed unless the operator names them. The address is checked
that is connected to, so that no name can be pointed elsewhere in between; so is every redirect.
"""

import asyncio
import base64
import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import httpcore
import httpx
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from valora_data.contract.files import UnreadableError, open_regular
from valora_serve.errors import ImageError
from valora_serve.server.bodies import LARGE_BYTES
from valora_serve.server.settings import ServerSettings, existing_folder

MAX_REDIRECTS = 3
_DATA_URL = re.compile(r"data:[^,]{0,1000}; *base64 *,", re.IGNORECASE)
_STANDARD = bytes.maketrans(b"-_", b"+/")  # from the alphabet that is safe in URLs
_SPACES = b" \t\n\f\r"
_FETCH_FAILS = (
    httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError,
    httpcore.UnsupportedProtocol, OSError, ValueError,
)  # fmt: skip
_REDIRECT = {301, 302, 303, 307, 308}
_HEADERS = [("User-Agent", "valora-serve"), ("Accept", "image/*, video/*")]


class MediaUrl:
    """URL of an image or video, or the file itself: taken once, and its text freed then."""

    __slots__ = ("_text",)

    def __init__(self, text: str | bytes) -> None:
        self._text: str | bytes | None = text

    def take(self) -> str | bytes:
        """Return the URL, which this object no longer holds then; it can be taken once."""
        text, self._text = self._text, None
        assert text is not None, "the URL has been taken already"
        return text

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate a text, or take what is a URL already."""

        def made(value: Any, text: Callable[[Any], str]) -> MediaUrl:
            return value if isinstance(value, cls) else cls(text(value))

        return core_schema.no_info_wrap_validator_function(made, handler(str))


class Fetcher:
    """Fetches the content of URLs."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="media")
        named = settings.media_folder
        self._folder = None if named is None else existing_folder("media_folder", named)
        self._hosts = {_named_host(name) for name in settings.media_hosts}
        self._pool: httpcore.AsyncConnectionPool | None = None

    async def content(self, url: str, max_bytes: int, what: str) -> bytes:
        """Content of a URL; of what is larger than `max_bytes`, more than these."""
        url = url.strip()
        scheme = url[:8].partition(":")[0].lower()
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        if scheme == "data":
            if len(url) <= LARGE_BYTES:  # waiting for a thread would take longer
                return _from_data_url(url, what)
            return await in_thread(_from_data_url, url, what)
        if scheme == "file":
            return await in_thread(_from_folder, self._folder, url, max_bytes, what)
        if scheme not in ("http", "https"):
            raise ImageError(
                f"The {what} is neither a data: nor an http(s): nor a file: URL: send it as "
                "data:image/png;base64,…"
            )
        try:
            async with asyncio.timeout(self.settings.media_seconds):
                return await self._fetch(url, max_bytes, what)
        except TimeoutError as error:
            raise ImageError(
                f"Fetching the {what} took longer than {self.settings.media_seconds:g} s: "
                "send it as a data: URL"
            ) from error

    async def close(self) -> None:
        """Close all connections and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            await self._pool.aclose()

    async def _fetch(self, text: str, max_bytes: int, what: str) -> bytes:
        if self._pool is None:
            backend = _CheckedNetwork(self.settings.media_private)
            self._pool = httpcore.AsyncConnectionPool(network_backend=backend, max_connections=32)
        url: httpx.URL | None = None
        for _ in range(MAX_REDIRECTS + 1):
            try:
                url = httpx.URL(text) if url is None else url.join(text)
            except (httpx.InvalidURL, ValueError) as error:
                raise ImageError(f"The {what}'s URL is not valid: {str(error)[:200]}") from error
            self._check_url(url, what)
            target = httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            )
            headers = [("Host", url.netloc.decode()), *_HEADERS]
            try:
                async with self._pool.stream("GET", target, headers=headers) as response:
                    if response.status not in _REDIRECT:
                        return await _content_of(response, max_bytes, what)
                    named = [v for name, v in response.headers if name.lower() == b"location"]
            except _FETCH_FAILS as error:
                raise ImageError(
                    f"The {what} cannot be fetched from {_host(url)}: {type(error).__name__}"
                ) from error
            if not named:
                raise ImageError(f"The {what}'s host redirects without saying where")
            text = named[0].decode(errors="replace")
        raise ImageError(
            f"The {what}'s host redirects more than {MAX_REDIRECTS} times: name the target"
        )

    def _check_url(self, url: httpx.URL, what: str) -> None:
        if url.scheme not in ("http", "https") or url.userinfo:
            raise ImageError(f"The {what}'s URL must be http(s) without a user: {url.scheme}:…")
        if not 0 <= (url.port or 0) < 65536:
            raise ImageError(f"The {what}'s URL has port {url.port}: there are only 65535")
        if _host(url) not in self._hosts:
            raise ImageError(
                f"The {what} is at {_host(url)[:100]!r}, which this server may not fetch from: "
                "send it as a data: URL, or let the operator name the host in media_hosts"
            )


async def _content_of(response: httpcore.Response, max_bytes: int, what: str) -> bytes:
    if response.status != 200:
        raise ImageError(f"The {what}'s host answered with status {response.status}")
    content = bytearray()
    async for piece in response.aiter_stream():
        content += piece
        if len(content) > max_bytes:
            break
    return bytes(content)


class _CheckedNetwork(httpcore.AnyIOBackend):
    """Connects to the address that was checked, which has to be public."""

    def __init__(self, private: bool) -> None:
        self._private = private

    async def connect_tcp(
        self, host: str, port: int, *more: Any, **options: Any
    ) -> httpcore.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(item[4][0]) for item in found]
        if not self._private and not all(is_public(address) for address in addresses):
            raise ImageError(
                f"{host} has a private address, which this server does not fetch from: send the "
                "data itself"
            )
        return await super().connect_tcp(addresses[0], port, *more, **options)


def is_public(address: str) -> bool:
    """Whether an IP address is public; so is an IPv4 address embedded in IPv6 (6to4, NAT64)."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if parsed in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None:
            parsed = inner
    if parsed.version == 6 and parsed not in ipaddress.ip_network("2000::/3"):
        return False  # all that is assigned; Python calls more global, such as local NAT64
    return parsed.is_global and not parsed.is_multicast


def _from_data_url(url: str, what: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None:
        raise ImageError(f"The {what}'s data: URL is not in base64: write data:{what}/…;base64,…")
    try:
        text = unquote_to_bytes(url[head.end() :].encode("ascii"))
        text = text.translate(_STANDARD, _SPACES).rstrip(b"=")  # the padding may be missing
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except ValueError as error:
        raise ImageError(f"The {what}'s data: URL holds no valid base64") from error


def _from_folder(folder: Path | None, url: str, max_bytes: int, what: str) -> bytes:
    if folder is None:
        raise ImageError(
            f"The {what} is a file: URL, and this server reads no local files: send a data: URL, "
            "or let the operator name media_folder"
        )
    outside = ImageError(f"The {what} is no file below the folder that this server may read")
    try:
        parts = urlsplit(url)
        path = (folder / unquote(parts.path)).resolve()
        if parts.netloc.lower() not in ("", "localhost") or not path.is_relative_to(folder):
            raise outside
        with open_regular(path, max_bytes=1 << 62) as file:
            # A link that was put there meanwhile leads elsewhere.
            opened = Path(f"/proc/self/fd/{file.fileno()}").readlink()
            if not opened.is_relative_to(folder):
                raise outside
            return file.read(max_bytes + 1)
    except (UnreadableError, OSError, ValueError, RuntimeError) as error:
        raise outside from error


def _named_host(name: str) -> str:
    with contextlib.suppress(httpx.InvalidURL):
        if re.fullmatch(r"[\w.:-]+", host := _host(httpx.URL(scheme="http", host=name))):
            return host
    raise ImageError(f"media_hosts names {name!r}, which is no host: write, e.g., example.org")


def _host(url: httpx.URL) -> str:
    return url.raw_host.decode("ascii").lower().rstrip(".")
