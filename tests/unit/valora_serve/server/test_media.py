"""What is read of images and videos, and what is refused, whatever the sender tries."""

import asyncio
import base64
import contextlib
import http.server
import io
import os
import struct
import tarfile
import threading
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support.http_helpers import data_url, encoded, picture
from tests.support.videos import video_file
from valora_serve.errors import ImageError, OverloadedError
from valora_serve.server.media import MediaReader, decode_image, decode_video, is_public
from valora_serve.server.settings import ServerSettings


def read(url, kind="image", **settings):
    async def once():
        reader = MediaReader(ServerSettings(**settings))
        try:
            with reader.pixels() as pixels:
                return await getattr(reader, kind)(url, pixels)
        finally:
            await reader.close()

    return asyncio.run(once())


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


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,raw", "data:image/png;base64,@@@@", "data:image/png;base64,AAA",
        "data:;base64", "data:", "ftp://host/a.png", "javascript:alert(1)", "//host/a.png",
        "gopher://host", "/etc/passwd", "a.png", "\0", "data:image/png;base64,\ud800",
    ],
)  # fmt: skip
def test_other_urls_are_refused(url):
    with pytest.raises(ImageError):
        read(url)


def test_encoded_size_is_limited():
    content = encoded(
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (99, 99, 3), np.uint8))
    )
    assert read(data_url(content), max_image_bytes=len(content)).size == (99, 99)
    with pytest.raises(ImageError, match="larger than"):
        read(data_url(content), max_image_bytes=len(content) - 1)


def test_pixels_of_a_request_and_of_all_are_bounded():
    """Many small files that are large images are a bomb, too."""

    async def once():
        settings = ServerSettings(max_request_pixels=3 * 10**6, max_held_pixels=4 * 10**6)
        reader = MediaReader(settings)
        content = encoded(Image.new("L", (1000, 1000)))
        assert len(content) < 5000
        with reader.pixels() as first:
            for _ in range(3):
                await reader.decode_image(content, first)
            with pytest.raises(ImageError, match="together"):
                await reader.decode_image(content, first)
            with reader.pixels() as second:
                await reader.decode_image(content, second)
                with pytest.raises(OverloadedError, match="other requests"):
                    await reader.decode_image(content, second)
        with reader.pixels() as third:
            for _ in range(3):
                await reader.decode_image(content, third)
        with pytest.raises(ImageError, match="over"):
            third.take(1)  # a thread that comes too late takes nothing
        assert reader._held == 0
        await reader.close()

    asyncio.run(once())


# Local files


@pytest.fixture
def folder(tmp_path):
    allowed = tmp_path / "allowed"
    (allowed / "sub").mkdir(parents=True)
    (allowed / "sub" / "a.png").write_bytes(encoded(picture()))
    (allowed / "inner.png").symlink_to(allowed / "sub" / "a.png")
    secret = tmp_path / "secret.png"
    secret.write_bytes(encoded(picture()))
    (allowed / "leak.png").symlink_to(secret)
    (allowed / "out").symlink_to(tmp_path)
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "allowed-too" / "a.png").write_bytes(encoded(picture()))
    os.mkfifo(allowed / "pipe.png")
    return allowed


def test_files_below_the_folder_are_read(folder):
    for url in (f"file://{folder}/sub/a.png", f"file://localhost{folder}/sub/a.png",
                f"file://{folder}/sub/../sub/a%2Epng", f"file://{folder}/inner.png"):  # fmt: skip
        assert read(url, media_folder=str(folder)).size == (40, 20)


@pytest.mark.parametrize(
    "path",
    [
        "/leak.png", "/out/secret.png", "/../secret.png", "/%2e%2e/secret.png", "/pipe.png", "/sub",
        "", "/nothing.png", "/../allowed-too/a.png", "/sub/a.png%00.jpg",
        "/./../../../../../etc/passwd",
    ],
)  # fmt: skip
def test_nothing_else_is(folder, path):
    with pytest.raises(ImageError, match="no file below"):
        read(f"file://{folder}{path}", media_folder=str(folder))


def test_no_files_unless_a_folder_is_named(folder):
    with pytest.raises(ImageError, match="media_folder"):
        read(f"file://{folder}/sub/a.png")
    with pytest.raises(ImageError, match="no file below"):
        read(f"file://otherhost{folder}/sub/a.png", media_folder=str(folder))
    with pytest.raises(ImageError, match="larger"):
        read(f"file://{folder}/sub/a.png", media_folder=str(folder), max_image_bytes=10)


# Remote hosts


class Site(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    seen = []  # noqa: RUF012

    def do_GET(self):
        self.seen.append((self.path, dict(self.headers)))
        port = self.server.server_port
        content = encoded(picture())
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", base64.urlsafe_b64decode(self.path[4:]).decode())
            self.end_headers()
        elif self.path == "/loop":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{port}/loop")
            self.end_headers()
        elif self.path == "/nowhere":
            self.send_response(302)
            self.end_headers()
        elif self.path == "/a.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x" * 65536)
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            self.server.wait.wait(5)
        else:
            self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    server.wait = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.wait.set()
    server.shutdown()


