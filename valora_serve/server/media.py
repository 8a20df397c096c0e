"""Images and videos out of requests, and nothing else: whatever the sender tries.

Remote hosts and local folders are closed unless the operator names them. Addresses are checked
when the connection is made, so that a name cannot point elsewhere later; every redirect is checked
anew. Sizes are checked before anything is decoded.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import bisect
import io
import ipaddress
import os
import re
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

import httpcore
from PIL import Image, ImageOps

from valora_serve.errors import ImageError, OverloadedError, ServeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from valora_serve.server.settings import ServerSettings

T = TypeVar("T")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
REDIRECTS = 3
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.-]+=[\w.-]+)*);base64,", re.ASCII)
_FETCH_FAILS = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
    OSError,
    ValueError,
)
_REDIRECT = {301, 302, 303, 307, 308}


class Pixels:
    """Counts the pixels that a request's images and frames take, until it ends.

    An image of a hundred kilobytes can hold a hundred megabytes: what one request, and what all
    together have in memory, is bounded before anything is decoded.
    """

    def __init__(self, reader: MediaReader) -> None:
        self._reader = reader
        self.mine = 0
        self.over = False

    def take(self, count: int) -> None:
        """Ask for room; any thread may.

        Raises:
            ImageError: The request has had its share, or is over.
            OverloadedError: Other requests fill the memory.
        """
        self._reader.hold(self, count)

    def __enter__(self) -> Pixels:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.release(self)


class MediaReader:
    """Reads what requests name.

    Args:
        settings: Limits, hosts and folder.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._folder = _allowed_folder(settings.media_folder)
        self._hosts = {host.lower().rstrip(".") for host in settings.media_hosts}
        # Decoding is held to two threads, so that it cannot starve the engine's.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="decode")
        self._pool: httpcore.AsyncConnectionPool | None = None
        self._held = 0
        self._lock = threading.Lock()

    def pixels(self) -> Pixels:
        """Counts for one request; to be closed when it ends."""
        return Pixels(self)

    def hold(self, pixels: Pixels, count: int) -> None:
        """Take room for a request; see `Pixels.take`."""
        most, all_together = self._settings.max_request_pixels, self._settings.max_held_pixels
        with self._lock:
            if pixels.over:  # another of its images has failed: nobody waits for this one
                raise ImageError("The request is over")
            if pixels.mine + count > most:
                raise ImageError(
                    f"The request's images have more than {most} pixels together: send fewer or "
                    "smaller ones"
                )
            if self._held + count > all_together:
                raise OverloadedError("Images of other requests fill the memory: try again soon")
            self._held += count
            pixels.mine += count

    def release(self, pixels: Pixels) -> None:
        """Give a request's room back, for good."""
        with self._lock:
            self._held -= pixels.mine
            pixels.mine, pixels.over = 0, True

    async def image(self, url: str, pixels: Pixels) -> Image.Image:
        """An RGB image, upright as its EXIF orientation says.

        Args:
            url: ``data:``, ``http(s):`` or ``file:``.
            pixels: Counts them.

        Raises:
            ImageError: It may not be fetched, is too large, or is none.
        """
        content = await self._content(url, self._settings.max_image_bytes, "image")
        return await self.decode_image(content, pixels)

    async def video(self, url: str, pixels: Pixels) -> list[Image.Image]:
        """Frames of a video, evenly spaced, RGB.

        Args:
            url: As for an image; or ``data:video/jpeg;base64,`` with the frames' JPEGs in base64,
                separated by commas.
            pixels: Counts them.

        Raises:
            ImageError: As for an image.
        """
        if url.startswith("data:video/jpeg;base64,"):
            frames = url.partition(",")[2].split(",")
            return await self.frames(
                [f"data:image/jpeg;base64,{frame}" for frame in frames], pixels
            )
        content = await self._content(url, self._settings.max_video_bytes, "video")
        return await self.decode_video(content, pixels)

    async def frames(self, urls: Sequence[str], pixels: Pixels) -> list[Image.Image]:
        """The frames of a video that come as images."""
        most = self._settings.max_video_frames
        if len(urls) > most:
            raise ImageError(f"The video has {len(urls)} frames, more than {most}: send fewer")
        return list(await asyncio.gather(*(self.image(url, pixels) for url in urls)))

    async def decode_image(self, content: bytes, pixels: Pixels) -> Image.Image:
        """An RGB image from a file's content; see `image`."""
        if len(content) > self._settings.max_image_bytes:
            raise _too_large("image", self._settings.max_image_bytes)
        return await self._in_thread(
            decode_image, content, self._settings.max_image_pixels, pixels.take
        )

    async def decode_video(self, content: bytes, pixels: Pixels) -> list[Image.Image]:
        """Frames from a video file's content; see `video`."""
        if len(content) > self._settings.max_video_bytes:
            raise _too_large("video", self._settings.max_video_bytes)
        return await self._in_thread(
            partial(decode_video, take=pixels.take, within=self._settings.media_seconds), content,
            self._settings.max_image_pixels, self._settings.max_video_seconds,
            self._settings.video_frames,
        )  # fmt: skip

    async def close(self) -> None:
        """Close connections and threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            await self._pool.aclose()

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _content(self, url: str, most: int, what: str) -> bytes:
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return _from_data_url(url, most, what)
        if scheme in ("http", "https"):
            try:
                async with asyncio.timeout(self._settings.media_seconds):
                    return await self._fetch(url, most, what)
            except TimeoutError as error:
                raise ImageError(
                    f"Fetching the {what} took longer than {self._settings.media_seconds:g} s: "
                    "send it as a data: URL"
                ) from error
        if scheme == "file":
            return await self._in_thread(_from_folder, self._folder, url, most, what)
        raise ImageError(
            f"The {what} is neither a data: nor an http(s): nor a file: URL: send it as "
            "data:image/png;base64,…"
        )

    async def _fetch(self, url: str, most: int, what: str) -> bytes:
        for _ in range(REDIRECTS + 1):
            self._check_url(url, what)
            try:
                found = await self._get(url, most, what)
            except _FETCH_FAILS as error:
                raise ImageError(
                    f"The {what} cannot be fetched from {urlsplit(url).hostname}: "
                    f"{type(error).__name__}"
                ) from error
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise ImageError(
            f"The {what}'s host redirects more than {REDIRECTS} times: name the target"
        )

    def _check_url(self, url: str, what: str) -> None:
        try:
            parts = urlsplit(url)
            host, _ = (parts.hostname or "").lower().rstrip("."), parts.port
        except ValueError as error:
            raise ImageError(f"The {what}'s URL is none: {error}") from error
        if parts.scheme not in ("http", "https") or parts.username or parts.password:
            raise ImageError(f"The {what}'s URL must be http(s) without a user: {parts.scheme}:…")
        if host not in self._hosts:
            shown = host.encode("utf-8", "replace").decode()
            raise ImageError(
                f"The {what} is at {shown[:100]!r}, which this server may not fetch from: send it "
                "as a data: URL, or let the operator name the host in media_hosts"
            )

    async def _get(self, url: str, most: int, what: str) -> bytes | str:
        """The content, or where else it is."""
        if self._pool is None:
            backend = _CheckedNetwork(self._settings.media_private)
            self._pool = httpcore.AsyncConnectionPool(network_backend=backend, max_connections=32)
        headers = [
            ("Host", _netloc(url)), ("User-Agent", "valora-serve"), ("Accept", "image/*, video/*")
        ]  # fmt: skip
        async with self._pool.stream("GET", url, headers=headers) as response:
            if response.status in _REDIRECT:
                for name, value in response.headers:
                    if name.lower() == b"location":
                        return str(value.decode("latin-1"))
                raise ImageError(f"The {what}'s host redirects without saying where")
            if response.status != 200:
                raise ImageError(f"The {what}'s host answered with status {response.status}")
            content = bytearray()
            async for piece in response.aiter_stream():
                content += piece
                if len(content) > most:
                    raise _too_large(what, most)
            return bytes(content)


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only: the very address that was checked."""

    def __init__(self, private: bool) -> None:
        self._private = private
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(item[4][0]) for item in found]
        if not self._private and not all(is_public(address) for address in addresses):
            raise ImageError(
                f"{host} has a private address, which this server does not fetch from: send the "
                "data itself"
            )
        return await self._backend.connect_tcp(
            addresses[0], port, timeout, local_address, socket_options
        )

    async def connect_unix_socket(self, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        raise ImageError("Unix sockets are not fetched from")

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, embedded IPv4 ones included."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if parsed in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None:
            parsed = inner
    return parsed.is_global and not parsed.is_multicast


def decode_image(
    content: bytes, most_pixels: int, take: Callable[[int], None] = lambda _: None
) -> Image.Image:
    """An RGB image from a file's content, upright as its EXIF orientation says.

    Raises:
        ImageError: It is none of the known formats, damaged, or too large.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_pixels("image", image.width * image.height, most_pixels)  # from the header
            take(image.width * image.height)
            return ImageOps.exif_transpose(image).convert("RGB")
    except ServeError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError("The image has too many pixels: send a smaller one") from error
    except Exception as error:
        raise ImageError(
            f"The image is damaged or none of {', '.join(FORMATS)}: {type(error).__name__}"
        ) from error


def decode_video(
    content: bytes,
    most_pixels: int,
    most_seconds: float,
    count: int,
    *,
    take: Callable[[int], None] = lambda _: None,
    within: float = 60.0,
) -> list[Image.Image]:
    """Frames of a video file (MP4/MOV, Matroska/WebM, AVI), evenly spaced, RGB.

    Frame i of `count` is the one on show at (i + ½)/count of the duration.
    The container's format is told by its first bytes and nothing else is tried: formats that name
    other files (playlists) never come into play.

    Raises:
        ImageError: It is none, damaged, too large, too long, or has no frames.
    """
    import av

    container_format = _video_format(content)
    if container_format is None:
        raise ImageError("The video is none of MP4, MOV, WebM, Matroska and AVI")
    try:
        with av.open(io.BytesIO(content), format=container_format) as container:
            stream = _video_stream(container)
            context = stream.codec_context
            _check_pixels("video", context.width * context.height, most_pixels)
            context.options = {"max_pixels": str(most_pixels)}  # holds if a later frame is larger
            stream.thread_type = "NONE"
            wanted = _Wanted(most_pixels, most_seconds, count, take, time.monotonic() + within)
            return _sampled(container, wanted)
    except ServeError:
        raise
    except Exception as error:
        raise ImageError(f"The video is damaged: {type(error).__name__}") from error


@dataclass(frozen=True)
class _Wanted:
    """Of a video: `count` frames, within these limits, decoded `until` (monotonic seconds)."""

    pixels: int
    seconds: float
    count: int
    take: Callable[[int], None]
    until: float

    def check_time(self) -> None:
        if time.monotonic() > self.until:
            raise ImageError("The video takes too long to decode: send a shorter or smaller one")


def _sampled(container: Any, wanted: _Wanted) -> list[Image.Image]:
    """Go through the frames once, and keep those that are on show at the wanted times."""
    times = _frame_times(container, wanted)
    first, last, count = times[0], times[-1], wanted.count
    step = (last - first) / max(1, len(times) - 1)
    instants = [first + (i + 0.5) / count * (last - first + step) for i in range(count)]
    shown = [bisect.bisect_right(times, instant) - 1 for instant in instants]
    container.seek(0)
    picked: list[Image.Image] = []
    for number, frame in enumerate(container.decode(video=0)):
        wanted.check_time()
        _check_pixels("video", frame.width * frame.height, wanted.pixels)
        if number in shown:  # several times if the video has fewer frames than are wanted
            wanted.take(frame.width * frame.height)
            picked += [frame.to_image().convert("RGB")] * shown.count(number)
        if number >= shown[-1]:
            break
    if not picked:
        raise ImageError("The video's frames cannot be decoded")
    return picked


def _frame_times(container: Any, wanted: _Wanted) -> list[float]:
    """When each frame is shown, in seconds, from the packets alone: nothing is decoded."""
    times = []
    for packet in container.demux(video=0):
        wanted.check_time()
        if packet.pts is None or packet.size == 0:
            continue
        times.append(float(packet.pts * packet.time_base))
        if times[-1] - times[0] > wanted.seconds:
            raise ImageError(f"The video is longer than {wanted.seconds:g} s: send a shorter one")
        if len(times) > wanted.seconds * 240:
            raise ImageError("The video has more than 240 frames a second: send another")
    if not times:
        raise ImageError("The video has no frames")
    return sorted(times)


def _video_stream(container: Any) -> Any:
    if not container.streams.video:
        raise ImageError("The video holds no pictures")
    return container.streams.video[0]


def _check_pixels(what: str, pixels: int, most: int) -> None:
    if pixels > most:
        raise ImageError(f"The {what} has {pixels} pixels, more than {most}: send a smaller one")


def _video_format(content: bytes) -> str | None:
    if content[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide"):
        return "mov"
    if content[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if content[:4] == b"RIFF" and content[8:12] == b"AVI ":
        return "avi"
    return None


def _from_data_url(url: str, most: int, what: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None:
        raise ImageError(f"The {what}'s data: URL is not in base64: write data:{what}/…;base64,…")
    encoded = url[head.end() :]
    if len(encoded) > most * 4 // 3 + 4:
        raise _too_large(what, most)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"The {what}'s data: URL holds no valid base64") from error


def _allowed_folder(folder: str | None) -> Path | None:
    if folder is None:
        return None
    path = Path(folder)
    if not path.is_dir():
        raise ImageError(f"media_folder {folder} is no folder: make it, or leave the setting out")
    return path.resolve()


def _from_folder(folder: Path | None, url: str, most: int, what: str) -> bytes:
    """A file below the folder, opened without following a link at any step."""
    if folder is None:
        raise ImageError(
            f"The {what} is a file: URL, and this server reads no local files: send a data: URL, "
            "or let the operator name media_folder"
        )
    outside = ImageError(f"The {what} is no file below the folder that this server may read")
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or "\0" in (name := unquote(parts.path)):
        raise outside
    try:
        inside = (folder / name).resolve().relative_to(folder).parts
        descriptor = _open_below(folder, inside)
    except (OSError, ValueError, RuntimeError) as error:
        raise outside from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise outside
        if facts.st_size > most:
            raise _too_large(what, most)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)


def _open_below(folder: Path, parts: Sequence[str]) -> int:
    """Open a file by walking down; a link put in meanwhile is not followed."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for number, part in enumerate(parts):
        kind = 0 if number == len(parts) - 1 else os.O_DIRECTORY
        try:
            # Not to wait for a pipe's other end.
            below = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | kind, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at


def _too_large(what: str, most: int) -> ImageError:
    return ImageError(f"The {what} is larger than {most} bytes: send a smaller one")


def _netloc(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{parts.port}" if parts.port else host
