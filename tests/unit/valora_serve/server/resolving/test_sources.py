"""Adapters of a web server with its faults, of other file systems, and of a Hugging Face hub."""

import hashlib
import itertools
import json
import logging
import threading

import fsspec
import huggingface_hub.constants
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import HfApi

from tests.support.http_helpers import adapter, refused, serving
from tests.support.website import Website
from tests.unit.valora_serve.server.resolving.test_on_request import ask, cards, settings
from valora_serve.errors import AdapterError, SettingsError
from valora_serve.server.resolving.cache import AdapterCache
from valora_serve.server.resolving.sources import (
    CONFIG,
    FILES,
    LABELS,
    PICKLE,
    WEIGHTS,
    FsspecResolver,
    HubResolver,
    is_denied,
)
from valora_serve.server.settings import ServerSettings

LARGE = 6 << 20
"""Bytes above fsspec's block, for which it asks for ranges."""


class Web(Website):
    """Serves a folder, without ranges; `status` other than 200 is the answer to everything.

    If `signed`, files are redirected to URLs that differ each time.
    """

    status, signed, hides, count = 200, False, False, itertools.count()

    def answer(self, path, body):
        place, _, signature = path.partition("?")
        file = self.folder / place[1:]
        if self.status != 200 or (self.hides and not file.is_file()):
            return max(self.status, 403), {}, ()
        if self.signed and not signature:
            return 302, {"location": f"{place}?signature={next(self.count)}"}, ()
        if not file.is_file():
            return 404, {}, ()
        content = file.read_bytes()
        return 200, {"content-length": len(content)}, [content]


@pytest.fixture
def web(tmp_path):
    adapter(tmp_path / "web" / "cars-1")
    adapter(tmp_path / "web" / "cars-2", size=LARGE)
    adapter(tmp_path / "second" / "cars-1")
    with Web() as server:
        server.folder = tmp_path / "web"
        yield server


def chosen(place, *sources):
    return settings(place, adapter_sources=sources, adapter_retry_seconds=0.0)


def test_a_server_without_ranges_that_redirects(tmp_path, web):
    web.signed = True
    with serving(**chosen(tmp_path, web.url)) as server:
        for name in ("cars-1", "cars-2"):
            answer = ask(server, name)
            assert answer.status_code == 200, answer.text
        held = (tmp_path / "cache").rglob(f"cars-2/{WEIGHTS}")
        assert [file.stat().st_size for file in held] == [LARGE]
        refused(ask(server, "cars-9"), 404, "no source of adapters has it")


def test_what_a_server_answers(tmp_path, web):
    with serving(**chosen(tmp_path, web.url)) as server:
        for status, told, words in (
            (401, 403, "may not read"), (403, 403, "may not read"),
            (500, 503, "cannot be read now"), (410, 404, "no source of adapters has it"),
        ):  # fmt: skip
            web.status = status
            refused(ask(server, "cars-1"), told, words)
        web.status, web.hides = 200, True
        assert ask(server, "cars-1").status_code == 200
        refused(ask(server, "cars-9"), 403, "may not read")


def test_no_other_source_answers_while_one_is_unreachable(tmp_path, web):
    """Its adapter of that name may be another one; what was fetched before is served."""
    with serving(**chosen(tmp_path, web.url)) as server:
        assert ask(server, "cars-1").status_code == 200
    web.server_close()
    with serving(**chosen(tmp_path, web.url, str(tmp_path / "second"))) as server:
        assert ask(server, "cars-1").status_code == 200
        assert cards(server)["cars-1"]["resolver"] == "http"
        refused(ask(server, "cars-2"), 503, "cannot be read now")
        assert "cars-2" not in cards(server)


def test_passwords_of_urls_are_written_nowhere(tmp_path, web, caplog):
    url = web.url.replace("//", "//somebody:s3cr3t@")
    with caplog.at_level(logging.DEBUG, "valora"), serving(**chosen(tmp_path, url)) as server:
        assert ask(server, "cars-1").status_code == 200
        web.status = 500
        said = ask(server, "cars-2").text
        assert "s3cr3t" not in said + json.dumps(cards(server))
    written = [file.read_text() for file in (tmp_path / "cache").rglob("*.json")]
    assert len(written) == 2
    assert "s3cr3t" not in "".join(written) + caplog.text
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


class Elsewhere(MemoryFileSystem):
    """Files of the memory file system under other URLs, with the faults of other services.

    As SFTP it says when a file was last read, and has one connection, for the thread that made it.
    """

    protocol = "sftp-like"
    made: list = []  # noqa: RUF012
    count = itertools.count()

    def __init__(self, **options):
        super().__init__(**options)
        self.owner = threading.get_ident()
        self.made.append(self.owner)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.partition("://")[2] or path)

    def info(self, path, **more):
        assert threading.get_ident() == self.owner
        return super().info(path, **more) | {"time": next(self.count)}


class Refusing(MemoryFileSystem):
    """Denies as Google Cloud Storage does."""

    protocol = "refusing"

    def info(self, path, **_):
        raise OSError(f"Forbidden: {path}")


class Unreachable(MemoryFileSystem):
    protocol = "unreachable"

    def __init__(self, *_, **__):
        raise ConnectionRefusedError(111, "Connection refused")


