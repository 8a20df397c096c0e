"""A request that names an adapter which is not loaded loads it, from wherever it is allowed to."""

import asyncio
import contextlib
import io
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import ADMIN, CHAT, PNG, adapter, chat, refused, serving, until
from valora_data.contract.files import UnreadableError
from valora_serve.errors import SettingsError
from valora_serve.server.resolving import sources
from valora_serve.server.resolving.on_request import OnRequest
from valora_serve.server.resolving.sources import CONFIG, FILES, WEIGHTS, Found, Resolver
from valora_serve.server.settings import ServerSettings
from valora_serve.types import ServedModel


@pytest.fixture
def place(tmp_path):
    for name in ("cars-1", "cars-2", "cars-3", "team/plates"):
        adapter(tmp_path / "store" / name)
    return tmp_path


def settings(place, **more):
    return {
        "adapter_sources": (str(place / "store"),), "adapter_allow": ("cars-*", "team/*"),
        "adapter_cache": str(place / "cache"), "state_file": str(place / "served.json"), **more,
    }  # fmt: skip


def slow(place, **more):
    """Settings of a server whose only source is `gated`."""
    return settings(place, adapter_sources=("gated://",), **more)


def ask(server, name, **more):
    body = {"model": name, "prompt": "x", "max_tokens": 1, **more}
    return server.client.post("/v1/completions", json=body)


def cards(server):
    return {card["id"]: card for card in server.client.get("/v1/models").json()["data"]}


def metric(server, name):
    lines = server.client.get("/metrics").text.splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(name)}


class Gated(Resolver):
    """Has every adapter; reading one waits until it is let through; notes the names."""

    def __init__(self, scheme="gated", place=""):
        super().__init__(scheme, place)
        self.gate, self.reading, self.found = threading.Event(), threading.Event(), []
        self.grow = self.fail = None
        self.sizes = dict.fromkeys(FILES)
        self.version = "1"

    def find(self, name):
        self.found.append(name)
        if self.fail is not None:
            raise self.fail
        return Found(self.version, self.sizes)

    @contextlib.contextmanager
    def open(self, name, file, found):
        self.reading.set()
        assert self.gate.wait(20)
        if self.grow:
            self.version = "2"
        yield io.BytesIO(b'{"r": 8}' if file == CONFIG else b"\0" * 8)


@pytest.fixture
def gated(monkeypatch):
    made = Gated()
    monkeypatch.setitem(sources.RESOLVERS._loaded, "gated", lambda *_: made)
    monkeypatch.setitem(sources.RESOLVERS._builtin, "gated", None)
    yield made
    made.gate.set()


def test_a_request_loads_what_it_names(place):
    with serving(**settings(place)) as server:
        assert ask(server, "cars-1").json()["model"] == "cars-1"
        answer = server.client.post(CHAT, json=chat(model="team/plates"))
        assert answer.json()["model"] == "team/plates"
        embedded = server.client.post("/v1/embeddings", json={"model": "cars-2", "input": "x"})
        assert embedded.status_code == 200
        found = cards(server)
        assert found["cars-1"]["resolver"] == "file"
        assert found["cars-1"]["state"] == "host"
        assert found["team/plates"]["root"] == "plates"
        assert found["tiny"]["state"] is None
        assert "cars-3" not in found
        ask(server, "cars-none")
        text = server.client.get("/metrics").text
        assert "cars-" not in text  # strangers make no labels
        assert 'model_name="other"' in text
        assert ask(server, "cars-3").status_code == 200  # a fifth one: each gave its place back


def test_what_is_not_loaded_is_refused_in_a_sentence(place, monkeypatch):
    def denied(*_, **__):
        raise UnreadableError("cannot be read") from PermissionError(13, "Permission denied")

    store = place / "store"
    adapter(store / "private")
    adapter(place / "outside")
    (store / "cars-link").symlink_to(place / "outside")
    (store / "cars-loop").symlink_to("cars-loop")
    adapter(store / "cars-large", size=5000)
    adapter(store / "cars-other", base="another")
    pickled = adapter(store / "cars-pickle")
    (pickled / WEIGHTS).rename(pickled / "adapter_model.bin")
    (store / "cars-none").mkdir()
    more = {"adapter_allow": ("cars-*",), "adapter_bytes": 4000, "adapter_cache_bytes": 9000}
    with serving(**settings(place, **more)) as server:
        for name, status, *words in (
            *((name, 404, "There is no model") for name in (
                "private", "../outside", "cars-/../../outside", "cars-1/", "cars-\n", "CARS-1")),
            ("cars-none", 404, f"({CONFIG} and {WEIGHTS}): put it there"),
            ("cars-9", 404, "no source of adapters has it"),
            ("cars-link", 400, "link that leads out"),
            ("cars-loop", 400, "link that leads to itself"),
            ("cars-large", 400, "5043 bytes", "--adapter-bytes"),
            ("cars-other", 400, "another, not for tiny"),
            ("cars-pickle", 400, "a pickle", "its save_pretrained writes"),
        ):  # fmt: skip
            code = refused(ask(server, name), status, *words)
            assert (code == "model_not_found") == (status == 404)
        assert not {"private", "cars-link", "cars-9", "cars-other"} & set(cards(server))
        found = metric(server, "valora_adapter_resolutions_total")
        assert found['valora_adapter_resolutions_total{resolver="file",result="refused"}'] == 5
        assert found['valora_adapter_resolutions_total{resolver="none",result="absent"}'] == 2
        assert not list((place / "cache").glob(".partial*"))
        monkeypatch.setattr("valora_serve.server.resolving.sources.open_regular", denied)
        refused(ask(server, "cars-1"), 403, "may not read adapter cars-1")


