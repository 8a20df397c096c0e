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
from PIL.JpegImagePlugin import JpegImageFile

from valora_data.images import to_rgb
from valora_serve.errors import ImageError, ServeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
IMAGE_BYTES = 4
"""Bytes that Pillow's image takes, per pixel; fewer in some modes."""
WEBP_BYTES = 20
"""Bytes that decoding WebP takes, per pixel: two canvases, two copies and Pillow's image."""
WEBP_COPIES = 3
"""Copies of the file while WebP is decoded: ours, Pillow's and the decoder's."""
VIDEO_BYTES = 64
"""Bytes that decoding a video takes, per pixel of a frame: 16 reference frames of 10 bits, the
frame in RGB and Pillow's image."""
LEAST_VIDEO_BYTES = 16
"""Bytes that decoding any video takes, per pixel of a frame."""
OVERHEAD = 8 << 20
"""Bytes that decoding anything takes besides: tables, buffers of rows, profiles."""
FRAMES_PER_SECOND = 240


@dataclass(frozen=True)
class Limits:
    """Limits of one image or video.

    Attributes:
        pixels: Largest image or frame, in pixels.
        video_pixels: Most pixels of the frames that are taken from a video together.
        side: Largest width or height, in pixels.
        ratio: Largest ratio of the longer side to the shorter one.
        memory: Most memory that decoding takes, in bytes: the file, what its decoder allocates,
            and all frames of a video.
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

    def check(self, what: str, width: int, height: int) -> None:
        """Refuse a size from a header, before anything is decoded.

        Args:
            what: ``image`` or ``video``, for error messages.
            width: Width in pixels.
            height: Height in pixels.

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

    def check_memory(self, what: str, width: int, height: int, size: int) -> None:
        """Refuse what takes too much memory, before anything is decoded.

        Args:
            what: ``image`` or ``video``, for error messages.
            width: Width in pixels.
            height: Height in pixels.
            size: Memory of decoding, in bytes.

        Raises:
            ImageError: It exceeds the limit.
        """
        if size > self.memory:
            raise ImageError(
                f"The {what} of {width} x {height} pixels takes more than {self.memory} bytes to "
                "decode: send a smaller one, or another format"
            )


def decode_image(
    content: bytes,
    limits: Limits,
    take: Callable[[int, int], None] = lambda *_: None,
    reserve: Callable[[int], None] = lambda _: None,
) -> Image.Image:
    """Decode an image file; of an animation, its first frame.

    Args:
        content: The file's content.
        limits: Its limits, checked in the header before anything is decoded.
        take: Called with width and height before the pixels are decoded; may refuse them.
        reserve: Called with the memory of decoding, in bytes, before the pixels are decoded; may
            wait until as much is free.

    Returns:
        An image of any mode, rotated as its EXIF orientation says.

    Raises:
        ImageError: The image is damaged, too large, or in none of the `FORMATS`.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            limits.check("image", image.width, image.height)
            memory = _memory(image, len(content))
            limits.check_memory("image", image.width, image.height, memory)
            take(image.width, image.height)
            reserve(memory)
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
    content: bytes,
    limits: Limits,
    take: Callable[[int, int], None] = lambda *_: None,
    reserve: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[Image.Image, int]]:
    """Decode evenly spaced frames of a video file (MP4/MOV, Matroska/WebM or AVI).

    Frame i of n is the one shown at (i + ½)/n of the duration. The container format is taken from
    the file's first bytes and no other is tried, so that formats that refer to other files
    (playlists) are never opened.

    Args:
        content: The file's content.
        limits: Its limits.
        take: Called with width and height of a frame before it is converted; may refuse it.
        reserve: Called with the memory of decoding, in bytes, before anything is decoded; may
            wait until as much is free.

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
            memory = _video_memory(context.width, context.height, len(content), limits)
            reserve(memory)
            context.options = {"max_pixels": str(limits.pixels)}  # holds if a later frame is larger
            stream.thread_type, context.thread_count = "NONE", 1
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
            # One thread: by default there is one for each core, and each takes address space.
            yield frame.to_image(threads=1), shown.count(number)
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


def _memory(image: Image.Image, file_bytes: int) -> int:
    """Return the most memory that decoding an image takes, in bytes, from its header.

    Args:
        image: An opened image, of which nothing has been decoded.
        file_bytes: Size of the file.
    """
    pixels = image.width * image.height
    if image.format == "WEBP":
        return WEBP_COPIES * file_bytes + WEBP_BYTES * pixels + OVERHEAD
    # The image and its rotated copy, or the one in CMYK and the one in RGB.
    decoded = 2 * IMAGE_BYTES * pixels
    if isinstance(image, JpegImageFile):
        decoded = max(decoded, _coefficients(image) + IMAGE_BYTES * pixels)
    return file_bytes + decoded + OVERHEAD


def _coefficients(image: JpegImageFile) -> int:
    """Return the bytes of all coefficients of a JPEG: two for each sample.

    libjpeg keeps them if a component comes in several scans, or not in the first one: in
    progressive files, and in others of several scans.
    """
    sampling = [(across, down) for _, across, down, _ in image.layer]
    across = max([1, *(h for h, _ in sampling)])
    down = max([1, *(v for _, v in sampling)])
    columns, rows = -(-image.width // (8 * across)), -(-image.height // (8 * down))
    return sum(2 * 64 * h * v * columns * rows for h, v in sampling)


def _video_memory(width: int, height: int, file_bytes: int, limits: Limits) -> int:
    """Return the memory that decoding a video may take, in bytes, without its finished frames.

    Args:
        width: Width of a frame, in pixels.
        height: Height of a frame, in pixels.
        file_bytes: Size of the file.
        limits: Its limits.

    Raises:
        ImageError: It takes too much.
    """
    pixels = width * height
    frames = limits.frames * IMAGE_BYTES * pixels  # the server holds them
    least = file_bytes + LEAST_VIDEO_BYTES * pixels + OVERHEAD
    limits.check_memory("video", width, height, frames + least)
    return min(file_bytes + VIDEO_BYTES * pixels + 4 * OVERHEAD, limits.memory - frames)


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
