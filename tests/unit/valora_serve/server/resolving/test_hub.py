"""Adapters of a Hugging Face hub, played by a server on this machine."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
from huggingface_hub.hf_api import HfApi

from valora_serve.errors import AdapterError
from valora_serve.server.resolving.base import CONFIG, FILES, LABELS, PICKLE, WEIGHTS
from valora_serve.server.resolving.cache import AdapterCache
from valora_serve.server.resolving.hub import HubResolver

COMMIT = hashlib.sha1(b"first").hexdigest()
HELD = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": b"w" * 3000}


class Hub(ThreadingHTTPServer):
    """A hub with the public repository acme/cars, a gated and a private one."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.read = []  # paths that were asked for
        self.sizes = {name: len(content) for name, content in HELD.items()}  # that it claims


class Answer(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.read.append(self.path)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/acme/gated"):
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path == "/api/models/acme/private":
            self.reply(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path == "/api/models/acme/denied":
            self.reply(403, b"{}")
        elif path == "/api/models/acme/cars":
            files = [{"rfilename": n, "size": s} for n, s in self.server.sizes.items()]
            files.append({"rfilename": "training_args.bin", "size": 10**9})
            body = {"id": "acme/cars", "modelId": "acme/cars", "sha": COMMIT, "siblings": files}
            self.reply(200, json.dumps(body).encode())
        elif path.startswith(f"/acme/cars/resolve/{COMMIT}/"):
            self.reply(200, HELD[path.rpartition("/")[2]])
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def reply(self, status, body, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE",
        url + "/{repo_id}/resolve/{revision}/{filename}",
    )  # fmt: skip
    api = HfApi.__init__
    monkeypatch.setattr(HfApi, "__init__", lambda self: api(self, endpoint=url))
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def cache(tmp_path):
    made = AdapterCache(tmp_path / "cache", 10_000, 5000, lambda _: False)
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
    files = [path for path in hub.read if "/resolve/" in path]
    assert files == [f"/acme/cars/resolve/{COMMIT}/{file}" for file in FILES]


def test_what_is_absent_and_what_is_denied(hub):
    resolver = HubResolver("hf", "acme")
    assert resolver.find("nothing") is None
    assert resolver.find("private") is None  # the hub does not say which it is
    for name in ("gated", "denied"):
        with pytest.raises(PermissionError):
            resolver.find(name)
    del hub.sizes[WEIGHTS]
    assert resolver.find("cars") is None
    hub.sizes[PICKLE] = 3000
    with pytest.raises(AdapterError, match="a pickle, which can run code"):
        resolver.find("cars")


def test_offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="offline"):
        HubResolver("hf", "acme").find("cars")
