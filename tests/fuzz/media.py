"""Mutated images and videos, sent to a server: ``make fuzz ARGS="media --cases 5000"``.

Every case is made from its number and the seed alone. It is sent to a `valora-serve` of its own in
a chat request, so that it passes through every step: fetching, decoding, the base model's image
processor and the encoder. The answer must be a text or one clear sentence with status 400, within
the limits on time and memory.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import multiprocessing
import os
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import httpx
import numpy as np
from PIL import Image, PngImagePlugin

from tests.support.videos import video_file

SECONDS = 5.0
"""Longest that one image or video may take."""
BYTES = 300 * 2**20
"""Most memory of the server and its decoders above idle."""
HEALTH_SECONDS = 1.0
"""Longest that /health may take meanwhile."""
EXTREMES = (0, 1, 2, 3, 255, 256, 16383, 16384, 32767, 40000, 65535, 65536, 2**24 - 1, 2**31 - 1,
            2**31, 2**32 - 1)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One image or video.

    Attributes:
        number: Number of the case.
        kind: ``image`` or ``video``.
        form: Format.
        change: What was done to the file.
        content: The file.
    """

    number: int
    kind: str
    form: str
    change: str
    content: bytes

    def url(self) -> str:
        """Return the file as a data: URL."""
        encoded = base64.b64encode(self.content).decode()
        return f"data:{self.kind}/{self.form};base64,{encoded}"


# ------------------------------------------------------------------ undamaged files


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int, height: int, depth: int = 8, colour: int = 0, interlaced: bool = False
) -> bytes:
    """Return a PNG of zeros, of any size, in little memory.

    Args:
        width: Width in pixels.
        height: Height in pixels.
        depth: Bits of a sample.
        colour: Colour type: 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGB and alpha.
        interlaced: Whether its rows come in Adam7's seven passes.
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
        row = 1 + (columns * bits + 7) // 8
        left_over = row * rows
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


def with_chunk(content: bytes, kind: bytes, data: bytes) -> bytes:
    """Return a PNG with a further chunk after its header."""
    return content[:33] + chunk(kind, data) + content[33:]


@cache
def inflating(kind: bytes, size: int) -> bytes:
    """Return the data of a PNG's chunk (iCCP, zTXt, iTXt) that inflates to so many bytes."""
    packed = zlib.compress(bytes(size), 9)
    return {
        b"iCCP": b"x\0\0" + packed, b"zTXt": b"x\0\0" + packed, b"iTXt": b"x\0\1\0\0\0" + packed
    }[kind]  # fmt: skip


