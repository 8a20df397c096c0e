"""Which URLs are fetched, and which are refused."""

import asyncio
import base64
import itertools
import os
import threading
from urllib.parse import quote

import httpcore
import pytest

from tests.support.http_helpers import PNG, PNG_URL
from tests.support.http_helpers import read_media as read
from tests.support.website import Website
from valora_serve.errors import ImageError
from valora_serve.server.media.fetch import is_public

B64 = PNG_URL.partition(",")[2]


@pytest.mark.parametrize(
    "url",
    [
        f"DATA:IMAGE/PNG;BASE64,{B64}", f"data:;base64,{B64}", f" \n data: a/b; base64, {B64}",
        f'data:image/png;name="ä b.png";charset=utf-8;base64,{B64}',
        f"data:image/png;base64,{B64.rstrip('=')}", "data:image/png;base64," + quote(B64, safe=""),
        f"data:image/png;base64,{B64[:50]}\r\n{B64[50:70]}\t{B64[70:]}\n",
        f"data:image/png;base64,{B64[:50]}%0d%0A{B64[50:]}".replace("=", "%3d"),
        "data:image/png;base64," + B64.translate(str.maketrans("+/", "-_")).rstrip("="),
    ],
)  # fmt: skip
def test_base64_as_clients_write_it(url):
    assert read(url).size == (40, 20)


# Local files


@pytest.fixture
def folder(tmp_path):
    allowed = tmp_path / "allowed"
    (allowed / "sub").mkdir(parents=True)
    (tmp_path / "allowed-too").mkdir()
    for file in ("allowed/sub/a.png", "allowed-too/a.png", "secret.png"):
        (tmp_path / file).write_bytes(PNG)
    (allowed / "inner.png").symlink_to(allowed / "sub" / "a.png")
    (allowed / "leak.png").symlink_to(tmp_path / "secret.png")
    (allowed / "out").symlink_to(tmp_path)
    os.mkfifo(allowed / "pipe.png")
    return allowed


def test_only_files_below_the_folder_are_read(folder):
    named = str(folder)
    for url in (f"file://{folder}/sub/a.png", f"file://localhost{folder}/sub/a.png",
                f"file://{folder}/sub/../sub/a%2Epng", f"file://{folder}/inner.png"):  # fmt: skip
        assert read(url, media_folder=named).size == (40, 20)
    for path in (
        "/leak.png", "/out/secret.png", "/../secret.png", "/%2e%2e/secret.png", "/pipe.png", "/sub",
        "", "/nothing.png", "/../allowed-too/a.png", "/sub/a.png%00.jpg",
        "/./../../../../../etc/passwd",
    ):  # fmt: skip
        with pytest.raises(ImageError, match="no file below"):
            read(f"file://{folder}{path}", media_folder=named)
    for host, limits, said in (
        ("otherhost", {"media_folder": named}, "no file below"),
        ("", {}, "media_folder"),
        ("", {"media_folder": named, "max_image_bytes": 10}, "larger"),
    ):
        with pytest.raises(ImageError, match=said):
            read(f"file://{host}{folder}/sub/a.png", **limits)


# Remote hosts


class Site(Website):
    """Answers by path."""

    end = threading.Event()

    def answer(self, path, body):
        to = {"/loop": "/loop", "/nowhere": None}
        if path.startswith("/to/"):
            to[path] = base64.urlsafe_b64decode(path[4:]).decode("latin-1")
        if path in to:  # headers in Latin-1
            return 302, {"X-Other": "ä"} | ({"Location": to[path]} if to[path] else {}), ()
        if path == "/slow":
            self.end.wait(5)
        pieces = [PNG] if "a.png" in path else ()
        pieces = itertools.repeat(b"x" * 65536) if path == "/endless" else pieces
        return 404 if path == "/missing" else 200, {}, pieces


@pytest.fixture(scope="module")
def website():
    with Site() as server:
        yield server
        server.end.set()


@pytest.fixture
def site(website):
    """Its address; only what the test asks is seen."""
    website.seen.clear()
    return website.url.replace("127.0.0.1", "localhost")


def redirect(site, to):
    to = to if isinstance(to, bytes) else to.encode()
    return f"{site}/to/{base64.urlsafe_b64encode(to).decode()}"


OPEN = {"media_hosts": ("localhost",), "media_private": True}


