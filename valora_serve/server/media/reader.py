"""Reads the images and videos of requests within the limits of the settings."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL import Image

from valora_data.wording import plural
from valora_serve.errors import ImageError, OverloadedError
from valora_serve.server.gather import gathered
from valora_serve.server.media.decode import Limits
from valora_serve.server.media.fetch import Fetcher, MediaUrl, too_large
from valora_serve.server.media.pool import Job, shared_pool
from valora_serve.server.settings import ServerSettings

SHARE = 3  # how many times as long all images of a request may take to decode as one of them
_FRAMES = "data:video/jpeg;base64,"


class Pixels:
    """Pixels of a request's images until it ends, limited before anything is decoded."""

    def __init__(self, reader: MediaReader, limit: int, all_together: int) -> None:
        self._reader, self._max_pixels, self._all_together = reader, limit, all_together
        self._mine, self._over = 0, False
        self.seconds = 0.0  # of decoding

    def take(self, count: int) -> None:
        """Reserve room for `count` more pixels; may be called in any thread."""
        with self._reader.lock:
            if self._over:  # another of its images has failed
                raise ImageError("The request is over")
            if self._mine + count > self._max_pixels:
                raise ImageError(
                    f"The request's images have more than {self._max_pixels} pixels together: send "
                    "fewer or smaller ones"
                )
            if self._reader.held + count > self._all_together:
                raise OverloadedError("Images of other requests fill the memory: try again soon")
            self._reader.held += count
            self._mine += count

    def __enter__(self) -> Pixels:
        return self

    def __exit__(self, *_: object) -> None:
        with self._reader.lock:
            self._reader.held -= self._mine
            self._mine, self._over = 0, True


class MediaReader:
    """Fetches and decodes the images and videos of requests."""

    def __init__(self, settings: ServerSettings, *, text_only: bool = False) -> None:
        self._settings = settings
        self._text_only = text_only  # whether the base model reads none
        self._limits = Limits(
            pixels=settings.max_image_pixels, video_pixels=settings.max_video_pixels,
            side=settings.max_image_side, ratio=settings.max_image_ratio,
            memory=settings.max_decode_bytes, seconds=settings.decode_seconds,
            video_seconds=settings.max_video_seconds, frames=settings.video_frames,
        )  # fmt: skip
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="media")
        self._fetcher = Fetcher(settings, self._threads)
        self.held, self.lock = 0, threading.Lock()  # pixels of all requests

    def pixels(self) -> Pixels:
        """Pixel count of a new request; a context manager that releases them."""
        return Pixels(self, self._settings.max_request_pixels, self._settings.max_held_pixels)

    async def image(
        self, url: MediaUrl, pixels: Pixels, number: int = 1, count: int = 1
    ) -> Image.Image:
        """Fetch and decode an image, one of `count`: RGB, as its EXIF says."""
        try:
            [image] = await self._decode("image", url.take(), pixels)
        except ImageError as error:
            if count == 1:
                raise
            raise ImageError(f"Image {number} of {count}: {error}") from error
        return image

    async def images(self, urls: Sequence[MediaUrl], pixels: Pixels) -> list[Image.Image]:
        """Fetch and decode images."""
        numbered = enumerate(urls, 1)
        return await gathered(*(self.image(url, pixels, at, len(urls)) for at, url in numbered))

    async def video(self, url: MediaUrl, pixels: Pixels) -> list[Image.Image]:
        """Fetch a video and decode evenly spaced frames of it, in RGB and in order; as `image`.

        ``data:video/jpeg;base64,`` has the frames as JPEG files in base64, separated by commas.
        """
        text = url.take()
        if isinstance(text, str) and (text := text.strip())[: len(_FRAMES)].lower() == _FRAMES:
            self._check_frames(text.count(","))
            frames = [
                MediaUrl(f"data:image/jpeg;base64,{found[1]}")
                for found in re.finditer(r",([^,]*)", text)
            ]
            del text
            return await self.frames(frames, pixels)
        decoding = self._decode("video", text, pixels)
        del text
        return await decoding

    async def frames(self, urls: Sequence[MediaUrl], pixels: Pixels) -> list[Image.Image]:
        """Fetch and decode the frames of a video that are sent as images."""
        self._check_frames(len(urls))
        return await self.images(urls, pixels)

    def _check_frames(self, count: int) -> None:
        limit = self._settings.max_video_frames
        if count > limit:
            text = f"The video has {plural(count, 'frame')}, more than {limit}: send fewer"
            raise ImageError(text)

    async def close(self) -> None:
        """Close all connections and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()

    async def _decode(self, what: str, source: Any, pixels: Pixels) -> list[Image.Image]:
        if self._text_only:  # before anything is fetched or decoded for it
            raise ImageError("The base model reads text alone: leave images and videos out")
        image = what == "image"
        limit = self._settings.max_image_bytes if image else self._settings.max_video_bytes
        if isinstance(source, str):
            fetching = self._fetcher.content(source, limit, what)
            del source  # may hold the file in base64
            source = await fetching
        if len(source) > limit:
            raise too_large(what, limit)

        def take(count: int) -> None:
            if pixels.seconds >= (limit := SHARE * self._limits.seconds):
                raise ImageError(
                    f"The request's images take longer than {limit:g} s to decode together: send "
                    "fewer or smaller ones"
                )
            pixels.take(count)

        job = Job(what, source, self._limits, take)
        del source  # the job drops it as soon as its decoder has it
        try:
            return await shared_pool().decode(job, self._settings.media_seconds)
        finally:
            pixels.seconds += job.seconds
