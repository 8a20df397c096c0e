"""What is served: the list of models; contexts, who may make them and what is kept; examples."""

import asyncio
import json
import threading
from dataclasses import replace

import pytest

from tests.support.fake_engine import PERSON, SCENE, FakeEngine
from tests.support.http_helpers import ADMIN, PNG, adapter, entry, loading, refused, serving, until
from valora_serve.server.api import models
from valora_serve.server.loading.served_set import ServedSet
from valora_serve.server.loading.state_file import StateFile
from valora_serve.server.telemetry.metrics import adapter_states
from valora_serve.types import NewContext


def test_models_list_says_what_is_known(client):
    listed = {model.id: model for model in client.models.list()}
    assert next(iter(listed)) == "tiny"
    person = listed["person"]
    assert (person.parent, person.root, person.task) == ("adapter-1", "bundles/d", "detection")
    assert (person.labels, person.accuracy, person.metric) == (["person"], 0.87, "f1@0.5")
    assert (person.head, person.rank, person.max_model_len) == ("detection", 8, 2048)
    assert listed["adapter-1"].parent == "tiny"
    assert client.models.retrieve("scene").labels == ["street", "beach"]


def test_the_list_of_models_is_made_off_the_event_loop(monkeypatch):
    """There may be thousands of adapters."""
    threads = set()

    def told(*found):
        threads.add(threading.current_thread().name)
        return adapter_states(*found)

    monkeypatch.setattr(models, "adapter_states", told)
    with serving() as server:
        found = server.client.get("/v1/models").json()
        assert [one["id"] for one in found["data"]] == [one.name for one in server.engine.models()]
        assert found["object"] == "list"
        assert server.client.get("/v1/models/tiny").json() == found["data"][0]
        assert server.service.model("person") is server.engine._served["person"]  # loads copy none
    assert any(name.startswith("work") for name in threads)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "adapters").mkdir()
    return tmp_path


def test_a_document_becomes_a_context_that_can_be_asked(place):
    with serving(key=ADMIN, **loading(place)) as server:
        client, body = server.client, {"name": "rules", "document": "No dogs after eight."}
        made = client.post("/v1/contexts", json=body).json()
        facts = {"id": "rules", "form": "prefix", "tokens": 4, "bytes": 64, "source_tokens": 4}
        assert facts.items() <= made.items()
        model = client.get("/v1/models/rules").json()
        assert (model["form"], model["memory_tokens"], model["source_tokens"]) == ("prefix", 4, 4)
        question = {"model": "rules", "messages": [{"role": "user", "content": "When?"}]}
        plain = client.post("/v1/chat/completions", json=question).json()
        assert plain["valora"]["warnings"] == []
        assert "When?" in str(server.engine.asked[-1].messages)
        question["messages"].insert(0, {"role": "system", "content": "Be kind."})
        warned = client.post("/v1/chat/completions", json=question).json()
        assert "ignored the system prompt" in warned["valora"]["warnings"][0]
        assert [turn["role"] for turn in server.engine.asked[-1].messages] == ["user"]
        refused(client.post("/v1/contexts", json=body), 409, "set replace")
        more = body | {"document": "No dogs.", "replace": True}
        assert client.post("/v1/contexts", json=more).json()["source_tokens"] == 2
        assert len(list((place / "adapters/contexts").iterdir())) == 1
        gone = client.delete("/v1/contexts/rules")
        assert gone.json()["message"] == "context rules is no longer served"
        assert client.delete("/v1/contexts/rules").status_code == 404


def test_refusals_change_nothing(place):
    with serving(key=ADMIN, **loading(place)) as server:
        for body, status, message in (
            ({"name": "a", "document": " "}, 400, "the document is empty"),
            ({"name": "../a", "document": "x"}, 400, "name"),
            ({"name": "a", "document": "x", "form": "adapter"}, 400, "form"),
            ({"name": "a", "document": "x", "tokens": 0}, 400, "tokens"),
            ({"name": "person", "document": "x"}, 409, "name person is taken by a served domain"),
        ):
            refused(server.client.post("/v1/contexts", json=body), status, message)
        assert server.client.get("/v1/contexts").json()["data"] == []
    folder = place / "adapters/contexts"
    assert not folder.exists() or not list(folder.iterdir())


def served_set(place, engine=None):
    folder = place / "adapters"
    return ServedSet(engine or FakeEngine(), folder, StateFile(place / "state/served.json"))


