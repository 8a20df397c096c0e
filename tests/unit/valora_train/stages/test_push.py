"""`command=push`: what is uploaded, and hubs that refuse it."""

import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml

from valora_data.contract.bundle import read_bundle
from valora_data.errors import ValoraError
from valora_serve.demo.command import BUNDLES
from valora_train.reporting.cards import with_metadata
from valora_train.settings import PushSettings, Settings
from valora_train.stages.push import push as push_bundle


def test_a_bundle_arrives_whole_with_its_results(tmp_path, monkeypatch):
    made = {}

    def upload(api, *, folder_path, **asked):
        made.update(asked)
        shutil.copytree(folder_path, tmp_path / "fetched")
        return SimpleNamespace(commit_url="https://hub/me/pets/commit/1")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda _, *at, **to: made.update(to))
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    asked = PushSettings("me/pets", str(BUNDLES / "detection"))
    assert push_bundle(Settings(push=asked)) == "https://hub/me/pets/commit/1"
    assert (made["repo_id"], made["private"], made["revision"]) == ("me/pets", True, None)
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


class Refusing(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b'{"error": "Invalid username or password."}')


def refused(said, *asked):
    with pytest.raises(ValoraError, match=said):
        push_bundle(Settings(push=PushSettings(*asked)))


def test_mistakes_and_hubs_that_refuse_or_are_away_are_sentences(monkeypatch):
    mine = "me/pets", str(BUNDLES / "detection")
    refused("set push.repo=owner/name")
    refused("is no bundle", "me/pets", "none")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{hub.server_address[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        refused(r"a/b/c \(HFValidationError: ", "a/b/c", mine[1])
        refused(r"\(HfHubHTTPError: .*Invalid username or password", *mine)
        hub.shutdown()
    refused(r"\(ConnectError: \[Errno 111\] Connection refused\)", *mine)


def test_the_card_keeps_its_text_and_gets_one_front():
    manifest = read_bundle(BUNDLES / "detection").manifest
    card = with_metadata("---\nold: 1\n---\n# A\n\n---\nline\n", manifest)
    assert card.count("model-index") == 1 and "old: 1" not in card
    assert card.endswith("---\n# A\n\n---\nline\n")
    assert with_metadata(card, manifest) == card