def redirect(site, to):
    return f"{site}/to/{base64.urlsafe_b64encode(to.encode()).decode()}"


OPEN = {"media_hosts": ("localhost",), "media_private": True}


def test_allowed_hosts_are_fetched_from(site):
    assert read(f"{site}/a.png", **OPEN).size == (40, 20)
    assert read(redirect(site, f"{site}/a.png"), **OPEN).size == (40, 20)
    assert read(redirect(site, "/a.png"), **OPEN).size == (40, 20)


def test_no_host_is_unless_named(site):
    Site.seen.clear()
    for settings in ({}, {"media_hosts": ("example.org",)}, {"media_hosts": ("local",)}):
        with pytest.raises(ImageError, match="may not fetch"):
            read(f"{site}/a.png", **settings)
    assert Site.seen == []


def test_private_addresses_are_not_reached_through_an_allowed_name(site):
    Site.seen.clear()
    with pytest.raises(ImageError, match="private address"):
        read(f"{site}/a.png", media_hosts=("localhost",))
    assert Site.seen == []


def test_the_address_that_was_checked_is_the_one_connected_to(site, monkeypatch):
    """A name that points to a public address first and to a private one later (rebinding)."""
    answers = iter(["93.184.216.34", "127.0.0.1", "127.0.0.1"])
    asked, connected = [], []

    async def resolve(self, host, port, **_):
        asked.append(host)
        return [(2, 1, 6, "", (next(answers), port))]

    async def connect(self, host, port, *_, **__):
        connected.append(host)
        raise OSError("not really")

    import httpcore

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    with pytest.raises(ImageError, match="cannot be fetched"):
        read("http://rebind.example/a.png", media_hosts=("rebind.example",))
    assert connected == ["93.184.216.34"]
    assert asked == ["rebind.example"]


def test_one_private_address_among_public_ones_is_enough_to_refuse(monkeypatch):
    async def resolve(self, host, port, **_):
        return [(2, 1, 6, "", ("93.184.216.34", port)), (2, 1, 6, "", ("10.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    with pytest.raises(ImageError, match="private"):
        read("http://mixed.example/", media_hosts=("mixed.example",))


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("http://127.0.0.1:1/a.png", "may not fetch"),
        ("http://169.254.169.254/latest/meta-data", "may not fetch"),
        ("http://evil.example/a.png", "may not fetch"),
        ("file:///etc/passwd", "http"),
        ("gopher://localhost/", "http"),
        ("http://user:secret@localhost/", "user"),
        ("//evil.example/", "may not fetch"),
    ],
)
def test_redirects_are_checked_like_the_first_address(site, to, said):
    with pytest.raises(ImageError, match=said):
        read(redirect(site, to), **OPEN)


@pytest.mark.parametrize("path", ["/loop", "/nowhere", "/missing"])
def test_answers_that_lead_nowhere(site, path):
    with pytest.raises(ImageError, match="host"):
        read(f"{site}{path}", **OPEN)


def test_size_and_time_of_fetching_are_limited(site):
    with pytest.raises(ImageError, match="larger"):
        read(f"{site}/endless", **OPEN, max_image_bytes=100_000)
    with pytest.raises(ImageError, match="longer than"):
        read(f"{site}/slow", **OPEN, media_seconds=0.3)


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost@evil.example/", "http://localhost.evil.example/", "http://localhost\t.x/",
        "http://[::1]/", "http://0x7f000001/", "http://2130706433/", "http://127.1/", "http:///x",
        "http://", "http://[bad", "http://localhost:99999/", "http://localhost%00.evil/",
        "http://LOCALHOST.:1/a", "https://localhost:1/",
    ],
)  # fmt: skip
def test_odd_urls(url):
    with pytest.raises(ImageError):
        read(url, media_hosts=("localhost",))


def test_no_key_or_cookie_is_sent(site):
    Site.seen.clear()
    read(f"{site}/a.png", **OPEN)
    assert set(Site.seen[0][1]) == {"Host", "User-Agent", "Accept"}


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("172.16.0.1", False), ("192.168.0.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False),
        ("::1", False), ("::", False), ("fe80::1%eth0", False), ("fd00::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:8.8.8.8", True), ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True), ("2002:7f00:1::", False), ("ff02::1", False),
    ],
)  # fmt: skip
def test_public_addresses(address, public):
    assert is_public(address) is public


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


def test_frames_in_one_data_url():
    frames = [encoded(picture(16, 12, (n, n, n)), "JPEG", quality=95) for n in (10, 90)]
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(f).decode() for f in frames)
    found = read(url, "video")
    assert [frame.getpixel((8, 6))[0] for frame in found] == pytest.approx([10, 90], abs=3)
    with pytest.raises(ImageError, match="frames"):
        read(url, "video", max_video_frames=1)


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
