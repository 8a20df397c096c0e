"""Which images and videos are decoded, and which are refused."""

import io
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.http_helpers import PNG, data_url, encoded, picture
from tests.support.http_helpers import read_media as read
from tests.support.media_files import images, png, scans, videos
from tests.support.videos import video_file
from valora_data.images import decode_image as trained_on
from valora_data.sources.formats.videos import read_frames
from valora_serve.errors import ImageError, ServeError
from valora_serve.server.media.decode import decode_video, measure_image, measure_video
from valora_serve.server.settings import ServerSettings

JPEG = b"\xff\xd8\xff"  # how a file begins
LIMITS = ServerSettings(max_image_pixels=10**7, max_video_seconds=60.0, video_frames=4)


def sampled(content, **limits):
    """Frames of a video, each as often as it is taken."""
    found = []
    for image, times in decode_video(io.BytesIO(content), replace(LIMITS, **limits)):
        found += [image] * times
    return found


# Images


def strips(mode, orientation):
    """A file whose pixels are sent in several strips."""
    noise = np.random.default_rng(0).integers(0, 256, (901, 1203, 4), np.uint8)
    source = Image.fromarray(noise, "RGBA").convert("RGB").convert(mode)
    exif = source.getexif()
    exif[0x0112] = orientation
    return encoded(source, "JPEG", exif=exif, progressive=True)


@pytest.mark.parametrize("number", range(len(images()) + 2))
def test_pixels_are_those_that_were_trained_on(number):
    """Formats, modes, palettes, interlacing, animations, profiles, EXIF, large files."""
    content = [*images(), (None, strips("RGB", 6)), (None, strips("CMYK", 7))][number][1]
    expected = trained_on(content)
    found = read(data_url(content))
    assert (found.mode, found.size) == ("RGB", expected.size)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((1, 39_999_999), "pixels"), ((39_999_999, 1), "pixels"), ((1, 4_000_000), "a side"),
        ((4_000_000, 1), "a side"), ((1, 16_384), "50 times"), ((16_384, 300), "50 times"),
        ((51, 1), "50 times"), ((50_000, 50_000), "pixels"), ((7000, 7000), "pixels"),
        ((2**31 - 1, 2**31 - 1), "pixels|damaged"), ((0, 5), "damaged"), ((5, 0), "damaged"),
        ((2**31, 1), "pixels|damaged"),
    ],
)  # fmt: skip
def test_sizes_are_refused_by_the_header(size, said):
    content = png(8, 8, 1)
    head = content[12:16] + struct.pack(">II", *size) + content[24:29]
    forged = content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]
    whole = 0 < max(size) < 10**6 and 0 < size[0] * size[1] < 10**7
    for sent in (forged, png(*size, 1)) if whole else (forged,):
        with pytest.raises(ImageError, match=said):
            read(data_url(sent))


def test_sizes_at_the_limits_are_read():
    for most in ((50, 1), (16_384, 328)):
        assert read(data_url(png(*most, 1))).size == most


MEASURE = """
import gc, json, re, sys
from pathlib import Path
from valora_serve.server.media.decode import ServerSettings, decode_image, measure_image
limits = ServerSettings(max_image_pixels=10**8, max_image_side=10**5, max_decode_bytes=2**40)
def memory(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
found = []
for file in sys.argv[1:]:
    with open(sys.argv[1], "rb") as opened:
        list(decode_image(opened, limits))  # libraries are loaded
    size, told = Path(file).stat().st_size, measure_image(open(file, "rb"), limits)[1]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = memory("VmRSS")
    with open(file, "rb") as opened:
        list(decode_image(opened, limits))
    found.append((told, memory("VmHWM") - before + size))
print(json.dumps(found))
"""