@pytest.fixture
def shelf():
    for kind in (Elsewhere, Refusing, Unreachable):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/shelf/cars-1/{CONFIG}", b'{"base_model_name_or_path": "tiny", "r": 8}')
    memory.pipe(f"/shelf/cars-1/{WEIGHTS}", b"\0" * 9)
    return memory


@pytest.mark.usefixtures("shelf")
def test_threads_have_own_connections_and_facts_that_change_by_themselves_make_no_version(tmp_path):
    Elsewhere.made.clear()
    with serving(**chosen(tmp_path, "sftp-like://shelf")) as server:
        assert ask(server, "cars-1").status_code == 200
    assert len(set(Elsewhere.made)) == 2


def test_the_version_changes_with_a_file(shelf):
    resolver = FsspecResolver("memory", "shelf")
    first = resolver.find("cars-1")
    assert resolver.find("cars-1") == first
    shelf.pipe(f"/shelf/cars-1/{WEIGHTS}", b"\1" * 9)
    second = resolver.find("cars-1")
    assert second.sizes == first.sizes
    assert second.version != first.version


@pytest.mark.usefixtures("shelf")
def test_denials_of_other_services(tmp_path):
    with serving(**chosen(tmp_path, "refusing://shelf")) as server:
        refused(ask(server, "cars-1"), 403, "give it the right to read")


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize(
    ("url", "words"),
    [("unreachable://u:s3cr3t@host/x", "cannot be opened .ConnectionRefusedError: .Errno 111"),
     ("ftp://127.0.0.1:1/x", "ftp:// cannot be opened")],
)  # fmt: skip
def test_hosts_that_do_not_answer_at_the_start(url, words):
    scheme, _, place = url.partition("://")
    with pytest.raises(SettingsError, match=words) as raised:
        FsspecResolver(scheme, place)
    assert "s3cr3t" not in str(raised.value)


COMMIT = hashlib.sha1(b"first").hexdigest()
HELD = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": b"w" * 3000}


class Hub(Website):
    """A hub with the public repository acme/cars, whose files have `sizes`, and with others."""

    def answer(self, path, body):
        files = [{"rfilename": name, "size": size} for name, size in self.sizes.items()]
        files.append({"rfilename": "training_args.bin", "size": 10**9})
        cars = {"id": "acme/cars", "modelId": "acme/cars", "sha": COMMIT, "siblings": files}
        status, held, code = {
            "/api/models/acme/gated": (403, b"{}", "GatedRepo"),
            "/api/models/acme/private": (401, b"{}", "RepoNotFound"),
            "/api/models/acme/denied": (403, b"{}", ""),
            "/api/models/acme/cars": (200, json.dumps(cars).encode(), ""),
            **{f"/acme/cars/resolve/{COMMIT}/{name}": (200, held, "")
               for name, held in HELD.items()},
        }.get(path.partition("?")[0], (404, b"{}", "RepoNotFound"))  # fmt: skip
        return status, {"X-Error-Code": code, "content-length": len(held)}, [held]


@pytest.fixture
def hub(monkeypatch):
    with Hub() as server:
        server.sizes = {name: len(content) for name, content in HELD.items()}
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for name, value in (("HF_HUB_OFFLINE", False), ("ENDPOINT", server.url),
                            ("HUGGINGFACE_CO_URL_TEMPLATE", template)):  # fmt: skip
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        api = HfApi.__init__
        monkeypatch.setattr(HfApi, "__init__", lambda self: api(self, endpoint=server.url))
        yield server


@pytest.fixture
def cache(tmp_path):
    settings = ServerSettings(adapter_cache=str(tmp_path), adapter_bytes=5000)
    made = AdapterCache(settings, lambda _: False)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("place", "name"), [("acme", "cars"), ("acme/", "cars"), ("", "acme/cars")]
)
def test_only_the_needed_files_of_the_found_commit_are_read(hub, cache, place, name):
    resolver = HubResolver("hf", place)
    found = resolver.find(name)
    assert found.version == COMMIT
    assert found.sizes == {CONFIG: 8, WEIGHTS: 3000}
    hub.sizes |= {LABELS: 5, PICKLE: 10**9, "checkpoint-5/config.json": 9}
    assert resolver.find(name).sizes == {CONFIG: 8, WEIGHTS: 3000, LABELS: 5}
    entry = cache.fetch(resolver, name, found, threading.Event())
    assert {f: (entry.folder / f).read_bytes() for f in FILES} == HELD
    files = [path for path, _ in hub.seen if "/resolve/" in path]
    assert files == [f"/acme/cars/resolve/{COMMIT}/{file}" for file in FILES]


def test_what_is_absent_and_what_is_denied(hub):
    resolver = HubResolver("hf", "acme")
    assert resolver.find("nothing") is None
    assert resolver.find("private") is None  # the hub does not say which it is
    for name in ("gated", "denied"):
        with pytest.raises(HfHubHTTPError) as caught:
            resolver.find(name)
        assert is_denied(caught.value)
    del hub.sizes[WEIGHTS]
    assert resolver.find("cars") is None
    hub.sizes[PICKLE] = 3000
    with pytest.raises(AdapterError, match="a pickle, which can run code"):
        resolver.find("cars")


def test_offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="offline"):
        HubResolver("hf", "acme").find("cars")
