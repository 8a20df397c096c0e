"""Reads the images and videos of requests within the limits of the settings."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from valora_serve.errors import ImageError, OverloadedError
from valora_serve.server.media.decode import decode_image, decode_video
from valora_serve.server.media.fetch import Fetcher, too_large

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from PIL import Image

    from valora_serve.server.settings import ServerSettings

T = TypeVar("T")


class Pixels:
    """Pixels that a request's images and frames occupy in memory until the request ends.

    A file of a hundred kilobytes can decode to a hundred megabytes, so that the pixels of one
    request and of all requests together are limited before anything is decoded.

    Attributes:
        mine: Pixels of the request.
        over: Whether the request has ended.
    """

    def __init__(self, reader: MediaReader) -> None:
        self._reader = reader
        self.mine = 0
        self.over = False

    def take(self, count: int) -> None:
        """Reserve room for `count` more pixels; may be called in any thread.

        Raises:
            ImageError: The request would exceed max_request_pixels, or has ended.
            OverloadedError: All requests together would exceed max_held_pixels.
        """
        self._reader.hold(self, count)

    def __enter__(self) -> Pixels:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.release(self)


class MediaReader:
    """Fetches and decodes the images and videos of requests.

    Args:
        settings: Limits, allowed hosts and allowed folder.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        # Two threads at most, so that decoding does not starve the engine's thread.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="decode")
        self._fetcher = Fetcher(settings, self._threads)
        self._held = 0
        self._lock = threading.Lock()

    def pixels(self) -> Pixels:
        """Pixel count of a new request; a context manager that releases them."""
        return Pixels(self)

    def hold(self, pixels: Pixels, count: int) -> None:
        """Reserve room for a request, as `Pixels.take` describes."""
        most, all_together = self._settings.max_request_pixels, self._settings.max_held_pixels
        with self._lock:
            if pixels.over:  # another of its images has failed
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
        """Release a request's pixels; it cannot reserve any more."""
        with self._lock:
            self._held -= pixels.mine
            pixels.mine, pixels.over = 0, True

    async def image(self, url: str, pixels: Pixels) -> Image.Image:
        """Fetch and decode an image.

        Args:
            url: ``data:``, ``http(s):`` or ``file:``.
            pixels: Pixel count of the request.

        Returns:
            An RGB image, rotated as its EXIF orientation says.

        Raises:
            ImageError: The image may not be fetched, is too large, or cannot be decoded.
            OverloadedError: Images of other requests fill the memory.
        """
        content = await self._fetcher.content(url, self._settings.max_image_bytes, "image")
        return await self.decode_image(content, pixels)

    async def video(self, url: str, pixels: Pixels) -> list[Image.Image]:
        """Fetch a video and decode evenly spaced frames of it.

        Args:
            url: ``data:``, ``http(s):`` or ``file:``; or ``data:video/jpeg;base64,`` with the
                frames as JPEG files in base64, separated by commas.
            pixels: Pixel count of the request.

        Returns:
            RGB images, in order.

        Raises:
            ImageError: The video may not be fetched, is too large, or cannot be decoded.
            OverloadedError: Images of other requests fill the memory.
        """
        if url.startswith("data:video/jpeg;base64,"):
            frames = url.partition(",")[2].split(",")
            return await self.frames(
                [f"data:image/jpeg;base64,{frame}" for frame in frames], pixels
            )
        content = await self._fetcher.content(url, self._settings.max_video_bytes, "video")
        return await self.decode_video(content, pixels)

    async def frames(self, urls: Sequence[str], pixels: Pixels) -> list[Image.Image]:
        """Fetch and decode the frames of a video that are sent as images."""
        most = self._settings.max_video_frames
        if len(urls) > most:
            raise ImageError(f"The video has {len(urls)} frames, more than {most}: send fewer")
        return list(await asyncio.gather(*(self.image(url, pixels) for url in urls)))

    async def decode_image(self, content: bytes, pixels: Pixels) -> Image.Image:
        """Decode an image file, as `image` does."""
        if len(content) > self._settings.max_image_bytes:
            raise too_large("image", self._settings.max_image_bytes)
        return await self._in_thread(
            decode_image, content, self._settings.max_image_pixels, pixels.take
        )

    async def decode_video(self, content: bytes, pixels: Pixels) -> list[Image.Image]:
        """Decode evenly spaced frames of a video file, as `video` does."""
        if len(content) > self._settings.max_video_bytes:
            raise too_large("video", self._settings.max_video_bytes)
        return await self._in_thread(
            partial(decode_video, take=pixels.take, within=self._settings.media_seconds), content,
            self._settings.max_image_pixels, self._settings.max_video_seconds,
            self._settings.video_frames,
        )  # fmt: skip

    async def close(self) -> None:
        """Close all connections and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
