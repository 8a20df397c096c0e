"""Decodes images and videos whose content cannot be trusted, in processes of `pool`."""

import contextlib
import ctypes
import os
import resource
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from valora_data.images import to_rgb
from valora_data.sources.formats.videos import frame_places
from valora_serve.errors import ImageError, ServeError
from valora_serve.server.settings import ServerSettings

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
IMAGE_BYTES = 4  # bytes that Pillow's image takes, per pixel; fewer in some modes
WEBP_BYTES = 20  # of decoding WebP, per pixel: two canvases, two copies and Pillow's image
WEBP_COPIES = 3  # copies of the file while WebP is decoded: ours, Pillow's and the decoder's
VIDEO_BYTES = 64  # of decoding, per pixel: 16 reference frames of 10 bits, and the frame in RGB
MIN_VIDEO_BYTES = 16  # bytes that decoding any video takes, per pixel of a frame
OVERHEAD = 8 << 20  # bytes that decoding anything takes besides: tables, buffers of rows, profiles
SMALL = 32 << 20  # bytes up to which a file is decoded as soon as it is measured
STRIP_BYTES = 1 << 20  # pixels are converted and copied in strips of about so many bytes
_GRACE = 2  # seconds after its time limit at which a process that nobody has killed ends itself
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def check_size(limits: ServerSettings, what: str, width: int, height: int, memory: int = 0) -> None:
    """Refuse a size from a header, and bytes for it, before anything is decoded."""
    pixels, has = width * height, f"The {what} has {width} x {height} pixels"
    smaller, longer = "send a smaller one", max(width, height)
    for fits, said in (
        (width > 0 and height > 0, f"{has}: send another"),
        (pixels <= limits.max_image_pixels,
         f"The {what} has {pixels} pixels, more than {limits.max_image_pixels}: {smaller}"),
        (what != "video" or limits.video_frames * pixels <= limits.max_video_pixels,
         f"The video's {limits.video_frames} frames of {width} x {height} pixels have more than "
         f"{limits.max_video_pixels} pixels together: {smaller}"),
        (longer <= limits.max_image_side,
         f"{has}, and a side may have at most {limits.max_image_side}: {smaller}"),
        (longer <= limits.max_image_ratio * min(width, height),
         f"{has}, and its longer side may be at most {limits.max_image_ratio:g} times its shorter "
         "one: cut it into parts"),
        (memory <= limits.max_decode_bytes,
         f"The {what} of {width} x {height} pixels takes more than {limits.max_decode_bytes} bytes "
         f"to decode: {smaller}, or another format"),
    ):  # fmt: skip
        if not fits:
            raise ImageError(said)


