"""`command=push` against a stand-in of a hub, over HTTP on this machine."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from valora_data.contract.bundle import read_bundle
from valora_data.errors import ValoraError
from valora_serve.demo.command import BUNDLES
from valora_train.reporting.cards import with_metadata
from valora_train.settings import PushSettings, Settings
from valora_train.stages.push import push as push_bundle

ROOT = Path(__file__).parents[4]
ROOTS = os.pathsep.join(str(ROOT / part) for part in ("", "data", "kernels", "teachers"))
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


def push(tmp_path, *arguments, url, token=TOKEN):
    settings = {
        "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": token, "PYTHONPATH": ROOTS, "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "valora_train.cli", "command=push", *arguments],
        cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_bundle_arrives_whole_with_its_results(hub, tmp_path):
    (tmp_path / "bundles").symlink_to(BUNDLES)
    done = push(tmp_path, "push.repo=me/pets", url=hub.url)
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/me/pets/commit/" in done.stdout.replace("\n", "")
    assert hub.made["name"] == "pets"
    for name, content in hub.files.items():
        file = tmp_path / "fetched" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    fetched = read_bundle(tmp_path / "fetched")  # every file has its hash
    assert fetched.domains == read_bundle(BUNDLES / "detection").domains
    data = yaml.safe_load((tmp_path / "fetched" / "README.md").read_text().split("---\n")[1])
    assert data["base_model"] == "tiny"
    assert data["pipeline_tag"] == "object-detection"
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


def test_a_hub_that_refuses_or_is_away_is_a_sentence(hub, tmp_path):
    (tmp_path / "bundles").symlink_to(BUNDLES)
    for more, said in (
        ({"token": "wrong"}, "(HfHubHTTPError: Invalid username or password.)"),
        ({"url": "http://127.0.0.1:9"}, "(ConnectError: [Errno 111] Connection refused)"),
    ):
        done = push(tmp_path, "push.repo=me/pets", **({"url": hub.url} | more))
        assert done.returncode == 1, done.stdout
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert hub.files == {}


def test_the_card_keeps_its_text_and_gets_one_front():
    manifest = read_bundle(BUNDLES / "detection").manifest
    card = with_metadata("---\nold: 1\n---\n# A\n\n---\nline\n", manifest)
    assert card.count("model-index") == 1
    assert "old: 1" not in card
    assert card.endswith("---\n# A\n\n---\nline\n")
    assert with_metadata(card, manifest) == card