def test_links_of_a_hub_s_cache_are_followed(place):
    """They lead out of the source, to files of the same repository."""
    repository = place / "store" / "models--acme--cars"
    snapshot = adapter(repository / "snapshots" / "abc")
    (repository / "blobs").mkdir()
    for file in FILES:
        (snapshot / file).rename(repository / "blobs" / file)
        (snapshot / file).symlink_to(f"../../blobs/{file}")
    sources = (str(snapshot.parent),)
    with serving(**settings(place, adapter_sources=sources, adapter_allow=("*",))) as server:
        assert ask(server, "abc").json()["model"] == "abc"


def test_of_other_files_only_the_model_s_configuration_is_fetched(place):
    folder = place / "store" / "cars-1"
    for file in ("training_args.bin", "optimizer.pt", "adapter_model.bin", "tokenizer.json"):
        os.mkfifo(folder / file)  # whoever opened it would wait
    (folder / "checkpoint-5").mkdir()
    labels = folder / "config.json"
    labels.write_text('{"id2label": {"0": "car"}}')
    for there in (True, True, False):  # the second time out of the cache
        if not there:
            labels.unlink()
        with serving(**settings(place)) as server:
            assert ask(server, "cars-1").status_code == 200
            served = server.context.on_request.cache.entries()[0].folder
            expected = {*FILES, "config.json"} if there else {*FILES}
            assert {file.name for file in served.iterdir()} == expected


@pytest.mark.parametrize("error", [RuntimeError("a\nb"), OSError()])
def test_what_nothing_foresees_is_refused_and_remembered(error, place, monkeypatch):
    asked = []

    async def fail(self, kind, folder, name, **_):
        asked.append(name)
        raise error

    monkeypatch.setattr(FakeEngine, "load", fail)
    with serving(**settings(place)) as server:
        for _ in range(3):
            answer = ask(server, "cars-1")
            refused(answer, 400, f"Adapter cars-1 cannot be loaded ({type(error).__name__})")
        assert asked == ["cars-1"]
        kept = server.context.on_request._failed["cars-1"][1]
        assert kept.__cause__ is kept.__traceback__ is kept.__context__ is None  # and their frames


def test_one_download_for_all_that_wait(place, gated):
    with serving(**slow(place)) as server:
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(ask, server, "cars-7") for _ in range(6)]
            assert gated.reading.wait(10)
            loader = server.context.on_request
            until(lambda: loader._users["cars-7"] == 6)
            gated.gate.set()
            assert [one.result().status_code for one in asked] == [200] * 6
        assert gated.found == ["cars-7", "cars-7"]  # before and after it was read
        until(lambda: not loader._users)


def test_a_name_that_failed_is_not_asked_again_at_once(place, gated):
    gated.fail = ConnectionError("no route to bucket-of-secrets")
    with serving(**slow(place)) as server:
        loader = server.context.on_request
        now = [100.0]
        loader._now = lambda: now[0]
        for _ in range(3):
            answer = ask(server, "cars-7")
            refused(answer, 503, "source gated of adapter cars-7 cannot be read now")
            assert "secrets" not in answer.text
            assert answer.headers["retry-after"] == "5"
        assert len(gated.found) == 1
        gated.fail = PermissionError("403")
        assert refused(ask(server, "cars-8"), 403, "may not read adapter cars-8") == "forbidden"
        now[0] += 31.0
        gated.fail = None
        gated.gate.set()
        assert ask(server, "cars-7").status_code == 200


def test_an_adapter_that_grows_while_it_is_read(place, gated):
    gated.grow = True
    gated.gate.set()
    with serving(**slow(place)) as server:
        for name, weights in (("cars-7", None), ("cars-8", 5), ("cars-9", 9)):
            if weights:
                gated.grow, gated.sizes = False, {CONFIG: 8, WEIGHTS: weights}
            refused(ask(server, name), 503, "changed while it was read")
        assert list((place / "cache").iterdir()) == [place / "cache" / ".lock"]