def test_memory_is_known_before_anything_is_decoded(tmp_path):
    """What is reserved is at least what decoding takes, as the system measures it."""
    noise = np.random.default_rng(0).integers(0, 256, (300, 250, 4), np.uint8)
    large = Image.fromarray(noise, "RGBA").resize((900, 1200))
    exif = large.getexif()
    exif[0x0112] = 6
    rgb, cmyk = large.convert("RGB"), large.convert("RGB").convert("CMYK")
    full = {"subsampling": 0, "quality": 90}
    cases = {
        "small.png": PNG,
        "a.png": encoded(large, compress_level=1, exif=exif), "b.png": png(1200, 900, 16, 6),
        "c.png": png(1200, 900, 1), "a.webp": encoded(large, "WEBP", method=0, exif=exif),
        "b.webp": encoded(rgb.resize((600, 500)), "WEBP", lossless=True, method=0),
        "a.jpg": encoded(rgb, "JPEG"), "b.jpg": encoded(rgb, "JPEG", progressive=True),
        "c.jpg": encoded(rgb, "JPEG", progressive=True, exif=exif, **full),
        "d.jpg": encoded(cmyk, "JPEG", progressive=True, exif=exif, quality=90),
        "e.jpg": scans(encoded(rgb.convert("L"), "JPEG", progressive=True), 20),
        "a.bmp": encoded(rgb, "BMP"), "a.gif": encoded(rgb.convert("L"), "GIF"),
    }  # fmt: skip
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, *(tmp_path / name for name in cases)],
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": str(2**18)
        },
        check=True, timeout=120, capture_output=True,
    )  # fmt: skip
    for name, (told, taken) in zip(cases, json.loads(ran.stdout), strict=True):
        assert taken <= told <= 10 * taken + 20 * 2**20, (name, told, taken)


def test_memory_beyond_the_limit_is_refused_before_anything_is_decoded():
    file = io.BytesIO(encoded(Image.new("RGB", (1000, 1000)), "JPEG", progressive=True))
    pixels, told = measure_image(file, LIMITS)
    assert pixels == 10**6
    assert measure_image(file, replace(LIMITS, max_decode_bytes=told)) == (pixels, told)
    with pytest.raises(ImageError, match="bytes to decode"):
        measure_image(file, replace(LIMITS, max_decode_bytes=told - 1))


def test_a_video_and_its_frames_share_the_memory(tmp_path):
    file = io.BytesIO(video_file(tmp_path / "a.mp4", size=(640, 480)).read_bytes())
    size = len(file.getvalue())
    assert measure_video(file, LIMITS) == (4 * 640 * 480, size + 64 * 640 * 480 + 2**25)
    frames = 4 * 4 * 640 * 480
    tight = replace(LIMITS, max_decode_bytes=frames + 10 * 2**20 + 16 * 640 * 480)
    assert measure_video(file, tight)[1] == tight.max_decode_bytes - frames
    with pytest.raises(ImageError, match="bytes to decode"):
        measure_video(file, replace(LIMITS, max_decode_bytes=frames))


def test_what_is_no_image_or_video_is_refused(tmp_path):
    good = video_file(tmp_path / "a.mp4").read_bytes()
    playlist = (
        b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:10.0,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    )
    concat = b"ffconcat version 1.0\nfile '/etc/passwd'\n"
    for content in (
        b"", b"x", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.4", b"PK\x03\x04",
        PNG[:60], encoded(picture(400, 400), "JPEG")[:50],
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", encoded(picture(), "TIFF"),
        encoded(picture(), "ICO"), playlist, concat, good[:100], b"\0\0\0\x18ftyp" + b"\0" * 500,
        b"\x1aE\xdf\xa3" + b"\xff" * 300, b"RIFF\0\0\0\0AVI " + b"\0" * 99,
    ):  # fmt: skip
        with pytest.raises(ImageError):
            read(data_url(content))
        with pytest.raises(ImageError):
            sampled(content)
    with pytest.raises(ImageError):
        sampled(PNG)


# Videos


