"""What an operator has named is not taken by adapters that requests load, whoever came first."""

import asyncio
import contextlib

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import adapter, bundle, serving
from valora_serve.server.loading import startup
from valora_serve.server.loading.served_set import ServedSet

SECRET = "an-admin-key-of-32-characters-ok"
NAMES = ("car", "bus", "cars", "cars/1", "mine", "rules")
"""What the source has: names of a bundle with its domains, of an adapter, and of a context."""


@pytest.fixture
def place(tmp_path):
    bundle(tmp_path / "adapters" / "b", ("car", "bus"))
    adapter(tmp_path / "adapters" / "own")
    for name in (*NAMES, "free", "Car", "CARS/9", "Tiny", "Person"):
        adapter(tmp_path / "store" / name)
    return tmp_path


@contextlib.contextmanager
def started(place, *bundles):
    """A server that restores what an earlier one has recorded."""
    engine = FakeEngine()
    served = ServedSet(engine, place / "adapters", place / "state.json")

    async def warm_up():
        pass

    load = startup.load_all(engine, bundles, served, warm_up=warm_up, replay=False)
    asyncio.run(load)
    served._lock = asyncio.Lock()  # of the server's event loop
    chosen = {
        "adapter_sources": (str(place / "store"),), "adapter_allow": ("*",),
        "adapter_cache": str(place / "cache"), "allow_runtime_loading": True, "api_key": SECRET,
        "adapter_folder": str(place / "adapters"),
    }  # fmt: skip
    with serving(engine, served=served, **chosen) as server:
        server.client.headers["authorization"] = f"Bearer {SECRET}"
        yield server


def post(server, path, status=200, **body):
    answer = server.client.post(f"/v1/{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def ask(server, name):
    body = {"model": name, "prompt": "x", "max_tokens": 1}
    return server.client.post("/v1/completions", json=body).status_code


def asked(server, *names):
    return {name: ask(server, name) for name in names}


def kinds(server):
    listed = server.client.get("/v1/models").json()["data"]
    return {one["id"]: (one["kind"], one["resolver"]) for one in listed}


LOADS = {
    "bundle": ("load_bundle", {"bundle_path": "b"}, ("car", "bus")),
    "adapter": (
        "load_lora_adapter", {"lora_name": "mine", "lora_path": "own", "load_inplace": True},
        ("mine",),
    ),
    "context": ("contexts", {"name": "rules", "document": "no dogs", "replace": True}, ("rules",)),
}  # fmt: skip


def unload(server, what):
    if what == "context":
        return server.client.delete("/v1/contexts/rules").raise_for_status()
    if what == "adapter":
        return post(server, "unload_lora_adapter", lora_name="mine")
    return post(server, "unload_bundle", bundle_name="cars")


@pytest.mark.parametrize("what", LOADS)
def test_what_an_operator_loads_replaces_what_requests_loaded(place, what):
    path, body, names = LOADS[what]
    with started(place) as server:
        assert set(asked(server, *names, "free").values()) == {200}
        assert all(kinds(server)[name] == ("adapter", "file") for name in names)
        post(server, path, **body)
        now = kinds(server)
        assert all(now[name][1] is None for name in names), now
        assert now["free"] == ("adapter", "file")
        assert set(asked(server, *names, "free").values()) == {200}
        unload(server, what)
        assert set(asked(server, *names).values()) == {404}
        post(server, path, **body)
        assert set(asked(server, *names).values()) == {200}
