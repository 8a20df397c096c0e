"""Decodes images and videos whose content cannot be trusted.

Runs in a worker process, see `valora_serve.server.media.worker`; imports no torch.
"""

from __future__ import annotations

import bisect
import io
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps

from valora_data.images import to_rgb
from valora_serve.errors import ImageError, ServeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
BYTES_PER_PIXEL = {"WEBP": 20}
"""Memory of decoding by format: for WebP two canvases, two copies and Pillow's image."""
OTHER_BYTES_PER_PIXEL = 8
"""Memory of decoding other formats: Pillow's image, and its rotated copy."""
PROGRESSIVE_BYTES_PER_PIXEL = 12
"""Memory of decoding a progressive JPEG: all coefficients, and Pillow's image."""
FRAMES_PER_SECOND = 240


@dataclass(frozen=True)
class Limits:
    """Limits of one image or video.

    Attributes:
        pixels: Largest image or frame, in pixels.
        video_pixels: Most pixels of the frames that are taken from a video together.
        side: Largest width or height, in pixels.
        ratio: Largest ratio of the longer side to the shorter one.
        memory: Most memory that decoding takes, in bytes.
        seconds: Time limit of decoding, in seconds.
        video_seconds: Longest video, in seconds.
        frames: Number of frames to take from a video.
    """

    pixels: int
    video_pixels: int
    side: int
    ratio: float
    memory: int
    seconds: float
    video_seconds: float
    frames: int

    def check(self, what: str, width: int, height: int, bytes_per_pixel: int = 4) -> None:
        """Refuse a size from a header, before anything is decoded.

        Args:
            what: ``image`` or ``video``, for error messages.
            width: Width in pixels.
            height: Height in pixels.
            bytes_per_pixel: Memory of decoding.

        Raises:
            ImageError: The size exceeds a limit.
        """
        pixels = width * height
        if width < 1 or height < 1:
            raise ImageError(f"The {what} has {width} x {height} pixels: send another")
        if pixels > self.pixels:
            raise ImageError(
                f"The {what} has {pixels} pixels, more than {self.pixels}: send a smaller one"
            )
        if what == "video" and self.frames * pixels > self.video_pixels:
            raise ImageError(
                f"The video's {self.frames} frames of {width} x {height} pixels have more than "
                f"{self.video_pixels} pixels together: send a smaller one"
            )
        if max(width, height) > self.side:
            raise ImageError(
                f"The {what} has {width} x {height} pixels, and a side may have at most "
                f"{self.side}: send a smaller one"
            )
        if max(width, height) > self.ratio * min(width, height):
            raise ImageError(
                f"The {what} has {width} x {height} pixels, and its longer side may be at most "
                f"{self.ratio:g} times its shorter one: cut it into parts"
            )
        if pixels * bytes_per_pixel > self.memory:
            raise ImageError(
                f"The {what} of {width} x {height} pixels takes more than {self.memory} bytes to "
                "decode: send a smaller one, or another format"
            )