def test_deadline_and_disconnect_leave_the_load_to_the_next_request(place, gated):
    with serving(**slow(place)) as server:
        late = ask(server, "cars-7", valora={"deadline": 0.05})
        refused(late, 504, "passed while adapter cars-7 was loaded")
        until(lambda: not server.context.on_request._users)
        gated.gate.set()
        assert ask(server, "cars-7").status_code == 200
        assert gated.found == ["cars-7"] * 2


def test_a_drain_ends_requests_that_wait_for_an_adapter(place, gated):
    chosen = slow(place, drain_seconds=0.0)
    with serving(**chosen) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, "cars-7")
        assert gated.reading.wait(10)
        server.server.should_exit = True
        assert refused(asked.result(), 503, "shut down") == "draining"
    with serving(**chosen):  # the cache is free again
        pass


def test_a_source_that_hangs(place, gated):
    with serving(**slow(place, adapter_seconds=0.05)) as server:
        refused(ask(server, "cars-7"), 503, "not fetched within 0.05 s")
        assert ask(server, "tiny").status_code == 200


def test_the_least_recently_used_adapter_is_unloaded(place):
    with serving(**settings(place, max_found_adapters=2)) as server:
        for name in ("cars-1", "cars-2", "cars-1", "cars-3"):
            assert ask(server, name).status_code == 200
        assert server.names & {"cars-1", "cars-2", "cars-3"} == {"cars-1", "cars-3"}
        waiting = cards(server)["cars-2"]
        assert (waiting["state"], waiting["resolver"]) == ("disk", "file")
        assert server.client.get("/v1/models/cars-2").json()["state"] == "disk"
        found = metric(server, "valora_adapters{")
        assert found['valora_adapters{resolver="file",state="disk"}'] == 1
        assert found['valora_adapters{resolver="file",state="host"}'] == 2
        shutil.rmtree(place / "store" / "cars-3")
        assert ask(server, "cars-2").status_code == 200


def test_adapters_in_use_stay(place):
    with serving(FakeEngine(step=0.02), **settings(place, max_found_adapters=1)) as server:
        loader = server.context.on_request
        body = chat(model="cars-1", max_tokens=10**6, ignore_eos=True, stream=True)
        with server.client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            refused(ask(server, "cars-2"), 429, "are in use")
        until(lambda: not loader._users)
        loader._failed.clear()
        assert ask(server, "cars-2").status_code == 200
        assert "cars-1" not in server.names
        served = server.engine._served
        served["cars-2"] = replace(served["cars-2"], head="classification", labels=("a", "b"))
        server.engine._step = 0.3
        sent = {"files": {"image": PNG}, "data": {"prompt": "?"}}
        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(server.client.post, "/v1/vision/cars-2", **sent)
            until(lambda: server.engine.running)
            refused(ask(server, "cars-1"), 429, "are in use")
        assert looking.result().json()["results"][0]["label"] == "a"


def test_an_adapter_that_comes_into_use_before_it_is_unloaded_stays(place):
    """Unloading waits for another load; a request, or a context, may need it meanwhile."""
    with serving(**settings(place, max_found_adapters=1)) as server:
        assert ask(server, "cars-1").status_code == 200
        loader, lock = server.context.on_request, server.context.served._lock
        rules = ServedModel("rules", "domain", "d", adapter="cars-1")
        loop = server.server.servers[0].get_loop()
        for use in ("request", "context"):
            asyncio.run_coroutine_threadsafe(lock.acquire(), loop).result(20)
            with ThreadPoolExecutor() as pool:
                asked = pool.submit(ask, server, "cars-2")
                until(lambda: lock._waiters)
                if use == "request":
                    loader._users["cars-1"] += 1
                else:
                    server.engine._served["rules"] = rules
                loop.call_soon_threadsafe(lock.release)
                refused(asked.result(20), 429, "are in use")
            assert "cars-1" in server.names
            del loader._users["cars-1"]
            loader._failed.clear()
        assert ask(server, "cars-1").status_code == 200


def test_a_request_for_what_is_being_unloaded_loads_it_again(place):
    began, goes_on = threading.Event(), threading.Event()

    class Slow(FakeEngine):
        async def unload(self, kind, name):
            await super().unload(kind, name)
            began.set()
            while not goes_on.is_set():
                await asyncio.sleep(0.01)

    with serving(Slow(), **settings(place, max_found_adapters=1)) as server:
        assert ask(server, "cars-1").status_code == 200
        with ThreadPoolExecutor() as pool:
            second = pool.submit(ask, server, "cars-2")
            assert began.wait(20)
            first = pool.submit(ask, server, "cars-1")
            until(lambda: "cars-1" in server.context.on_request._loading)
            goes_on.set()
            assert second.result(20).status_code in (200, 404)
            assert first.result(20).status_code in (200, 429)
            assert ask(server, "cars-3").status_code == 200