def test_contexts_wait_for_the_adapters_that_answer(place):
    """Adapters that requests had loaded are not recorded, but contexts on them are."""
    state = {name: place / "adapters" / name for name in ("cats", "dogs")}
    for folder in state.values():
        adapter(folder)

    async def life():
        served = served_set(place)
        for name, folder in state.items():
            await served.load_found(entry(name, folder))
        for name in ("one", "two", "three", "four"):
            by = "cats" if name in ("one", "two") else "dogs"
            await served.make_context(NewContext(name, "Text.", adapter=by), replace=False)

    asyncio.run(life())

    async def again():
        engine = FakeEngine()
        served = served_set(place, engine)
        served.read()
        problems = await served.restore()
        assert [line.split()[1] for line in problems] == ["one", "two", "three", "four"]
        assert [*served.waiting] == ["cats", "dogs"]
        await served.forget_context("two")
        await served.load_found(entry("cats", state["cats"]))  # a request named it
        served_now = [{model.name for model in engine.models() if model.form}]
        await served.load_adapter("dogs", "dogs", replace=False)  # an administrator did
        served_now.append({model.name for model in engine.models() if model.form})
        return served_now, [*served.waiting]

    served_now, missing = asyncio.run(again())
    assert served_now == [{"one"}, {"one", "three", "four"}]
    assert missing == []


def test_a_start_fetches_the_adapters_that_contexts_wait_for(place):
    adapter(place / "store/cats")
    given = loading(place) | {
        "adapter_sources": (str(place / "store"),), "adapter_allow": ("c*",),
        "adapter_cache": str(place / "cache"),
    }  # fmt: skip
    with serving(key=ADMIN, **given) as server:
        asked = {"model": "cats", "prompt": "x", "max_tokens": 1}
        found = server.client.post("/v1/completions", json=asked)
        assert found.status_code == 200, found.text
        body = {"name": "rules", "document": "No cats.", "adapter": "cats"}
        made = server.client.post("/v1/contexts", json=body)
        assert made.status_code == 200, made.text
    engine = FakeEngine()
    served = served_set(place, engine)
    served.read()
    assert len(asyncio.run(served.restore())) == 1
    with serving(engine, served, key=ADMIN, **given) as server:
        until(lambda: {"cats", "rules"} <= {model.name for model in engine.models()})
        listed = server.client.get("/v1/contexts").json()["data"]
        assert [one["id"] for one in listed] == ["rules"]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
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
        {"domain": "a/b? 5%", "image": "golden/person-0.png", "expected": []},
    ]  # fmt: skip
    (tmp_path / "golden" / "golden.json").write_text(json.dumps(examples))
    domains = {name: {} for name in ("person", "scene", "other", "a/b? 5%")}
    (tmp_path / "bundle.json").write_text(json.dumps({"domains": domains}))
    engine = FakeEngine()
    served = (PERSON, SCENE, replace(PERSON, name="a/b? 5%"))
    engine._served |= {m.name: replace(m, root=str(tmp_path)) for m in served}
    with serving(engine) as running:
        running.folder = tmp_path
        yield running


def test_examples_of_served_domains_are_listed_with_their_images(shelf):
    found = shelf.client.get("/v1/examples").json()["data"]
    assert [(entry["domain"], entry["number"], entry["video"]) for entry in found] == [
        ("person", 0, False), ("person", 1, False), ("scene", 0, True), ("a/b? 5%", 0, False),
    ]  # fmt: skip
    assert found[2]["question"] == "what?"
    assert found[2]["images"] == ["v1/examples/scene/0/0", "v1/examples/scene/0/1"]
    for url in (found[2]["images"][1], *found[3]["images"]):
        answer = shelf.client.get(f"/{url}")
        assert (answer.content, answer.headers["content-type"]) == (PNG, "image/png")
    assert str(shelf.folder) not in json.dumps(found)


@pytest.mark.parametrize("path", ["person/1/0", "person/0/1", "person/9/0", "cow/0/0"])
def test_nothing_else_is_sent(shelf, path):
    answer = shelf.client.get(f"/v1/examples/{path}")
    assert answer.status_code == 404
    assert b"secret" not in answer.content


def test_a_folder_that_is_gone_has_no_examples(shelf):  # the last one, as it stays so
    (shelf.folder / "golden" / "golden.json").write_text("{")
    assert shelf.client.get("/v1/examples").json()["data"] == []
