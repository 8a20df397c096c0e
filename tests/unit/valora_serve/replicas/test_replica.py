"""Replicas: who may ask them, and that all of them serve the same, whichever is told."""

import asyncio
import json
import shutil

import httpx
import pytest
import ray

from tests.support.http_helpers import adapter, bundle
from tests.support.replicas import Ref, Running, awaited, running
from valora_serve.errors import AdapterError
from valora_serve.replicas.board import PERIOD
from valora_serve.server.loading.state_file import (
    SavedState,
    StateFile,
    check_content,
    content_hash,
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "get", Ref.get)
    adapter(tmp_path / "adapters" / "good")
    adapter(tmp_path / "adapters" / "other")
    bundle(tmp_path / "adapters" / "cars")
    bundle(tmp_path / "given", ("truck",))
    return tmp_path


@awaited
async def test_a_replica_answers_fronts_only_and_sees_their_clients(place):
    async with running(place, "x") as (_, one), httpx.AsyncClient(base_url=one._url) as client:
        for secret in (None, "wrong", one.front()["x-valora-front"][1:]):
            headers = {} if secret is None else {"x-valora-front": secret}
            assert (await client.get("/ready", headers=headers)).status_code == 403
        body = {"model": "person", "prompt": "x", "max_tokens": 1}
        got = await client.post("/v1/completions", json=body, headers=one.front())
        told = [1, {"key": "api_key", "model": "person"}]
        assert json.loads(got.headers["x-valora-front"]) == told
        one.engine.healthy = False
        failed = await client.get("/ready", headers=one.front())
        assert json.loads(failed.headers["x-valora-front"])[0] > 1e6, "fronts ask another one"


@awaited
async def test_what_one_replica_loads_all_of_them_serve(place):
    async with running(place, "x", "y") as (board, one, two):
        assert one.names() == two.names() == {"truck"}
        await one.post("load_lora_adapter", lora_name="mine", lora_path="good")
        assert one.names() == two.names() == {"truck", "mine"}
        await two.post("load_lora_adapter", 409, lora_name="mine", lora_path="other")
        await two.post("load_bundle", bundle_path="cars")
        await two.post("contexts", name="rules", document="no dogs")
        assert one.names() == two.names() == {"mine", "car", "rules"}, "it replaced the given"
        await one.post("load_lora_adapter", lora_name="mine", lora_path="other", load_inplace=True)
        roots = [{m.name: m.root for m in r.engine.models()}["mine"] for r in (one, two)]
        assert [root.rpartition("/")[2] for root in roots] == ["other", "other"]
        await two.post("unload_lora_adapter", lora_name="mine")
        await one.post("unload_bundle", bundle_name="cars")
        assert one.names() == two.names() == {"rules"}
        assert one.served_set.state == two.served_set.state == board.state()
        assert StateFile(place / "state.json").read() == board.state()
        # What the board told before such a change is not served any more.
        before, current = SavedState(), one.served_set.state
        assert not await one.served_set.follow(before, before)
        assert await one.served_set.follow(before, current)
        assert await one.served_set.follow(current, before)
        # One that starts later has the same.
        late = Running("late", place, board)
        await late.start()
        assert late.names() == {"rules"}
        await late.stop()


@pytest.mark.parametrize("kind", ["adapter", "bundle"])
@pytest.mark.parametrize("error", [AdapterError, RuntimeError])
@awaited
async def test_what_one_replica_refuses_none_of_them_serves(place, kind, error):
    path, body = {
        "adapter": ("load_lora_adapter", {"lora_name": "mine", "lora_path": "good"}),
        "bundle": ("load_bundle", {"bundle_path": "cars"}),
    }[kind]
    async with running(place, "x", "y", "z") as (board, one, two, three):
        await one.post("load_lora_adapter", lora_name="old", lora_path="other")

        async def refuse(*_, **__):
            raise error("no memory is left")

        load = three.engine.load

        async def slow(*given, **also):  # longer than between two reports
            await asyncio.sleep(1.5 * PERIOD)
            return await load(*given, **also)

        two.engine.load, three.engine.load = refuse, slow
        before = board.state()
        said = (await one.post(path, 400, **body)).json()["error"]["message"]
        assert said == "no memory is left"
        assert one.names() == two.names() == three.names() == {"truck", "old"}
        assert board.state() == before == StateFile(place / "state.json").read()
        # Others die, and what is left goes on.
        for gone in (two, three):
            await gone.stop()
            board.leave(gone.name)
        await one.post(path, **body)
        assert one.names() == {"old"} | ({"truck", "mine"} if kind == "adapter" else {"car"})


@awaited
async def test_a_state_that_cannot_be_recorded_is_taken_back_everywhere(place):
    async with running(place, "x", "y") as (board, one, two):

        def full(_):
            raise OSError(28, "No space left on device")

        board._file.draft = full
        said = await one.post("load_lora_adapter", 507, lora_name="mine", lora_path="good")
        assert "nothing was changed" in said.text
        assert one.names() == two.names() == {"truck"}


def test_content_that_differs_between_machines_is_named(place):
    for kind, name in (("adapter", "good"), ("bundle", "cars")):
        folder = place / "adapters" / name
        sha256 = content_hash(kind, folder)
        check_content(kind, folder, sha256)
        file = next(folder.glob("*.json"))
        file.write_text(file.read_text() + " ")
        with pytest.raises(AdapterError, match="is not the one that other machines have"):
            check_content(kind, folder, sha256)
        shutil.rmtree(folder)
        with pytest.raises(AdapterError, match="put it at the same path on every machine"):
            check_content(kind, folder, sha256)
