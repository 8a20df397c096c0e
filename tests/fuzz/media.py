"""Changed and forged images and videos, sent to a server: ``make fuzz ARGS="media --cases 5000"``.

Each is sent in a chat request, so that it passes through fetching, decoding, the base model's
image processor and the encoder. The answer must be a text or one clear sentence with status 400.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import struct
import sys
import tempfile
import zlib
from functools import cache, partial
from pathlib import Path

import httpx
import numpy as np
from PIL import Image, PngImagePlugin

from tests.fuzz.driver import error_of, served
from tests.support.http_helpers import encoded
from tests.support.videos import video_file

LIMITS = {"seconds": 5.0, "memory": 300.0, "health": 1.0}
EXTREMES = (0, 1, 2, 3, 255, 256, 16383, 16384, 32767, 40000, 65535, 65536, 2**24 - 1, 2**31 - 1,
            2**31, 2**32 - 1)  # fmt: skip


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
        if not columns or not rows:
            continue
        left_over = (1 + (columns * bits + 7) // 8) * rows
        while left_over:
            piece = min(left_over, 1 << 20)
            data += packer.compress(bytes(piece))
            left_over -= piece
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
    packed = zlib.compress(bytes(size), 9)
    return {
        b"iCCP": b"x\0\0" + packed, b"zTXt": b"x\0\0" + packed, b"iTXt": b"x\0\1\0\0\0" + packed
    }[kind]  # fmt: skip


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


# Changes


def flipped(rng, content):
    """Set some bytes, more of them near the beginning, at random."""
    found = bytearray(content)
    for _ in range(rng.randrange(1, 40)):
        end = len(found) if rng.random() < 0.5 else min(len(found), 256)
        found[rng.randrange(0, end)] = rng.randrange(256)
    return bytes(found)


def truncated(rng, content):
    """Cut the end off."""
    return content[: rng.randrange(len(content))]


def repeated(rng, content):
    """Repeat a piece up to 2,000 times."""
    first, last = sorted(rng.choices(range(len(content) + 1), k=2))
    times = rng.randrange(2, max(3, min(2000, 2**22 // max(1, last - first))))
    return content[:last] + content[first:last] * times + content[last:]


def spliced(rng, content):
    """Continue with a piece of another file."""
    other = rng.choice(images() + videos())[1]
    return content[: rng.randrange(8, len(content))] + other[rng.randrange(len(other)) :]


def forged(rng, content):
    """Write extreme numbers into the header, or anywhere."""
    found = bytearray(content)
    for _ in range(rng.randrange(1, 5)):
        form = rng.choice((">H", "<H", ">I", "<I"))
        value = rng.choice(EXTREMES) % 2 ** (8 * struct.calcsize(form))
        end = len(found) if rng.random() < 0.5 else min(len(found), 128)
        at = rng.randrange(0, max(1, end - 4))
        found[at : at + struct.calcsize(form)] = struct.pack(form, value)
    return _checksums(bytes(found))


def resized(rng, content):
    """Write another width and height wherever the file says them, with right checksums."""
    try:
        old = Image.open(io.BytesIO(content)).size
    except Exception:  # noqa: BLE001 - a video, or an image that was changed before
        old = (64, 48)  # of all videos
    new = rng.choices([1, 7, 300, 4000, 5000, 8191, 16383, 39_999_999 // 5000, 65535], k=2)
    forms = [partial(struct.pack, form) for form in (">HH", "<HH", ">II", "<II")]
    # WebP with further chunks has them less one, in three bytes.
    forms.append(lambda *sides: b"".join((one - 1).to_bytes(3, "little") for one in sides))
    for pack in forms:
        for turn in (1, -1):  # JPEG has the height first
            content = content.replace(pack(*old[::turn]), pack(*new[::turn]), 1)
    return _checksums(content)


def _checksums(content):
    """Correct the checksums of a PNG's chunks, so that what they hold is read."""
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        return content
    found, at = bytearray(content), 8
    while at + 12 <= len(found):
        (size,) = struct.unpack(">I", found[at : at + 4])
        end = at + 8 + size
        if end + 4 > len(found):
            break
        found[end : end + 4] = struct.pack(">I", zlib.crc32(bytes(found[at + 4 : end])))
        at = end + 4
    return bytes(found)


CHANGES = (flipped, truncated, repeated, spliced, forged, resized)


# Bombs


def _side(rng, low, high):
    return int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))


def extreme_png(rng):
    """Return a small PNG of an extreme size, whole and valid."""
    depth, colour = rng.choice(((1, 0), (8, 0), (8, 2), (8, 3), (16, 2), (16, 6), (16, 4)))
    pixels = _side(rng, 10**5, 6 * 10**7)
    short = _side(rng, 1, int(pixels**0.5))
    width, height = short, pixels // short
    if rng.random() < 0.5:
        width, height = height, width
    return "png", png(width, height, depth, colour, interlaced=bool(rng.random() < 0.3))


