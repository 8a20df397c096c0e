"""Decodes images and videos whose content cannot be trusted."""

from __future__ import annotations

import bisect
import io
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps

from valora_serve.errors import ImageError, ServeError

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")


def decode_image(
    content: bytes, most_pixels: int, take: Callable[[int], None] = lambda _: None
) -> Image.Image:
    """Decode an image file.

    Args:
        content: The file's content.
        most_pixels: Largest image, in pixels; checked in the header, before anything is decoded.
        take: Called with the number of pixels before they are decoded; may refuse them.

    Returns:
        An RGB image, rotated as its EXIF orientation says.

    Raises:
        ImageError: The image is damaged, too large, or in none of the `FORMATS`.
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
    """Decode evenly spaced frames of a video file (MP4/MOV, Matroska/WebM or AVI).

    Frame i of `count` is the one shown at (i + ½)/count of the duration. The container format is
    taken from the file's first bytes and no other is tried, so that formats that refer to other
    files (playlists) are never opened.

    Args:
        content: The file's content.
        most_pixels: Largest frame, in pixels.
        most_seconds: Longest video, in seconds.
        count: Number of frames to return.
        take: Called with the number of pixels of a frame before it is kept; may refuse them.
        within: Time limit for decoding, in seconds.

    Returns:
        `count` RGB images; a frame is repeated if the video has fewer.

    Raises:
        ImageError: The video is damaged, too large, too long, of another format, or without frames.
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
    """What to take from a video.

    Attributes:
        pixels: Largest frame, in pixels.
        seconds: Longest video, in seconds.
        count: Number of frames.
        take: Called with the number of pixels of a frame before it is kept.
        until: When decoding has to be finished, in seconds of `time.monotonic`.
    """

    pixels: int
    seconds: float
    count: int
    take: Callable[[int], None]
    until: float

    def check_time(self) -> None:
        if time.monotonic() > self.until:
            raise ImageError("The video takes too long to decode: send a shorter or smaller one")


def _sampled(container: Any, wanted: _Wanted) -> list[Image.Image]:
    """Decode the frames once, in order, and keep those that are shown at the wanted times."""
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
    """Presentation times of all frames in seconds, from the packets: nothing is decoded."""
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
