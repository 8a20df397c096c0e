"""Reads the images and videos of requests within the limits of the settings."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from PIL import Image

from valora_data.wording import plural
from valora_serve.errors import ImageError, OverloadedError
from valora_serve.server.gather import gathered
from valora_serve.server.media.fetch import Fetcher, MediaUrl
from valora_serve.server.media.pool import shared_pool
from valora_serve.server.settings import ServerSettings

SHARE = 3  # how many times as long all images of a request may take to decode as one of them
_FRAMES = "data:video/jpeg;base64,"


class Pixels:
    """Pixels of a request's images until it ends, limited before anything is decoded."""

    def __init__(self, reader: MediaReader) -> None:
        self._reader, self.limits = reader, reader.limits
        self._mine, self._over = 0, False
        self.seconds: list[float] = []  # that its images have taken to decode

    def take(self, count: int) -> None:
        """Reserve room for `count` more pixels of an image; may be called in any thread."""
        limits, seconds = self.limits, SHARE * self.limits.decode_seconds
        if sum(self.seconds) >= seconds:
            raise ImageError(
                f"The request's images take longer than {seconds:g} s to decode together: send "
                "fewer or smaller ones"
            )
        with self._reader.lock:
            if self._over:  # another of its images has failed
                raise ImageError("The request is over")
            if self._mine + count > limits.max_request_pixels:
                raise ImageError(
                    f"The request's images have more than {limits.max_request_pixels} pixels "
                    "together: send fewer or smaller ones"
                )
            if self._reader.held + count > limits.max_held_pixels:
                raise OverloadedError("Images of other requests fill the memory: try again soon")
            self._reader.held += count
            self._mine += count

    def __enter__(self) -> Pixels:
        return self

    def __exit__(self, *_: object) -> None:
        with self._reader.lock:
            self._reader.held -= self._mine
            self._mine, self._over = 0, True


class MediaReader(Fetcher):
    """Fetches and decodes the images and videos of requests."""

    def __init__(self, settings: ServerSettings, *, text_only: bool = False) -> None:
        super().__init__(settings)
        # Decoders of what strangers send get the settings that are numbers: no key is in them.
        numbers = {k: v for k, v in asdict(settings).items() if type(v) in (int, float)}
        self.limits = ServerSettings(**numbers)
        self._text_only = text_only  # whether the base model reads none
        self.held, self.lock = 0, threading.Lock()  # pixels of all requests

    def pixels(self) -> Pixels:
        """Pixel count of a new request; a context manager that releases them."""
        return Pixels(self)

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
        limit = self.settings.max_video_frames
        if count > limit:
            text = f"The video has {plural(count, 'frame')}, more than {limit}: send fewer"
            raise ImageError(text)

    async def _decode(self, what: str, source: Any, pixels: Pixels) -> list[Image.Image]:
        if self._text_only:  # before anything is fetched or decoded for it
            raise ImageError("The base model reads text alone: leave images and videos out")
        settings = self.settings
        limit = settings.max_image_bytes if what == "image" else settings.max_video_bytes
        if isinstance(source, str):
            fetching = self.content(source, limit, what)
            del source  # may hold the file in base64
            source = await fetching
        if len(source) > limit:
            raise ImageError(f"The {what} is larger than {limit} bytes: send a smaller one")
        source = MediaUrl(source)  # which the pool empties as soon as its decoder has it
        return await shared_pool().decode(what, source, pixels)