def scans(content: bytes, times: int) -> bytes:
    """Return a progressive JPEG whose last scan is repeated: each costs a pass over the image."""
    start = content.rindex(b"\xff\xda")
    return content[:start] + content[start:-2] * times + content[-2:]


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    """Return an image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def drawing(width: int = 96, height: int = 64) -> Image.Image:
    """Return an image with detail."""
    rng = np.random.default_rng(width * height)
    small = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@cache
def images() -> list[tuple[str, bytes]]:
    """Return undamaged images in every format and mode, with their formats."""
    image = drawing()
    exif = image.getexif()
    exif[0x0112] = 6
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "a" * 500, zip=True)
    info.add_itxt("Title", "b" * 500, zip=True)
    frames = [drawing(80 + n, 60).resize((80, 60)) for n in range(4)]
    more = {"save_all": True, "append_images": frames[1:], "duration": 50}
    found = [
        ("png", saved(image.convert(mode), "PNG", pnginfo=info, exif=exif))
        for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")
        if mode != "I;16"
    ]
    found += [("png", saved(Image.new("I;16", (50, 40), 300), "PNG"))]
    found += [("png", png(61, 47, depth, colour, interlaced=True))
              for depth, colour in ((8, 2), (16, 6), (1, 0), (4, 3), (16, 4))]  # fmt: skip
    found += [("png", saved(frames[0], "PNG", **more))]  # APNG
    found += [
        ("jpeg", saved(image.convert(mode), "JPEG", quality=85, **options))
        for mode in ("RGB", "L", "CMYK")
        for options in (
            {}, {"progressive": True}, {"exif": exif, "icc_profile": b"\1" * 3000},
            {"subsampling": 0, "restart_marker_blocks": 2},
        )
    ]  # fmt: skip
    found += [
        ("webp", saved(image, "WEBP")), ("webp", saved(image, "WEBP", lossless=True)),
        ("webp", saved(image.convert("RGBA"), "WEBP", exif=exif)),
        ("webp", saved(frames[0], "WEBP", **more)),
    ]  # fmt: skip
    found += [("bmp", saved(image.convert(mode), "BMP")) for mode in ("RGB", "L", "P", "1")]
    found += [
        ("gif", saved(image.convert("P"), "GIF")),
        ("gif", saved(image.convert("L"), "GIF", transparency=3, interlace=0)),
        ("gif", saved(frames[0], "GIF", **more)),
    ]
    return found


@cache
def videos() -> list[tuple[str, bytes]]:
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


# ------------------------------------------------------------------ changes


def flipped(rng: np.random.Generator, content: bytes) -> bytes:
    """Set some bytes, more of them near the beginning, at random."""
    found = bytearray(content)
    for _ in range(int(rng.integers(1, 40))):
        end = len(found) if rng.random() < 0.5 else min(len(found), 256)
        found[int(rng.integers(0, end))] = int(rng.integers(0, 256))
    return bytes(found)


def truncated(rng: np.random.Generator, content: bytes) -> bytes:
    """Cut the end off."""
    return content[: int(rng.integers(0, len(content)))]


def repeated(rng: np.random.Generator, content: bytes) -> bytes:
    """Repeat a piece up to 2,000 times."""
    first, last = sorted(int(at) for at in rng.integers(0, len(content) + 1, 2))
    times = int(rng.integers(2, max(3, min(2000, 2**22 // max(1, last - first)))))
    return content[:last] + content[first:last] * times + content[last:]


def spliced(rng: np.random.Generator, content: bytes) -> bytes:
    """Continue with a piece of another file."""
    others = images() + videos()
    other = others[int(rng.integers(0, len(others)))][1]
    return content[: int(rng.integers(8, len(content)))] + other[int(rng.integers(0, len(other))) :]


def forged(rng: np.random.Generator, content: bytes) -> bytes:
    """Write extreme numbers into the header, or anywhere."""
    found = bytearray(content)
    for _ in range(int(rng.integers(1, 5))):
        form = (">H", "<H", ">I", "<I")[int(rng.integers(0, 4))]
        value = EXTREMES[int(rng.integers(0, len(EXTREMES)))] % 2 ** (8 * struct.calcsize(form))
        end = len(found) if rng.random() < 0.5 else min(len(found), 128)
        at = int(rng.integers(0, max(1, end - 4)))
        found[at : at + struct.calcsize(form)] = struct.pack(form, value)
    return _checksums(bytes(found))


def resized(rng: np.random.Generator, content: bytes) -> bytes:
    """Write another width and height into the header, with a right checksum."""
    sides = [1, 7, 300, 4000, 5000, 8191, 16383, 39_999_999 // 5000, 65535]
    width, height = (sides[int(at)] for at in rng.integers(0, len(sides), 2))
    found = bytearray(content)
    if content[:8] == b"\x89PNG\r\n\x1a\n":
        found[16:24] = struct.pack(">II", width, height)
    elif content[:2] == b"\xff\xd8":
        for marker in (b"\xff\xc0", b"\xff\xc2"):
            at = content.find(marker)
            if at > 0:
                found[at + 5 : at + 9] = struct.pack(">HH", height, width)
    elif content[:3] == b"GIF":
        found[6:10] = struct.pack("<HH", width, height)
        at = content.find(b"\x2c")
        if rng.random() < 0.5 and at > 0:
            found[at + 5 : at + 9] = struct.pack("<HH", width, height)
    elif content[:2] == b"BM":
        found[18:26] = struct.pack("<ii", width, height * (-1 if rng.random() < 0.3 else 1))
    elif content[8:12] == b"WEBP":
        at = content.find(b"\x9d\x01\x2a")
        if content[12:16] == b"VP8X":
            found[24:27], found[27:30] = (struct.pack("<I", n - 1)[:3] for n in (width, height))
        elif at > 0:
            found[at + 3 : at + 7] = struct.pack("<HH", width & 0x3FFF, height & 0x3FFF)
    else:  # wherever a video has its size: 64 x 48
        for form in (">HH", "<HH", ">II", "<II"):
            at = content.find(struct.pack(form, 64, 48))
            if at >= 0:
                size = struct.calcsize(form)
                most = 65535 if size == 4 else 2**31 - 1
                found[at : at + size] = struct.pack(form, min(width, most), min(height, most))
    return _checksums(bytes(found))


def _checksums(content: bytes) -> bytes:
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


# ------------------------------------------------------------------ bombs


def _side(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def extreme_png(rng: np.random.Generator) -> tuple[str, bytes]:
    """Return a small PNG of an extreme size, whole and valid."""
    depth, colour = ((1, 0), (8, 0), (8, 2), (8, 3), (16, 2), (16, 6), (16, 4))[
        int(rng.integers(0, 7))
    ]
    pixels = _side(rng, 10**5, 6 * 10**7)
    short = _side(rng, 1, int(pixels**0.5))
    width, height = short, pixels // short
    if rng.random() < 0.5:
        width, height = height, width
    return "png", png(width, height, depth, colour, interlaced=bool(rng.random() < 0.3))


def extreme_jpeg(rng: np.random.Generator) -> tuple[str, bytes]:
    """Return a uniform JPEG of an extreme size, perhaps progressive, CMYK or rotated by EXIF."""
    mode = ("RGB", "L", "CMYK")[int(rng.integers(0, 3))]
    pixels = _side(rng, 10**5, 4 * 10**7)
    width = min(65500, max(_side(rng, 1, pixels), pixels // 65500))
    image = Image.new(mode, (width, max(1, min(65500, pixels // width))))
    exif = image.getexif()
    exif[0x0112] = int(rng.integers(1, 9))
    return "jpeg", saved(image, "JPEG", progressive=bool(rng.random() < 0.5), exif=exif)


def extreme_other(rng: np.random.Generator) -> tuple[str, bytes]:
    """Return a uniform WebP, GIF or BMP of an extreme size."""
    form = ("WEBP", "GIF", "BMP")[int(rng.integers(0, 3))]
    most = 16383 if form == "WEBP" else 60000
    pixels = _side(rng, 10**5, 3 * 10**7)
    width = min(most, max(_side(rng, 1, pixels), pixels // most))
    size = width, max(1, min(most, pixels // width))
    image = Image.new({"WEBP": "RGBA", "GIF": "P", "BMP": "1"}[form], size)
    return form.lower(), saved(image, form)


def slow_jpeg(rng: np.random.Generator) -> tuple[str, bytes]:
    """Return a progressive JPEG of up to thousands of scans."""
    side = int(rng.integers(100, 3000))
    content = saved(drawing(side, side), "JPEG", progressive=True, quality=30)
    return "jpeg", scans(content, int(rng.integers(10, 2500)))[: 20 * 2**20]


def text_bomb(rng: np.random.Generator) -> tuple[str, bytes]:
    """Return a PNG whose profile or texts inflate."""
    content = png(40, 30, 8, 2)
    for _ in range(int(rng.integers(1, 60))):
        kind = (b"iCCP", b"zTXt", b"iTXt")[int(rng.integers(0, 3))]
        size = (10**5, 10**6, 10**7, 3 * 10**7)[int(rng.integers(0, 4))]
        content = with_chunk(content, kind, inflating(kind, size))
    return "png", content


def many_frames(rng: np.random.Generator) -> tuple[str, bytes]:
    """Return an animation of many frames."""
    form = ("GIF", "PNG", "WEBP")[int(rng.integers(0, 3))]
    count, side = int(rng.integers(10, 400)), int(rng.integers(8, 200))
    frames = [Image.new("L", (side, side), n % 251) for n in range(count)]
    if form == "WEBP":
        frames = [frame.convert("RGB") for frame in frames[:60]]
    return form.lower(), saved(
        frames[0], form, save_all=True, append_images=frames[1:], duration=20
    )


def large_video(rng: np.random.Generator) -> tuple[str, bytes]:
    """Return a video of an extreme size, length or rate."""
    codec, suffix = (("mpeg4", "mp4"), ("libx264", "mkv"), ("mjpeg", "avi"))[
        int(rng.integers(0, 3))
    ]
    options = (
        {"size": (3840, 2160), "count": 10}, {"size": (4096, 16), "count": 20},
        {"size": (16, 4096), "count": 20}, {"size": (32, 32), "count": 1500},
        {"size": (32, 32), "count": 30, "rate": 1000}, {"size": (6000, 4000), "count": 2},
    )[int(rng.integers(0, 6))]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{suffix}"
        return suffix, video_file(path, codec=codec, **options).read_bytes()


BOMBS = (extreme_png, extreme_jpeg, extreme_other, slow_jpeg, text_bomb, many_frames, large_video)
VIDEOS = ("mp4", "mov", "mkv", "webm", "avi")


def make_case(seed: int, number: int) -> Case:
    """Return a case; the same for the same seed and number."""
    rng = np.random.default_rng((seed, number))
    if rng.random() < 0.12:
        bomb = BOMBS[int(rng.integers(0, len(BOMBS)))]
        form, content = bomb(rng)
        change = bomb.__name__
    else:
        sources = images() if rng.random() < 0.7 else videos()
        form, content = sources[int(rng.integers(0, len(sources)))]
        done = []
        for _ in range(1 if rng.random() < 0.6 else 2):
            made = CHANGES[int(rng.integers(0, len(CHANGES)))]
            content = made(rng, content) if len(content) > 16 else content
            done.append(made.__name__)
        change = ", ".join(done)
    kind = "video" if form in VIDEOS else "image"
    return Case(number, kind, form, change, content)


# ------------------------------------------------------------------ the server


def tree(pid: int) -> list[int]:
    """Return a process and all below it, without those that still share their parent's memory."""
    found = [pid]
    for at in found:
        with contextlib.suppress(OSError):
            own = Path(f"/proc/{at}/cmdline").read_bytes()
            for task in Path(f"/proc/{at}/task").iterdir():
                children = [int(child) for child in (task / "children").read_text().split()]
                found += [
                    one for one in children if Path(f"/proc/{one}/cmdline").read_bytes() != own
                ]
    return found