def test_only_what_a_request_can_load_is_listed(place):
    adapter(place / "store" / "cars-bad", base="another")
    with serving(**settings(place)) as server:
        assert ask(server, "cars-1").status_code == 200
        refused(ask(server, "cars-bad"), 400, "another, not for tiny")
        assert "cars-bad" not in cards(server)
    with serving(**settings(place)) as server:
        assert {"cars-1", "cars-bad"} <= set(cards(server))  # nobody has tried it in this run
        assert cards(server)["cars-1"]["state"] == "disk"
    with serving(**settings(place, adapter_allow=("dogs-*",))) as server:
        assert not {"cars-1", "cars-bad"} & set(cards(server))
        found = metric(server, "valora_adapters{")
        assert found['valora_adapters{resolver="file",state="disk"}'] == 0
    (place / "other").mkdir()
    with serving(**settings(place, adapter_sources=(str(place / "other"),))) as server:
        assert "cars-1" not in cards(server)


def test_a_damaged_or_deleted_cache_is_filled_again(place):
    name = "cars-" + "x" * 150
    adapter(place / "store" / name)
    with serving(**settings(place, max_found_adapters=1)) as server:
        cache = server.context.on_request.cache
        for harm in (lambda folder: (folder / WEIGHTS).write_bytes(b"\1" * 8),
                     lambda folder: shutil.rmtree(folder.parent), lambda folder: None):  # fmt: skip
            assert ask(server, name).status_code == 200
            folder = next(one.folder for one in cache.entries() if one.name == name)
            assert (folder / WEIGHTS).read_bytes() == b"\0" * 8
            assert ask(server, "cars-2").status_code == 200  # in its place
            harm(folder)


def test_what_an_administrator_unloads_gives_its_place_back(place):
    more = {"allow_runtime_loading": True, "api_key": ADMIN, "adapter_folder": str(place)}
    with serving(key=ADMIN, **settings(place, max_found_adapters=1, **more)) as server:
        assert ask(server, "cars-1").status_code == 200
        gone = server.client.post("/v1/unload_lora_adapter", json={"lora_name": "cars-1"})
        assert gone.status_code == 200, gone.text
        assert ask(server, "cars-2").status_code == 200
        assert ask(server, "cars-1").status_code == 200


@pytest.mark.parametrize("version", ["same", "new"])
def test_a_loaded_adapter_whose_files_are_lost_is_fetched_again(place, monkeypatch, version):
    """The engine has dropped it from host memory, and would read it from the cache."""
    engine = FakeEngine()
    stats = engine.stats
    monkeypatch.setattr(engine, "stats", lambda: replace(stats(), on_disk=["cars-1", "cars-2"]))
    with serving(engine, **settings(place, max_found_adapters=2)) as server:
        for name in ("cars-1", "cars-2"):
            assert ask(server, name).status_code == 200
        if version == "new":
            adapter(place / "store" / "cars-1", size=16)
        shutil.rmtree(place / "cache")
        (place / "cache").mkdir()
        assert ask(server, "cars-1").status_code == 200
        served = {model.name: model.root for model in engine.models()}
        assert {item.name for item in Path(served["cars-1"]).iterdir()} == set(FILES)
        assert "cars-2" in served
        shutil.rmtree(place / "store" / "cars-2")
        refused(ask(server, "cars-2"), 404, "no source of adapters has it")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"adapter_sources": ("nowhere://x",)}, "nowhere:// cannot be opened"),
        ({"adapter_sources": ("/does/not/exist",)}, "is no folder"),
        ({"adapter_sources": ("~no-such-user/adapters",)}, "is no folder"),
        ({"adapter_sources": ("",)}, "has an empty entry"),
        ({"adapter_sources": ("hf://acme/cars",)}, "hf://acme/cars names more than an owner"),
        ({"adapter_allow": ()}, "go together"),
        ({"adapter_bytes": 10, "adapter_cache_bytes": 5}, "must fit into the cache"),
    ],
)
def test_sources_that_cannot_be_used(place, wrong, words):
    with pytest.raises((SettingsError, ValueError), match=words):
        OnRequest(None, None, ServerSettings(**settings(place, **wrong)))


def test_a_cache_is_one_server_s(place):
    chosen = ServerSettings(**settings(place))
    first = OnRequest(None, None, chosen)
    with pytest.raises(SettingsError, match="in use by another server"):
        OnRequest(None, None, chosen)
    asyncio.run(first.close())
    asyncio.run(OnRequest(None, None, chosen).close())
