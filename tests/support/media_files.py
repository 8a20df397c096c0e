"""Images and videos in every format, and forged ones: sound, huge, or slow to read."""

import struct
import sys
import tempfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

from tests.support.http_helpers import encoded
from tests.support.videos import video_file


def chunk(kind, data):
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth=8, colour=0, interlaced=False):
    """Return a PNG of zeros, of any size, in little memory.

    `colour` is 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGB and alpha; rows of an
    interlaced one come in Adam7's seven passes.
    """
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4),
                  (1, 0, 2, 2), (0, 1, 1, 2)]  # fmt: skip
    packer = zlib.compressobj(9)
    data = b""
    for left, top, right, down in passes:
        columns, rows = -(-max(0, width - left) // right), -(-max(0, height - top) // down)
        size = (1 + (columns * bits + 7) // 8) * rows if columns else 0
        for start in range(0, size, 1 << 20):
            data += packer.compress(bytes(min(1 << 20, size - start)))
    data += packer.flush()
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, int(interlaced))
    palette = chunk(b"PLTE", bytes(range(48)) * 16) if colour == 3 else b""
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + palette + chunk(b"IDAT", data)
        + chunk(b"IEND", b"")
    )  # fmt: skip


def with_chunk(content, kind, data):
    """Return a PNG with a further chunk after its header."""
    return content[:33] + chunk(kind, data) + content[33:]


@cache
def inflating(kind, size):
    """Return the data of a PNG's chunk (iCCP, zTXt, iTXt) that inflates to so many bytes."""
    return (b"x\0\1\0\0\0" if kind == b"iTXt" else b"x\0\0") + zlib.compress(bytes(size), 9)


def scans(content, times):
    """Return a progressive JPEG whose last scan is repeated: each costs a pass over the image."""
    start = content.rindex(b"\xff\xda")
    return content[:start] + content[start:-2] * times + content[-2:]


def drawing(width=96, height=64):
    """Return an image with detail."""
    rng = np.random.default_rng(width * height)
    small = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@cache
def images():
    """Return undamaged images in every format and mode, with their formats."""
    image, info = drawing(), PngImagePlugin.PngInfo()
    exif = image.getexif()
    exif[0x0112] = 6
    info.add_text("Comment", "a" * 500, zip=True)
    info.add_itxt("Title", "b" * 500, zip=True)
    frames = [drawing(80 + n, 60).resize((80, 60)) for n in range(4)]
    more = {"save_all": True, "append_images": frames[1:], "duration": 50}
    as_jpeg = ({}, {"progressive": True}, {"exif": exif, "icc_profile": b"\1" * 3000},
               {"subsampling": 0, "restart_marker_blocks": 2})  # fmt: skip
    files = [
        *(("PNG", image.convert(mode), {"pnginfo": info, "exif": exif})
          for mode in ("RGB", "RGBA", "L", "LA", "P", "1")),
        ("PNG", Image.new("I;16", (50, 40), 300), {}),
        *((form, frames[0], more) for form in ("PNG", "WEBP", "GIF")),  # animations
        *(("JPEG", image.convert(mode), {"quality": 85, **options})
          for mode in ("RGB", "L", "CMYK") for options in as_jpeg),
        ("WEBP", image, {}), ("WEBP", image, {"lossless": True}),
        ("WEBP", image.convert("RGBA"), {"exif": exif}),
        *(("BMP", image.convert(mode), {}) for mode in ("RGB", "L", "P", "1")),
        ("GIF", image.convert("P"), {}),
        ("GIF", image.convert("L"), {"transparency": 3, "interlace": 0}),
    ]  # fmt: skip
    interlaced = ((8, 2), (16, 6), (1, 0), (4, 3), (16, 4))
    found = [("png", png(61, 47, *kind, interlaced=True)) for kind in interlaced]
    return found + [(form.lower(), encoded(one, form, **more)) for form, one, more in files]


@cache
def videos():
    """Return undamaged videos in every container, with their formats."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for suffix, codec in (
            ("mp4", "mpeg4"), ("mp4", "libx264"), ("mov", "mjpeg"), ("mkv", "mpeg4"),
            ("mkv", "ffv1"), ("webm", "libvpx"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"),
            ("avi", "mjpeg"),
        ):  # fmt: skip
            path = Path(folder) / f"{codec}.{suffix}"
            try:
                found.append((suffix, video_file(path, codec=codec, count=9).read_bytes()))
            except Exception as error:  # noqa: BLE001 - a codec that this FFmpeg lacks
                print(f"left out: {suffix} with {codec} ({error})", file=sys.stderr)
    return found