def resident(pid: int) -> int:
    """Return the memory of a process and all below it that nobody else has, in bytes."""
    total = 0
    for one in tree(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages, shared = Path(f"/proc/{one}/statm").read_text().split()[1:3]
            total += (int(pages) - int(shared)) * os.sysconf("SC_PAGESIZE")
    return total


class Watch:
    """Samples a server's memory every 10 ms, and asks for its health every 50 ms.

    Args:
        url: The server.
        pid: Its process.

    Attributes:
        idle: Memory before the first case, in bytes.
        peak: Most memory since `reset`, in bytes.
        most: Most memory since the start, in bytes.
        slowest: Longest answer of /health, in seconds.
        failed: What went wrong with /health.
    """

    def __init__(self, url: str, pid: int) -> None:
        self.idle = self.peak = self.most = resident(pid)
        self.slowest = 0.0
        self.failed: str | None = None
        self._url, self._pid = url, pid
        self._over = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._memory, self._health)]
        for thread in self._threads:
            thread.start()

    def reset(self) -> None:
        self.peak = 0

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _memory(self) -> None:
        while not self._over.wait(0.01):
            now = resident(self._pid)
            self.peak, self.most = max(self.peak, now), max(self.most, now)

    def _health(self) -> None:
        with httpx.Client(timeout=30, trust_env=False) as client:
            while not self._over.wait(0.05):
                began = time.monotonic()
                try:
                    status = client.get(f"{self._url}/health").status_code
                except httpx.HTTPError as error:
                    status = repr(error)
                self.slowest = max(self.slowest, time.monotonic() - began)
                if status != 200:
                    self.failed = f"/health answered {status}"