def decode_image(
    content: bytes, limits: Limits, take: Callable[[int, int], None] = lambda *_: None
) -> Image.Image:
    """Decode an image file; of an animation, its first frame.

    Args:
        content: The file's content.
        limits: Its limits, checked in the header before anything is decoded.
        take: Called with width and height before the pixels are decoded; may refuse them.

    Returns:
        An image of any mode, rotated as its EXIF orientation says.

    Raises:
        ImageError: The image is damaged, too large, or in none of the `FORMATS`.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            limits.check("image", image.width, image.height, _bytes_per_pixel(image))
            take(image.width, image.height)
            ImageOps.exif_transpose(image, in_place=True)
            # Colours with a profile are converted whole: its table is as large as an image.
            return to_rgb(image, image.format) if image.mode == "CMYK" else image
    except ServeError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError("The image has too many pixels: send a smaller one") from error
    except MemoryError as error:
        raise _too_much_memory("image", limits) from error
    except Exception as error:
        raise ImageError(
            f"The image is damaged or none of {', '.join(FORMATS)}: {type(error).__name__}"
        ) from error


def decode_video(
    content: bytes, limits: Limits, take: Callable[[int, int], None] = lambda *_: None
) -> Iterator[tuple[Image.Image, int]]:
    """Decode evenly spaced frames of a video file (MP4/MOV, Matroska/WebM or AVI).

    Frame i of n is the one shown at (i + ½)/n of the duration. The container format is taken from
    the file's first bytes and no other is tried, so that formats that refer to other files
    (playlists) are never opened.

    Args:
        content: The file's content.
        limits: Its limits.
        take: Called with width and height of a frame before it is converted; may refuse it.

    Yields:
        RGB images in order, and how often each is taken: more than once if the video has fewer
        frames than are wanted.

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
            limits.check("video", context.width, context.height)
            context.options = {"max_pixels": str(limits.pixels)}  # holds if a later frame is larger
            stream.thread_type = "NONE"
            yield from _sampled(container, limits, take, time.monotonic() + limits.seconds)
    except ServeError:
        raise
    except MemoryError as error:
        raise _too_much_memory("video", limits) from error
    except Exception as error:
        raise ImageError(f"The video is damaged: {type(error).__name__}") from error


def _sampled(
    container: Any, limits: Limits, take: Callable[[int, int], None], until: float
) -> Iterator[tuple[Image.Image, int]]:
    """Decode the frames once, in order, and keep those that are shown at the wanted times."""
    times = _frame_times(container, limits, until)
    first, last, count = times[0], times[-1], limits.frames
    step = (last - first) / max(1, len(times) - 1)
    instants = [first + (i + 0.5) / count * (last - first + step) for i in range(count)]
    shown = [bisect.bisect_right(times, instant) - 1 for instant in instants]
    container.seek(0)
    missing = True
    for number, frame in enumerate(container.decode(video=0)):
        _check_time(until)
        limits.check("video", frame.width, frame.height)
        if number in shown:
            take(frame.width, frame.height)
            yield frame.to_image(), shown.count(number)
            missing = False
        if number >= shown[-1]:
            break
    if missing:
        raise ImageError("The video's frames cannot be decoded")


def _frame_times(container: Any, limits: Limits, until: float) -> list[float]:
    """Presentation times of all frames in seconds, from the packets: nothing is decoded."""
    times = []
    for packet in container.demux(video=0):
        _check_time(until)
        if packet.pts is None or packet.size == 0:
            continue
        times.append(float(packet.pts * packet.time_base))
        if not abs(times[-1] - times[0]) <= limits.video_seconds:
            raise ImageError(
                f"The video is longer than {limits.video_seconds:g} s: send a shorter one"
            )
        if len(times) > limits.video_seconds * FRAMES_PER_SECOND:
            raise ImageError(
                f"The video has more than {FRAMES_PER_SECOND} frames a second: send another"
            )
    if not times:
        raise ImageError("The video has no frames")
    return sorted(times)


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise ImageError("The video takes too long to decode: send a shorter or smaller one")


def _too_much_memory(what: str, limits: Limits) -> ImageError:
    return ImageError(
        f"The {what} takes more than {limits.memory} bytes to decode: send a smaller one"
    )


def _bytes_per_pixel(image: Image.Image) -> int:
    if "progressive" in image.info:
        return PROGRESSIVE_BYTES_PER_PIXEL
    return BYTES_PER_PIXEL.get(image.format or "", OTHER_BYTES_PER_PIXEL)


def _video_stream(container: Any) -> Any:
    if not container.streams.video:
        raise ImageError("The video holds no pictures")
    return container.streams.video[0]


def _video_format(content: bytes) -> str | None:
    if content[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide"):
        return "mov"
    if content[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if content[:4] == b"RIFF" and content[8:12] == b"AVI ":
        return "avi"
    return None
