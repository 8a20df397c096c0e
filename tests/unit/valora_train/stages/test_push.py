"""`command=push` against a stand-in of a hub, over HTTP on this machine."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import yaml

from valora_data.contract.bundle import read_bundle
from valora_data.errors import ValoraError
from valora_serve.demo.command import BUNDLES
from valora_train.reporting.cards import with_metadata
from valora_train.settings import PushSettings, Settings, TaskSettings
from valora_train.stages.push import push as push_bundle

TOKEN = "hf_of_the_test"


class Hub(ThreadingHTTPServer):
    """What huggingface_hub asks of a hub to make a repository and to commit a folder."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked, self.made = {}, [], {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def _send(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.server.asked.append(self.path)
        self._send(200, {"sha": "0" * 40, "id": "me/pets", "siblings": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(self.path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            self.server.made |= json.loads(body)
            self._send(200, {"url": f"{self.server.url}/me/pets", "id": "me/pets"})
        elif "/preupload/" in self.path:
            mode = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            files = [mode | {"path": file["path"]} for file in json.loads(body)["files"]]
            self._send(200, {"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            url = f"{self.server.url}/me/pets/commit/{'1' * 40}"
            self._send(200, {"commitUrl": url, "commitOid": "1" * 40, "hookOutput": ""})
        else:
            self._send(200, {"isValid": True})


@pytest.fixture
def hub():
    running = Hub()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture
def settings(hub, tmp_path, monkeypatch):
    """Settings of a push, and the environment that a user would set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundles").symlink_to(BUNDLES)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    return Settings(push=PushSettings("me/pets"), task=TaskSettings(name="detection"))


def test_a_bundle_arrives_whole_with_its_results(hub, settings, tmp_path):
    assert push_bundle(settings) == f"{hub.url}/me/pets/commit/{'1' * 40}"
    assert hub.made["name"] == "pets"
    for name, content in hub.files.items():
        file = tmp_path / "fetched" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    fetched = read_bundle(tmp_path / "fetched")  # every file has its hash
    assert fetched.domains == read_bundle(BUNDLES / "detection").domains
    data = yaml.safe_load((tmp_path / "fetched" / "README.md").read_text().split("---\n")[1])
    assert (data["base_model"], data["pipeline_tag"]) == ("tiny", "object-detection")
    [index] = data["model-index"]
    results = {entry["task"]["name"]: entry for entry in index["results"]}
    assert set(results) == set(fetched.domains)
    for name, facts in fetched.domains.items():
        figures = {item["name"]: item["value"] for item in results[name]["metrics"]}
        assert figures["f1@0.5"] == pytest.approx(facts["accuracy"]["test"], abs=1e-4)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (PushSettings(), "set push.repo=owner/name"),
        (PushSettings("a/b/c", bundle=str(BUNDLES / "detection")), r"a/b/c \(HFValidationError: "),
        (PushSettings("me/pets", bundle="none"), "is no bundle"),
    ],
)
def test_mistakes_are_sentences(asked, said):
    with pytest.raises(ValoraError, match=said):
        push_bundle(Settings(push=asked))


def test_a_hub_that_refuses_or_is_away_is_a_sentence(hub, settings, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(ValoraError, match=r"\(HfHubHTTPError: Invalid username or password.\)"):
        push_bundle(settings)
    assert hub.files == {}
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValoraError, match=r"\(ConnectError: \[Errno 111\] Connection refused\)"):
        push_bundle(settings)


def test_the_card_keeps_its_text_and_gets_one_front():
    manifest = read_bundle(BUNDLES / "detection").manifest
    card = with_metadata("---\nold: 1\n---\n# A\n\n---\nline\n", manifest)
    assert card.count("model-index") == 1
    assert "old: 1" not in card
    assert card.endswith("---\n# A\n\n---\nline\n")
    assert with_metadata(card, manifest) == card