def extreme_other(rng):
    """Return a uniform image of an extreme size; a JPEG may be progressive and turned by EXIF."""
    form, mode, most = rng.choice((
        ("JPEG", "RGB", 65500), ("JPEG", "L", 65500), ("JPEG", "CMYK", 65500),
        ("WEBP", "RGBA", 16383), ("GIF", "P", 60000), ("BMP", "1", 60000),
    ))  # fmt: skip
    pixels = _side(rng, 10**5, 4 * 10**7)
    width = min(most, max(_side(rng, 1, pixels), pixels // most))
    image = Image.new(mode, (width, max(1, min(most, pixels // width))))
    more, exif = {}, image.getexif()
    if form == "JPEG":
        exif[0x0112] = rng.randrange(1, 9)
        more = {"progressive": rng.random() < 0.5, "exif": exif}
    return form.lower(), encoded(image, form, **more)


def slow_jpeg(rng):
    """Return a progressive JPEG of up to thousands of scans."""
    side = rng.randrange(100, 3000)
    content = encoded(drawing(side, side), "JPEG", progressive=True, quality=30)
    return "jpeg", scans(content, rng.randrange(10, 2500))[: 20 * 2**20]


def text_bomb(rng):
    """Return a PNG whose profile or texts inflate."""
    content = png(40, 30, 8, 2)
    for _ in range(rng.randrange(1, 60)):
        kind = rng.choice((b"iCCP", b"zTXt", b"iTXt"))
        size = rng.choice((10**5, 10**6, 10**7, 3 * 10**7))
        content = with_chunk(content, kind, inflating(kind, size))
    return "png", content


def many_frames(rng):
    """Return an animation of many frames."""
    form = rng.choice(("GIF", "PNG", "WEBP"))
    count, side = rng.randrange(10, 400), rng.randrange(8, 200)
    frames = [Image.new("L", (side, side), n % 251) for n in range(count)]
    if form == "WEBP":
        frames = [frame.convert("RGB") for frame in frames[:60]]
    return form.lower(), encoded(
        frames[0], form, save_all=True, append_images=frames[1:], duration=20
    )


def large_video(rng):
    """Return a video of an extreme size, length or rate."""
    codec, suffix = rng.choice((("mpeg4", "mp4"), ("libx264", "mkv"), ("mjpeg", "avi")))
    options = rng.choice((
        {"size": (3840, 2160), "count": 10}, {"size": (4096, 16), "count": 20},
        {"size": (16, 4096), "count": 20}, {"size": (32, 32), "count": 1500},
        {"size": (32, 32), "count": 30, "rate": 1000}, {"size": (6000, 4000), "count": 2},
    ))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{suffix}"
        return suffix, video_file(path, codec=codec, **options).read_bytes()


BOMBS = (extreme_png, extreme_other, extreme_other, slow_jpeg, text_bomb, many_frames, large_video)
VIDEOS = ("mp4", "mov", "mkv", "webm", "avi")


def make_case(rng):
    """Return what was done, the format and the file."""
    if rng.random() < 0.12:
        bomb = rng.choice(BOMBS)
        return [bomb.__name__], *bomb(rng)
    form, content = rng.choice(images() if rng.random() < 0.7 else videos())
    changes = rng.choices(CHANGES, k=1 if rng.random() < 0.6 else 2)
    for change in changes:
        content = change(rng, content) if len(content) > 16 else content
    return [change.__name__ for change in changes], form, content


def ask(client, form, content):
    """Send a chat request with a file; returns what became of it."""
    kind = "video" if form in VIDEOS else "image"
    url = f"data:{kind}/{form};base64,{base64.b64encode(content).decode()}"
    turn = [{"type": "text", "text": "?"}, {"type": f"{kind}_url", f"{kind}_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": turn}], "max_tokens": 1}
    response = client.post("/v1/chat/completions", json=body)
    answer = response.json()
    if response.status_code == 200:
        assert answer["choices"][0]["message"] is not None
        return "answered"
    assert response.status_code == 400, f"status {response.status_code}: {answer}"
    return f"refused: {error_of(response.text, 400)['code']}"


@contextlib.contextmanager
def running(folder):
    """A warm server, which every undamaged file was sent to."""
    # A small cache: its pages count as memory when they are first used.
    arguments = ("--pages", 400, "--image-cache-bytes", 10**6)
    with (
        served(*arguments, cwd=folder) as process,
        httpx.Client(base_url=process.url, timeout=60, trust_env=False) as client,
    ):

        def make(rng, number):
            kinds, form, content = make_case(rng)
            return kinds, f"{form}, {len(content)} bytes", lambda: ask(client, form, content)

        for form, content in images() + videos():
            assert ask(client, form, content) == "answered", form
        yield process.url, process.process.pid, make