def begin() -> None:
    """Prepare a process: what is loaded later counts for the memory of an image."""
    with contextlib.suppress(ImportError):  # said when there is a video
        import av  # noqa: F401

    Image.init()  # all formats, whose import would count for the time limit of an odd file
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # ends the process, also inside a codec
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, largest = resource.getrlimit(resource.RLIMIT_FSIZE)  # of files in memory, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    warnings.simplefilter("ignore")
    system = ctypes.CDLL(None)
    system.mallopt(_M_MMAP_THRESHOLD, 1 << 18)  # memory is given back when it is freed
    system.mallopt(_M_ARENA_MAX, 1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # codecs print
        os.dup2(nowhere, descriptor)


def measure(
    what: str, file: str, target: str, limits: ServerSettings
) -> tuple[int, int, list[tuple[int, int, int]] | None]:
    """Return pixels, and bytes that decoding takes at most, by a header; what is small is decoded.

    So it takes one way to this process instead of two; nothing else is.
    """
    with _limited(limits.decode_seconds, limits.max_decode_bytes), Path(file).open("rb") as opened:
        pixels, memory = (measure_image if what == "image" else measure_video)(opened, limits)
    if memory > min(SMALL, limits.max_decode_bytes // 8):
        return pixels, memory, None
    return pixels, memory, decode(what, file, target, limits, memory)


def decode(
    what: str, file: str, target: str, limits: ServerSettings, memory: int
) -> list[tuple[int, int, int]]:
    """Decode a file that was measured within so many bytes, and write its RGB pixels."""
    sizes: list[tuple[int, int, int]] = []
    with (
        _limited(limits.decode_seconds, memory), Path(file).open("rb") as opened,
        Path(target).open("wb") as written, _readable(what, limits, "damaged"),
    ):  # fmt: skip
        for image, times in (decode_image if what == "image" else decode_video)(opened, limits):
            if image is None:
                sizes.clear()
                written.truncate(written.seek(0))
                continue
            rows = max(1, STRIP_BYTES // (3 * image.width))
            for top in range(0, image.height, rows):
                strip = image.crop((0, top, image.width, min(top + rows, image.height)))
                written.write(to_rgb(strip, image.format).tobytes())
            sizes.append((image.width, image.height, times))
    return sizes


@contextlib.contextmanager
def _limited(seconds: float, memory: int) -> Iterator[None]:
    """Limit the memory that this process takes beyond what it has, and end it when it hangs."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + memory
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _readable(what: str, limits: ServerSettings, damaged: str) -> Iterator[None]:
    """Context in which whatever a decoder raises is an `ImageError`."""
    try:
        yield
    except ServeError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(f"The {what} has too many pixels: send a smaller one") from error
    except MemoryError as error:
        raise ImageError(
            f"The {what} takes more than {limits.max_decode_bytes} bytes to decode: send a smaller "
            "one"
        ) from error
    except Exception as error:
        raise ImageError(f"The {what} is {damaged}: {type(error).__name__}") from error


def measure_image(file: BinaryIO, limits: ServerSettings) -> tuple[int, int]:
    """Return pixels and memory of an image; see `measure`."""
    size, _ = file.seek(0, os.SEEK_END), file.seek(0)
    with _opened(file, limits) as image:
        memory = _memory(image, size)
        check_size(limits, "image", image.width, image.height, memory)
        return image.width * image.height, memory


def decode_image(file: BinaryIO, limits: ServerSettings) -> Iterator[tuple[Image.Image, int]]:
    """Decode an image file that was measured; of an animation, its first frame."""
    with _opened(file, limits) as image:
        ImageOps.exif_transpose(image, in_place=True)
        yield image, 1


@contextlib.contextmanager
def _opened(file: BinaryIO, limits: ServerSettings) -> Iterator[Image.Image]:
    with (
        _readable("image", limits, f"damaged or none of {', '.join(FORMATS)}"),
        Image.open(file, formats=FORMATS) as image,
    ):
        yield image


def measure_video(file: BinaryIO, limits: ServerSettings) -> tuple[int, int]:
    """Return pixels and memory of a video's frames; see `measure`."""
    size, _ = file.seek(0, os.SEEK_END), file.seek(0)
    with _container(file, limits) as (_, context):
        pixels = context.width * context.height
        frames = limits.video_frames * IMAGE_BYTES * pixels  # the server holds them
        needed = frames + size + MIN_VIDEO_BYTES * pixels + OVERHEAD
        check_size(limits, "video", context.width, context.height, needed)
        memory = size + VIDEO_BYTES * pixels + 4 * OVERHEAD
        return limits.video_frames * pixels, min(memory, limits.max_decode_bytes - frames)


def decode_video(
    file: BinaryIO, limits: ServerSettings
) -> Iterator[tuple[Image.Image | None, int]]:
    """Decode frames of a measured video, those that training takes (see `frame_places`), in order.

    Each comes with the number of times that it is wanted. None takes back those before it: some
    packets, as before a first key frame, decoded to no frame of their own.
    """
    with _container(file, limits) as (container, context):
        # Holds if a later frame is larger.
        context.options = {"max_pixels": str(limits.max_image_pixels)}
        container.streams.video[0].thread_type, context.thread_count = "NONE", 1
        total = _frame_count(container, limits)
        while total:
            left, number = limits.video_frames * context.width * context.height, -1
            shown = Counter(frame_places(total, limits.video_frames))
            container.seek(0)
            for number, frame in enumerate(container.decode(video=0)):
                check_size(limits, "video", frame.width, frame.height)
                if number in shown:
                    left -= shown[number] * frame.width * frame.height
                    if left < 0:
                        raise ImageError("The video's frames are larger than its header tells")
                    # One thread: by default there is one a core, and each takes address space.
                    image = frame.to_image(threads=1)
                    # Phones turn videos by a matrix in their header, counter-clockwise like Pillow.
                    yield image.rotate(frame.rotation, expand=True), shown[number]
                if number >= max(shown):
                    return
            total = number + 1
            yield None, 0
        raise ImageError("The video's frames cannot be decoded")


@contextlib.contextmanager
def _container(file: BinaryIO, limits: ServerSettings) -> Iterator[tuple[Any, Any]]:
    """Open a video of the format of its first bytes alone: playlists refer to other files."""
    try:
        import av
    except ImportError as error:
        raise ServeError(f"Videos cannot be decoded here, as PyAV fails ({error})") from error
    head, _ = file.read(12), file.seek(0)
    signs = {
        "mov": head[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide"),
        "matroska": head[:4] == b"\x1aE\xdf\xa3",
        "avi": head[:4] == b"RIFF" and head[8:12] == b"AVI ",
    }
    container_format = next((name for name, is_it in signs.items() if is_it), None)
    if container_format is None:
        raise ImageError("The video is none of MP4, MOV, WebM, Matroska and AVI")
    with _readable("video", limits, "damaged"), av.open(file, format=container_format) as container:
        if not container.streams.video:
            raise ImageError("The video holds no pictures")
        yield container, container.streams.video[0].codec_context


def _frame_count(container: Any, limits: ServerSettings) -> int:
    """Number of frames, from the packets: nothing is decoded."""
    count, first = 0, None
    for packet in container.demux(video=0):
        if packet.pts is not None:
            shown = float(packet.pts * packet.time_base)  # seconds
            first = shown if first is None else first
            if not abs(shown - first) <= limits.max_video_seconds:
                raise ImageError(
                    f"The video is longer than {limits.max_video_seconds:g} s: send a shorter one"
                )
        count += packet.size > 0
    if not count:
        raise ImageError("The video has no frames")
    return count


def _memory(image: Image.Image, file_bytes: int) -> int:
    """Return the most memory that decoding an opened image takes, in bytes, by its header."""
    pixels = image.width * image.height
    if image.format == "WEBP":
        return WEBP_COPIES * file_bytes + WEBP_BYTES * pixels + OVERHEAD
    # The image and its rotated copy, or the one in CMYK and the one in RGB.
    decoded = 2 * IMAGE_BYTES * pixels
    if isinstance(image, JpegImageFile):
        # libjpeg keeps the coefficients of several scans.
        sampling = [(across, down) for _, across, down, _ in image.layer]
        across, down = (max([1, *sides]) for sides in zip(*sampling, strict=True))
        blocks = -(-image.width // (8 * across)) * -(-image.height // (8 * down))
        coefficients = sum(2 * 64 * h * v * blocks for h, v in sampling)
        decoded = max(decoded, coefficients + IMAGE_BYTES * pixels)
    return file_bytes + decoded + OVERHEAD
