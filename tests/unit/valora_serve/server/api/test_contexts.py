"""``/v1/contexts``: who may, what is refused, what is remembered; and questions about contexts."""

import asyncio
import contextlib
import errno

import pytest

from tests.support.disk_faults import failing
from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import ADMIN, adapter, loading, refused, serving, until
from valora_serve.errors import StorageError
from valora_serve.server.loading.served_set import ServedSet
from valora_serve.server.loading.state_file import StateFile
from valora_serve.types import NewContext

HEADERS = {"authorization": f"Bearer {ADMIN}"}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "adapters").mkdir()
    return tmp_path


@contextlib.contextmanager
def opened(given, engine=None, served=None):
    with serving(engine, served=served, **given) as server:
        server.client.headers.update(HEADERS)
        yield server


def test_a_document_becomes_a_context_that_can_be_asked(place):
    with opened(loading(place)) as server:
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
    with opened(loading(place)) as server:
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


def test_only_admins_make_contexts_and_only_if_that_is_allowed(place):
    body = {"name": "a", "document": "x"}
    with serving(**loading(place)) as server:
        assert server.client.post("/v1/contexts", json=body).status_code == 401
    with opened({"api_key": ADMIN}) as server:
        found = server.client.post("/v1/contexts", json=body)
        assert found.status_code == 403 and "--allow-runtime-loading" in found.text
        assert server.client.get("/v1/contexts").status_code == 200


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
            await served.load_found(name, folder)
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
        await served.load_found("cats", state["cats"])  # a request named it
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
    with opened(given) as server:
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
    with opened(given, engine, served) as server:
        until(lambda: {"cats", "rules"} <= {model.name for model in engine.models()})
        listed = server.client.get("/v1/contexts").json()["data"]
        assert [one["id"] for one in listed] == ["rules"]


def test_a_context_that_cannot_be_recorded_is_not_served(place):
    engine = FakeEngine()
    served = served_set(place, engine)
    asyncio.run(served.make_context(NewContext("one", "First."), replace=False))
    before = {model.name: model for model in engine.models()}

    async def refused():
        full = OSError(errno.ENOSPC, "No space left on device")
        for at in range(5):
            with failing(place / "state", at, full), pytest.raises(StorageError, match="nothing"):
                await served.make_context(NewContext("one", "Second text."), replace=True)
        with failing(place / "state", 1, full), pytest.raises(StorageError, match="nothing"):
            await served.forget_context("one")

    asyncio.run(refused())
    assert {model.name: model for model in engine.models()} == before
    assert len(list((place / "adapters/contexts").iterdir())) == 1