URLS = [
    ("{}/ä a.png", "/%C3%A4%20a.png"), ("{}/%c3%a4a.png#frägment", "/%c3%a4a.png"),
    ("{}/a.png?q=ü&x=%zz", "/a.png?q=%C3%BC&x=%zz"), (" {}/a.png\n", "/a.png"),
    ("{}/a.png\\b", "/a.png\\b"), ("{}?a.png", "/?a.png"),
    ("{}/\u200ba.png", "/%E2%80%8Ba.png"),
]  # fmt: skip
REDIRECTS = [
    ("/ä a.png", "/%C3%A4%20a.png"), ("../a.png", "/a.png"),
    ("http:///a.png", "/a.png"), ("/a.png", "/a.png"), ("{}/a.png", "/a.png"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("url", "asked", "way"), [(*one, 0) for one in URLS] + [(*one, 1) for one in REDIRECTS]
)
def test_what_urls_and_redirects_ask_for(website, site, url, asked, way):
    url = url.format(site)
    assert read(redirect(site, url) if way else url, **OPEN).size == (40, 20)
    assert website.seen[way][0] == asked


def test_hosts_are_named_in_either_form(monkeypatch):
    asked = []

    async def resolve(self, host, port, **_):
        asked.append(host)
        raise OSError

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    names = ("bücher.example", "xn--mnchen-3ya.example")
    for url in ("BÜCHER.example/", "xn--bcher-kva.example./", "münchen.example"):
        with pytest.raises(ImageError, match="cannot be fetched"):
            read(f"http://{url}", media_hosts=names)
    assert asked == ["xn--bcher-kva.example", "xn--bcher-kva.example.", "xn--mnchen-3ya.example"]
    for name in ("images.example:80", "http://images.example", "*.example", "*", "a b", ""):
        with pytest.raises(ImageError, match="media_hosts"):
            read("data:,", media_hosts=(name,))


@pytest.mark.parametrize(
    ("hosts", "said"),
    [((), "may not fetch"), (("example.org",), "may not fetch"), (("local",), "may not fetch"),
     (("localhost",), "private address")],
)  # fmt: skip
def test_only_public_addresses_of_named_hosts_are_reached(website, site, hosts, said):
    with pytest.raises(ImageError, match=said):
        read(f"{site}/a.png", media_hosts=hosts)
    assert website.seen == []


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch):
    """A name that points to a public address first and to a private one later (rebinding)."""
    answers = iter([["93.184.216.34"], ["93.184.216.34", "10.0.0.1"]])
    connected = []

    async def resolve(self, host, port, **_):
        return [(2, 1, 6, "", (address, port)) for address in next(answers)]

    async def connect(self, host, port, *_, **__):
        connected.append(host)
        raise OSError("not really")

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    for said in ("cannot be fetched", "private"):  # one private address is enough to refuse
        with pytest.raises(ImageError, match=said):
            read("http://rebind.example/a.png", media_hosts=("rebind.example",))
    assert connected == ["93.184.216.34"]


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("http://127.0.0.1:1/a.png", "may not fetch"),
        ("http://169.254.169.254/latest/meta-data", "may not fetch"),
        ("http://evil.example/a.png", "may not fetch"), ("file:///etc/passwd", "http"),
        ("gopher://localhost/", "http"), ("http://user:secret@localhost/", "user"),
        ("//evil.example/", "may not fetch"), ("http://ä.example/", "may not fetch"),
        (b"http://\xff\xfe.example/", "not valid"), ("data:image/png;base64,AAAA", "http"),
        ("/" + "a" * 70_000, "too long"), ("http://localhost:99999/a.png", "port"),
        ("http://localhost:-1/a.png", "port"), ("http://[bad", "may not fetch"),
    ],
)  # fmt: skip
def test_redirects_are_checked_like_the_first_address(site, to, said):
    with pytest.raises(ImageError, match=said):
        read(redirect(site, to), **OPEN)


@pytest.mark.parametrize(
    ("path", "limits", "said"),
    [
        ("/loop", {}, "host"), ("/nowhere", {}, "host"), ("/missing", {}, "host"),
        ("/endless", {"max_image_bytes": 100_000}, "larger"),
        ("/slow", {"media_seconds": 0.3}, "longer than"),
    ],
)  # fmt: skip
def test_answers_that_are_no_image_in_time(site, path, limits, said):
    with pytest.raises(ImageError, match=said):
        read(f"{site}{path}", **OPEN, **limits)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,raw", "data:image/png;base64,@@@@", "data:image/png;base64,AAA",
        "data:;base64", "data:", "ftp://host/a.png", "javascript:alert(1)", "//host/a.png",
        "gopher://host", "/etc/passwd", "a.png", "\0", "data:image/png;base64,\ud800",
        "data:image/png;base64,é", "data:image/png;base64,AA%", "data:image/png;base64,AA==\nAAAA",
        "data:image/png;base64,AA%zz",
        "data:image/png;base64,AA=A", "data:base64,AAAA", "data:image/png;base64;x=1,AAAA",
        "file://[bad/a.png", "file://ℂ℀/a.png", "file://\ud800/a.png", "file:",
        "http://localhost@evil.example/", "http://localhost.evil.example/", "http://localhost\t.x/",
        "http://[::1]/", "http://0x7f000001/", "http://2130706433/", "http://127.1/", "http:///x",
        "http://", "http://[bad", "http://localhost:99999/", "http://localhost%00.evil/",
        "http://LOCALHOST.:1/a", "https://localhost:1/", "http://localhost:1/\ud800",
        "http://\ud800/", "http://b\u00ad.example/", "http://localhost:٣x/", "http://localhost:-1/",
        "http://[fe80::1%25eth0]/", "http://[v1.x]/", "http:\\\\localhost\\", "http:localhost",
        "http://localhost\\@evil.example/", "http://localhost:1/\0", "http://localhost:1/\r\nX: y",
        "http://" + "ä" * 100 + ".example/", "http://localhost/" + "a" * 70_000, "http://xn--a/",
    ],
)  # fmt: skip
def test_odd_urls(url, tmp_path):
    with pytest.raises(ImageError):
        read(url, media_hosts=("localhost",), media_folder=str(tmp_path))


def test_no_key_or_cookie_is_sent(website, site):
    read(f"{site}/a.png", **OPEN)
    assert set(website.seen[0][1]) == {"Host", "User-Agent", "Accept"}


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("172.16.0.1", False), ("192.168.0.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False),
        ("::1", False), ("::", False), ("fe80::1%eth0", False), ("fd00::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:8.8.8.8", True), ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True), ("2002:7f00:1::", False), ("ff02::1", False), ("fec0::", False),
    ],
)  # fmt: skip
def test_public_addresses(address, public):
    assert is_public(address) is public
