"""``/v1/examples``: what is listed, what is sent, and what is not."""

import json
from dataclasses import replace

import pytest

from tests.support.fake_engine import PERSON, SCENE, FakeEngine
from tests.support.http_helpers import encoded, picture, serving

PNG = encoded(picture(40, 20))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("bundle")
    (tmp_path / "golden").mkdir()
    for name in ("person-0", "scene-0", "scene-0-1"):
        (tmp_path / "golden" / f"{name}.png").write_bytes(PNG)
    (tmp_path / "weights.safetensors").write_bytes(b"secret")
    examples = [
        {"domain": "person", "image": "golden/person-0.png", "expected": [],
         "teacher": [{"label": "person", "box": [1, 2.5, 30, 18], "confidence": 0.75}]},
        {"domain": "scene", "image": "golden/scene-0.png", "rest": ["golden/scene-0-1.png"],
         "media": "video", "question": "what?", "expected": "street",
         "teacher": {"label": "beach", "confidence": 0.625}},
        {"domain": "person", "image": "weights.safetensors", "expected": []},
        {"domain": "other", "image": "golden/person-0.png", "expected": []},
    ]  # fmt: skip
    (tmp_path / "golden" / "golden.json").write_text(json.dumps(examples))
    domains = {name: {} for name in ("person", "scene", "other")}
    (tmp_path / "bundle.json").write_text(json.dumps({"domains": domains}))
    engine = FakeEngine()
    engine._served |= {m.name: replace(m, root=str(tmp_path)) for m in (PERSON, SCENE)}
    with serving(engine) as running:
        running.folder = tmp_path
        yield running


def test_examples_of_served_domains_are_listed_with_their_images(server):
    found = server.client.get("/v1/examples").json()["data"]
    assert [(entry["domain"], entry["number"], entry["video"]) for entry in found] == [
        ("person", 0, False), ("person", 1, False), ("scene", 0, True),
    ]  # fmt: skip
    assert found[2]["question"] == "what?"
    assert found[2]["images"] == ["v1/examples/scene/0/0", "v1/examples/scene/0/1"]
    answer = server.client.get("/" + found[2]["images"][1])
    assert (answer.content, answer.headers["content-type"]) == (PNG, "image/png")
    assert str(server.folder) not in json.dumps(found)


@pytest.mark.parametrize("path", ["person/1/0", "person/0/1", "person/9/0", "cow/0/0"])
def test_nothing_else_is_sent(server, path):
    answer = server.client.get(f"/v1/examples/{path}")
    assert answer.status_code == 404
    assert b"secret" not in answer.content


def test_a_folder_that_is_gone_has_no_examples(server):  # the last one, as it stays so
    (server.folder / "golden" / "golden.json").write_text("{")
    assert server.client.get("/v1/examples").json()["data"] == []