def test_fewer_frames_than_wanted_are_repeated(tmp_path):
    content = video_file(tmp_path / "a.mp4", count=2).read_bytes()
    levels = [f.getpixel((9, 9))[0] for f in sampled(content)]
    assert levels == pytest.approx([0, 0, 10, 10], abs=4)


def test_video_limits(tmp_path):
    content = video_file(tmp_path / "a.mp4", count=20, rate=10).read_bytes()
    with pytest.raises(ImageError, match="pixels"):
        measure_video(io.BytesIO(content), replace(LIMITS, max_image_pixels=64 * 48 - 1))
    assert measure_video(io.BytesIO(content), replace(LIMITS, max_video_pixels=64 * 48 * 4))
    with pytest.raises(ImageError, match="4 frames of 64 x 48"):
        measure_video(io.BytesIO(content), replace(LIMITS, max_video_pixels=64 * 48 * 4 - 1))
    with pytest.raises(ImageError, match="longer than"):
        sampled(content, max_video_seconds=1.0)
    with pytest.raises(ImageError, match="larger than"):
        read(data_url(content, "video/mp4"), "video", max_video_bytes=1000)
    with pytest.raises(ImageError, match="together"):
        read(data_url(content, "video/mp4"), "video", max_request_pixels=64 * 48 * 7)


def test_a_decoder_of_videos_that_cannot_be_imported_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ServeError, match="Videos cannot be decoded here, as PyAV fails"):
        measure_video(io.BytesIO(b"\0\0\0\0ftyp"), LIMITS)


def turned(content):
    """A video in MP4 as a phone held upright writes it: its header turns it by 90 degrees."""
    at = content.index(b"tkhd") + 44  # of its matrix
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 48 << 16, 0, 1 << 30)
    return content[:at] + matrix + content[at + len(matrix) :]


@pytest.mark.parametrize("number", range(len(videos()) + 2))
def test_frames_are_those_that_were_trained_on(number, tmp_path):
    """Of every container and codec; of a phone; and of a clip that begins between key frames."""
    clip = video_file(tmp_path / "a.mkv", codec="libx264", count=30, gop=10, cut=3).read_bytes()
    suffix, content = [*videos(), ("mkv", clip), ("mp4", turned(videos()[0][1]))][number]
    found = read(data_url(content, f"video/{suffix}"), "video", video_frames=3)
    size = (64, 48) if number <= len(videos()) else (48, 64)
    assert [frame.size for frame in found] == [size] * 3
    assert [f.tobytes() for f in found] == [f.tobytes() for f in read_frames(content, 3)]


def test_a_video_is_decoded_in_one_thread(tmp_path):
    """On 32 cores the stacks of the threads went beyond the limit on memory."""
    content = video_file(tmp_path / "a.mp4", count=6).read_bytes()
    threads = Path("/proc/self/task")
    before = len(list(threads.iterdir()))
    for _ in decode_video(io.BytesIO(content), LIMITS):
        assert len(list(threads.iterdir())) == before


def test_a_video_whose_frames_change_their_size(tmp_path):
    """Motion JPEG: each frame has a header of its own."""
    small, content = (
        video_file(tmp_path / f"{side}.avi", codec="mjpeg", count=3, size=(side, side)).read_bytes()
        for side in (64, 640)
    )
    frame = small[small.index(JPEG) : small.index(b"\xff\xd9") + 2]
    second = [found.start() for found in re.finditer(JPEG, content)][1]
    content = content[:second] + frame + content[second + len(frame) :]
    assert [frame.size for frame in sampled(content, video_frames=3)] in (
        [(640, 640), (64, 64), (640, 640)], [(640, 640)] * 3, [(640, 640)] * 2,
    )  # fmt: skip
    with pytest.raises(ImageError, match="pixels"):
        measure_video(io.BytesIO(content), replace(LIMITS, max_image_pixels=64 * 64))