@dataclass
class Row:
    """Results of the cases of one change.

    Attributes:
        outcomes: Number of cases by outcome.
        slowest: Longest case, in seconds, and its number.
        largest: Most memory above idle, in bytes, and the number of its case.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, int] = (0.0, -1)
    largest: tuple[int, int] = (0, -1)

    def add(self, other: Row) -> None:
        """Take the results of other cases in."""
        self.outcomes += other.outcomes
        self.slowest = max(self.slowest, other.slowest)
        self.largest = max(self.largest, other.largest)


def outcome(response: httpx.Response) -> str:
    """Return what became of a case, or raise AssertionError."""
    body = response.json()
    if response.status_code == 200:
        assert body["choices"][0]["message"] is not None
        return "answered"
    error = body["error"]
    assert response.status_code == 400, f"status {response.status_code}: {error}"
    said = error["message"]
    assert 10 < len(said) < 400 and "\n" not in said and "Traceback" not in said, said
    return f"refused: {error['code']}"


def body_of(case: Case) -> bytes:
    """Return a chat request with a case."""
    part = {"type": f"{case.kind}_url", f"{case.kind}_url": {"url": case.url()}}
    content = [{"type": "text", "text": "What is this?"}, part]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return json.dumps(body).encode()


def ask(client: httpx.Client, body: bytes) -> httpx.Response:
    """Send a chat request."""
    headers = {"content-type": "application/json"}
    return client.post("/v1/chat/completions", content=body, headers=headers)


def run(seed: int, numbers: list[int], rows: dict[str, Row]) -> tuple[Watch, list[str]]:
    """Send cases to a server, one after another; return the watch and what failed."""
    from tests.e2e.valora_serve.serving import Process  # imports torch

    failures = []
    with tempfile.TemporaryDirectory() as folder:
        # A small cache: its pages count as memory when they are first used.
        process = Process("--pages", 400, "--image-cache-bytes", 10**6, cwd=folder).ready()
        client = httpx.Client(base_url=process.url, timeout=60, trust_env=False)
        for form, content in images() + videos():  # the server is warm, and its files are sound
            kind = "video" if form in VIDEOS else "image"
            answer = ask(client, body_of(Case(-1, kind, form, "", content)))
            assert answer.status_code == 200, f"{form}: {answer.text}"
        time.sleep(0.5)
        watch = Watch(process.url, process.process.pid)
        began = time.monotonic()
        try:
            for done, number in enumerate(numbers):
                case = make_case(seed, number)
                wrong = send(client, case, watch, rows.setdefault(case.change, Row()))
                if process.process.poll() is not None:
                    wrong = f"the server ended with {process.process.returncode}"
                if wrong:
                    failures.append(report(seed, case, wrong))
                    print(failures[-1], file=sys.stderr, flush=True)
                if process.process.poll() is not None:
                    break
                if (done + 1) % 200 == 0:
                    print(
                        f"{done + 1} cases in {time.monotonic() - began:.0f} s, at most "
                        f"{(watch.most - watch.idle) / 2**20:.0f} MiB above idle",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
            if watch.failed:
                failures.append(watch.failed)
        finally:
            watch.end()
            client.close()
            process.end()
        if watch.slowest > HEALTH_SECONDS:
            failures.append(f"/health took {watch.slowest:.2f} s")
    return watch, failures


def send(client: httpx.Client, case: Case, watch: Watch, row: Row) -> str | None:
    """Send a case and note the result; return what is wrong with it."""
    body = body_of(case)  # the client's own time does not count
    watch.reset()
    began = time.monotonic()
    try:
        found = outcome(ask(client, body))
    except (AssertionError, httpx.HTTPError, ValueError, KeyError) as error:
        row.outcomes["wrong"] += 1
        return f"{type(error).__name__}: {error}"
    seconds, above = time.monotonic() - began, watch.peak - watch.idle
    row.outcomes[found] += 1
    row.slowest = max(row.slowest, (seconds, case.number))
    row.largest = max(row.largest, (above, case.number))
    if seconds > SECONDS:
        return f"took {seconds:.1f} s"
    if above > BYTES:
        return f"took {above / 2**20:.0f} MiB above idle"
    return None


def report(seed: int, case: Case, wrong: str) -> str:
    """Write the file of a failed case, and return how to repeat it."""
    file = Path(tempfile.gettempdir()) / f"valora-fuzz-{seed}-{case.number}.{case.form}"
    file.write_bytes(case.content)
    return (
        f"case {case.number} ({case.form}, {case.change}, {len(case.content)} bytes): {wrong}\n"
        f"  the file is {file}; again: python -m tests.fuzz media --seed {seed} "
        f"--only {case.number}"
    )


def table(rows: dict[str, Row]) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        "| change | cases | answered | refused | slowest, s | most above idle, MiB |",
        "|---|---|---|---|---|---|",
    ]
    whole = Row()
    single = {name for change in rows for name in change.split(", ")}
    for name in [*sorted(single), ""]:
        chosen = [row for change, row in rows.items() if not name or name in change.split(", ")]
        whole = Row()
        for row in chosen:
            whole.add(row)
        refused = sum(n for said, n in whole.outcomes.items() if said.startswith("refused"))
        lines.append(
            f"| {name or 'all'} | {whole.outcomes.total()} | {whole.outcomes['answered']} | "
            f"{refused} | {whole.slowest[0]:.2f} | {whole.largest[0] / 2**20:.0f} |"
        )
    return "\n".join(lines)


def _alone(seed: int, numbers: list[int]) -> tuple[dict[str, Row], int, float, list[str]]:
    """Send cases from a process of their own.

    Returns:
        The rows, most memory above idle in bytes, the slowest /health in seconds, and failures.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_summary, (seed, numbers))


