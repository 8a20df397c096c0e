"""Which images and videos are decoded, and which are refused."""

import contextlib
import io
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support.http_helpers import data_url, encoded, picture
from tests.support.http_helpers import read_media as read
from tests.support.videos import video_file
from valora_serve.errors import ImageError
from valora_serve.server.media.decode import decode_image, decode_video

# Images


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_formats(form):
    image = read(data_url(encoded(picture(), form)))
    assert (image.size, image.mode) == ((40, 20), "RGB")
    assert np.allclose(np.asarray(image)[10, 10], (200, 30, 60), atol=6)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_modes_become_rgb(mode):
    form = "JPEG" if mode == "CMYK" else "PNG"
    source = Image.new("I;16", (8, 6)) if mode == "I;16" else picture(8, 6).convert(mode)
    assert read(data_url(encoded(source, form))).mode == "RGB"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    source = picture()
    exif = source.getexif()
    exif[0x0112] = orientation
    content = encoded(source, "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert np.array_equal(np.asarray(read(data_url(content))), np.asarray(expected.convert("RGB")))


def png_bomb(width, height):
    """A PNG of a few hundred bytes that says it has so many pixels."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * 200_000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(50_000, 50_000), (2**31 - 1, 2**31 - 1), (7000, 7000)])
def test_decompression_bombs_are_refused_by_their_header(size):
    content = png_bomb(*size)
    assert len(content) < 1000
    with pytest.raises(ImageError, match=r"pixels|damaged"):
        read(data_url(content))


def test_text_and_profile_bombs_in_a_png():
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for _ in range(3):
        info.add_text("Comment", "a" * 2**24, zip=True)
    with pytest.raises(ImageError):
        read(data_url(encoded(picture(), "PNG", pnginfo=info)))


def archive(kind):
    buffer = io.BytesIO()
    content = encoded(picture())
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("a.png", content)
    else:
        with tarfile.open(fileobj=buffer, mode="w") as file:
            entry = tarfile.TarInfo("../a.png")
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"x", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.4", archive("zip"),
        archive("tar"), encoded(picture())[:60], encoded(picture(400, 400), "JPEG")[:50],
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", encoded(picture(), "TIFF"),
        encoded(picture(), "ICO"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused(content):
    with pytest.raises(ImageError):
        read(data_url(content))


# Videos


@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv", "avi"])
def test_videos_of_common_containers(tmp_path, suffix):
    content = video_file(tmp_path / f"a.{suffix}", count=12).read_bytes()
    frames = decode_video(content, 10**7, 60.0, 4)
    assert [frame.size for frame in frames] == [(64, 48)] * 4
    # (i + ½)/4 of 12 frames: 1.5, 4.5, 7.5, 10.5.
    levels = [frame.getpixel((30, 20))[0] for frame in frames]
    assert levels == pytest.approx([10, 40, 70, 100], abs=4)


def test_a_webm(tmp_path):
    content = video_file(tmp_path / "a.webm", codec="libvpx", count=4).read_bytes()
    assert len(decode_video(content, 10**7, 60.0, 2)) == 2


def test_fewer_frames_than_wanted_are_repeated(tmp_path):
    content = video_file(tmp_path / "a.mp4", count=2).read_bytes()
    levels = [f.getpixel((9, 9))[0] for f in decode_video(content, 10**7, 60.0, 4)]
    assert levels == pytest.approx([0, 0, 10, 10], abs=4)


def test_video_limits(tmp_path):
    content = video_file(tmp_path / "a.mp4", count=20, rate=10).read_bytes()
    with pytest.raises(ImageError, match="pixels"):
        decode_video(content, 64 * 48 - 1, 60.0, 4)
    with pytest.raises(ImageError, match="longer than"):
        decode_video(content, 10**7, 1.0, 4)
    with pytest.raises(ImageError, match="larger than"):
        read(data_url(content, "video/mp4"), "video", max_video_bytes=1000)
    with pytest.raises(ImageError, match="too long to decode"):
        decode_video(content, 10**7, 60.0, 4, within=-1.0)
    with pytest.raises(ImageError, match="together"):
        read(data_url(content, "video/mp4"), "video", max_request_pixels=64 * 48 * 7)


def test_what_is_no_video_is_refused(tmp_path):
    good = video_file(tmp_path / "a.mp4").read_bytes()
    playlist = (
        b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:10.0,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    )
    concat = b"ffconcat version 1.0\nfile '/etc/passwd'\n"
    for content in (
        b"", playlist, concat, encoded(picture()), good[:100], b"\0\0\0\x18ftyp" + b"\0" * 500,
        b"\x1aE\xdf\xa3" + b"\xff" * 300, archive("zip"), b"RIFF\0\0\0\0AVI " + b"\0" * 99,
    ):  # fmt: skip
        with pytest.raises(ImageError):
            decode_video(content, 10**7, 60.0, 4)


def test_random_damage_never_raises_anything_else(tmp_path):
    rng = np.random.default_rng(0)
    video = bytearray(video_file(tmp_path / "a.mp4", count=6).read_bytes())
    image = bytearray(encoded(picture(64, 64), "JPEG"))
    for _ in range(60):
        broken_video, broken_image = bytearray(video), bytearray(image)
        for broken in (broken_video, broken_image):
            for place in rng.integers(0, len(broken), 8):
                broken[place] = rng.integers(0, 256)
        with contextlib.suppress(ImageError):
            decode_video(bytes(broken_video), 10**6, 60.0, 3)
        with contextlib.suppress(ImageError):
            decode_image(bytes(broken_image), 10**6)
