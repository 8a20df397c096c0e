"""Changed and forged images and videos in chat requests: a text or one sentence answers each."""

import contextlib
import io
import math
import struct
import tempfile
import zlib
from functools import partial
from pathlib import Path

import httpx
from PIL import Image

from tests.fuzz import mutations
from tests.fuzz.driver import error_of, served
from tests.support.http_helpers import CHAT, data_url, encoded
from tests.support.media_files import images, inflating, png, scans, videos, with_chunk
from tests.support.videos import video_file

LIMITS = {"seconds": 5.0, "memory": 300.0, "health": 1.0}


def resized(rng, content):
    """Write another width and height wherever the file says them, with right checksums."""
    old = (64, 48)  # of all videos
    with contextlib.suppress(Exception):  # also an image that was changed before
        old = Image.open(io.BytesIO(content)).size
    new = rng.choices([1, 7, 300, 4000, 5000, 8191, 16383, 39_999_999 // 5000, 65535], k=2)
    forms = [partial(struct.pack, form) for form in (">HH", "<HH", ">II", "<II")]
    # WebP with further chunks has them less one, in three bytes.
    forms.append(lambda *sides: b"".join((one - 1).to_bytes(3, "little") for one in sides))
    for pack in forms:
        for turn in (1, -1):  # JPEG has the height first
            content = content.replace(pack(*old[::turn]), pack(*new[::turn]), 1)
    return content


def _checksums(content):
    """Correct the checksums of a PNG's chunks, so that what they hold is read."""
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        return content
    found, end = bytearray(content), 4
    while end + 12 <= len(found):
        at, end = end + 4, end + 12 + int.from_bytes(found[end + 4 : end + 8])
        if end + 4 <= len(found):
            found[end : end + 4] = zlib.crc32(found[at + 4 : end]).to_bytes(4)
    return bytes(found)


CHANGES = (*mutations.CHANGES, resized)


def _side(rng, low, high):
    return int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))


def extreme_image(rng):
    """An image of an extreme size, whole and valid; a JPEG may have thousands of scans."""
    form, mode, most = rng.choice((
        ("PNG", (1, 0), 6 * 10**7), ("PNG", (8, 3), 6 * 10**7), ("PNG", (16, 6), 6 * 10**7),
        ("JPEG", "RGB", 65500), ("JPEG", "L", 65500), ("JPEG", "CMYK", 65500),
        ("WEBP", "RGBA", 16383), ("GIF", "P", 60000), ("BMP", "1", 60000),
    ))  # fmt: skip
    pixels = _side(rng, 10**5, 4 * 10**7)
    width = min(most, max(_side(rng, 1, pixels), pixels // most))
    size = (width, max(1, min(most, pixels // width)))
    if form == "PNG":
        return "png", png(*size, *mode, interlaced=rng.random() < 0.3)
    image, more = Image.new(mode, size), {}
    if form == "JPEG":
        exif = image.getexif()
        exif[0x0112] = rng.randrange(1, 9)
        more = {"progressive": rng.random() < 0.5, "exif": exif}
    content = encoded(image, form, **more)
    if more.get("progressive"):
        content = scans(content, rng.choice((1, rng.randrange(10, 2500))))[: 20 * 2**20]
    return form.lower(), content


def text_bomb(rng):
    """A PNG whose profile or texts inflate."""
    content = png(40, 30, 8, 2)
    for _ in range(rng.randrange(1, 60)):
        kind, size = rng.choice((b"iCCP", b"zTXt", b"iTXt")), 3 * 10 ** rng.randrange(4, 8)
        content = with_chunk(content, kind, inflating(kind, size))
    return "png", content


def many_frames(rng):
    """An animation of many frames."""
    form, count, side = (
        rng.choice(("GIF", "PNG", "WEBP")),
        rng.randrange(10, 400),
        _side(rng, 8, 200),
    )
    first, *rest = [Image.new("RGB", (side, side), (n % 251,) * 3) for n in range(count)]
    return form.lower(), encoded(first, form, save_all=True, append_images=rest, duration=20)


def large_video(rng):
    """A video of an extreme size, length or rate."""
    codec, suffix = rng.choice((("mpeg4", "mp4"), ("libx264", "mkv"), ("mjpeg", "avi")))
    options = rng.choice((
        {"size": (4096, 16), "count": 20}, {"size": (16, 4096), "count": 20, "rate": 1000},
        {"size": (32, 32), "count": 1500}, {"size": (6000, 4000), "count": 2},
    ))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{suffix}"
        return suffix, video_file(path, codec=codec, **options).read_bytes()


BOMBS = (extreme_image, extreme_image, text_bomb, many_frames, large_video)
VIDEOS = ("mp4", "mov", "mkv", "webm", "avi")


def make_case(rng):
    """Return what was done, the format and the file."""
    if rng.random() < 0.12:
        bomb = rng.choice(BOMBS)
        return bomb.__name__, *bomb(rng)
    form, content = rng.choice(images() if rng.random() < 0.7 else videos())
    changes = rng.choices(CHANGES, k=1 if rng.random() < 0.6 else 2)
    for change in changes:
        content = change(rng, content) if len(content) > 16 else content
        if change in (mutations.forged, resized):
            content = _checksums(content)
    return " and ".join(change.__name__ for change in changes), form, content


def ask(client, form, content):
    """Send a chat request with a file; returns what became of it."""
    kind = "video" if form in VIDEOS else "image"
    url = {"url": data_url(content, f"{kind}/{form}")}
    turn = [{"type": "text", "text": "?"}, {"type": f"{kind}_url", f"{kind}_url": url}]
    body = {"messages": [{"role": "user", "content": turn}], "max_tokens": 1}
    response = client.post(CHAT, json=body)
    if response.status_code == 200:
        assert response.json()["choices"][0]["message"] is not None
        return "answered"
    assert response.status_code == 400, f"status {response.status_code}: {response.text}"
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
            kind, form, content = make_case(rng)
            return kind, f"{form}, {len(content)} bytes", lambda: ask(client, form, content)

        for form, content in images() + videos():
            assert ask(client, form, content) == "answered", form
        yield process, make