def _summary(seed: int, numbers: list[int]) -> tuple[dict[str, Row], int, float, list[str]]:
    rows: dict[str, Row] = {}
    watch, failures = run(seed, numbers, rows)
    return rows, watch.most - watch.idle, watch.slowest, failures


def main(arguments: list[str]) -> int:
    """Send mutated images and videos to a server; print a table of the outcomes."""
    made = argparse.ArgumentParser("python -m tests.fuzz media", description=__doc__)
    made.add_argument("--cases", type=int, default=5000, help="number of cases")
    made.add_argument("--seed", type=int, default=0, help="seed that the cases are made from")
    made.add_argument("--only", type=int, nargs="*", help="send these cases only")
    made.add_argument(
        "--processes", type=int, default=1,
        help="number of servers that share the cases, each with its own client and limit",
    )  # fmt: skip
    found = made.parse_args(arguments)
    numbers = found.only or list(range(found.cases))
    shares = [numbers[start :: found.processes] for start in range(found.processes)]
    with ThreadPoolExecutor(found.processes) as threads:
        parts = list(threads.map(lambda share: _alone(found.seed, share), filter(None, shares)))
    rows: dict[str, Row] = {}
    failures = []
    for part, _, _, failed in parts:
        failures += failed
        for change, row in part.items():
            rows.setdefault(change, Row()).add(row)
    print(table(rows))
    above, slowest = max(part[1] for part in parts), max(part[2] for part in parts)
    print(
        f"\nMost memory above idle: {above / 2**20:.0f} MiB; slowest /health: {slowest:.3f} s; "
        f"{len(failures)} failures."
    )
    for failure in failures:
        print(failure)
    return int(bool(failures))
