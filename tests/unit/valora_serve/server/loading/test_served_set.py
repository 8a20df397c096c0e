"""Loading and unloading at run time: who may, from where, what is refused, what is remembered."""

import asyncio
import errno
import json
import os
import shutil
import zipfile

import pytest

from tests.support.disk_faults import failing
from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import ADMIN, adapter, bundle, loading, serving, until
from valora_serve.errors import AdapterError
from valora_serve.server.loading import startup
from valora_serve.server.loading.served_set import ServedSet
from valora_serve.server.loading.state_file import StateFile

LOADING = ("load_lora_adapter", "unload_lora_adapter", "load_bundle", "unload_bundle", "contexts")
BUILT_IN = {model.name: model.root for model in FakeEngine().models()}


@pytest.fixture
def place(tmp_path):
    root = tmp_path / "adapters"
    adapter(root / "good")
    adapter(root / "other")
    bundle(root / "cars")
    adapter(tmp_path / "outside")
    return tmp_path


def post(server, path, body, status=200, key=ADMIN):
    headers = {"content-type": "application/json"}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    answer = server.client.post(f"/v1/{path}", content=json.dumps(body), headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def load(server, path, name="mine", status=200, **more):
    body = {"lora_name": name, "lora_path": str(path), **more}
    return post(server, "load_lora_adapter", body, status)


def roots(engine):
    return {model.name: model.root for model in engine.models()}


def test_load_ask_and_unload(place):
    with serving(**loading(place)) as server:
        (made,) = load(server, "good")["models"]
        assert (made["id"], made["parent"]) == ("mine", "tiny")
        body = {"model": "mine", "prompt": "x", "max_tokens": 1}
        assert post(server, "completions", body)["model"] == "mine"
        load(server, place / "adapters" / "other", "second")
        load(server, "other", status=409)
        load(server, "other", load_inplace=True)
        for name in ("tiny", "person", "adapter-1"):
            load(server, "good", name, status=409, load_inplace=True)
        for name in ("", "a/b", "../x", "a b", "-x", "x" * 129, "é"):
            load(server, "good", name, status=400)
        post(server, "unload_lora_adapter", {"lora_name": "mine"})
        assert roots(server.engine).keys() - BUILT_IN == {"second"}
        post(server, "completions", body, 404)
        post(server, "unload_lora_adapter", {"lora_name": "adapter-1"}, 409)
        post(server, "unload_lora_adapter", {"lora_name": "nobody"}, 404)
        (made,) = post(server, "load_bundle", {"bundle_path": "cars"})["models"]
        assert made["id"] == "car"
        post(server, "unload_bundle", {"bundle_name": "cars"})
        assert "car" not in roots(server.engine)
        post(server, "unload_bundle", {"bundle_name": "cars"}, 404)


def test_only_admins_and_only_where_it_is_opted_in(place, keys_file):
    file, secrets = keys_file
    with serving(**loading(place, keys_file=str(file))) as server:
        for path in LOADING:
            for key, status in ((None, 401), ("wrong", 401), (secrets["app"], 403)):
                post(server, path, {}, status, key)
        post(server, "completions", {"prompt": "x"}, key=secrets["app"])
        assert server.engine.asked[-1].client == "app"  # whom shares by key charge
    with serving(api_key=ADMIN) as server:
        for path in LOADING:
            said = post(server, path, {}, 403)["error"]["message"]
            assert "--allow-runtime-loading" in said
        headers = {"authorization": f"Bearer {ADMIN}"}
        assert server.client.get("/v1/contexts", headers=headers).status_code == 200


def test_paths_that_lead_elsewhere(place):
    (place / "adapters" / "link").symlink_to(place / "outside")
    with serving(**loading(place)) as server:
        for path in (
            "../outside", "good/../../outside", "/etc", "/", ".", "", "good/..", "link", "~",
            "good\0", "nothing", "good/adapter_config.json", "a" * 5000, "\ud800",
        ):  # fmt: skip
            said = load(server, path, status=400)
            said |= post(server, "load_bundle", {"bundle_path": path}, 400)
            assert "outside" not in json.dumps(said).replace("leads outside", "")
        assert roots(server.engine) == BUILT_IN


def test_what_is_refused_and_what_lies_beside_an_adapter(place):
    root = place / "adapters"
    adapter(root / "foreign", base="llava-13b")
    adapter(root / "damaged", content=b"nope")
    bundle(root / "foreign-bundle", base="llava-13b", name="f")
    for name in ("no-weights", "leading-out"):
        (adapter(root / name) / "adapter_model.safetensors").unlink()
    outside = place / "outside" / "adapter_model.safetensors"
    (root / "leading-out" / "adapter_model.safetensors").symlink_to(outside)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter(root / f"pipe-{name}") / name).unlink()
        os.mkfifo(root / f"pipe-{name}" / name)
    with zipfile.ZipFile(root / "evil.zip", "w") as file:
        file.writestr("../../evil/adapter_config.json", "{}")
    with serving(**loading(place)) as server:
        for path, said in (
            ("foreign", "llava-13b"), ("damaged", ""), ("no-weights", "is no adapter"),
            ("leading-out", "link"), ("pipe-adapter_config.json", "is no adapter"),
            ("pipe-adapter_model.safetensors", "is no adapter"), ("evil.zip", "unpack"),
        ):  # fmt: skip
            error = load(server, path, status=400)["error"]
            assert said in error["message"], path
            assert error["code"] == "invalid_adapter"
        for path in ("foreign-bundle", "good"):
            post(server, "load_bundle", {"bundle_path": path}, 400)
        assert roots(server.engine) == BUILT_IN
        assert not (place / "evil").exists()
        assert not (place / "state" / "served.json").exists()
        folder = root / "good"
        (folder / "checkpoint-5").mkdir()
        for file in ("adapter_model.bin", "training_args.bin", "checkpoint-5/adapter_model.bin"):
            os.mkfifo(folder / file)  # whoever opened it would wait
        (folder / "checkpoint-5" / "last").symlink_to(place / "outside")
        load(server, "good")
        linked = adapter(root / "linked") / "adapter_model.safetensors"
        linked.unlink()
        linked.symlink_to("../other/adapter_model.safetensors")
        load(server, "linked", "linked")


# What is remembered


def make(place, engine, replay=None):
    folder = place / "adapters"
    return ServedSet(engine, folder, StateFile(place / "state" / "served.json"), replay)


run = asyncio.run


def after_restart(place, bundles=()):
    """What a new process serves, by name."""

    async def start():
        engine = FakeEngine()
        await startup.load_all(engine, bundles, make(place, engine))
        return roots(engine)

    return run(start())


@pytest.mark.parametrize("error", [AdapterError("came out differently"), ZeroDivisionError()])
def test_a_bundle_whose_golden_examples_differ_is_not_served(place, error):
    differ = [bundle(place / "adapters" / "cars-2", ("car", "van"))]

    async def replay(folder):
        if folder in differ:
            raise error

    async def life():
        engine = FakeEngine()
        served = make(place, engine, replay)
        with pytest.raises(type(error)):
            await served.load_bundle("cars-2")
        assert roots(engine) == BUILT_IN
        assert list((place / "state").iterdir()) == []
        assert not served.reserves("van"), "requests may load an adapter of that name"
        await served.load_bundle("cars")
        with pytest.raises(type(error)):
            await served.load_bundle("cars-2")
        await served.load_adapter("mine", "good", replace=False)  # records nothing of it
        after = roots(engine)  # the version that it would replace comes back
        differ.append(place / "adapters" / "cars")
        with pytest.raises(type(error)):
            await served.load_bundle("cars")
        assert "car" not in roots(engine), "what its folder holds now is served"
        return after

    after = run(life())
    assert after.keys() - BUILT_IN == {"car", "mine"}
    assert after_restart(place) == after


def test_hashes_of_a_run_with_replicas_do_not_outlive_a_load(place):
    """Otherwise what one server loads since would be taken for a wrong copy."""
    file = place / "state" / "served.json"
    file.parent.mkdir()
    state = {
        "adapters": {"mine": str(place / "adapters" / "good")},
        "sha256": {"adapter mine": "0"},
    }
    file.write_text(json.dumps(state))
    engine = FakeEngine()
    served = make(place, engine)
    served.read()
    assert "is not the one that other machines have" in run(served.restore())[0]
    run(served.load_adapter("mine", "good", replace=False))
    assert after_restart(place) == roots(engine)


def test_the_answer_of_a_full_disk_and_of_a_lost_folder(place):
    with serving(**loading(place)) as server:
        load(server, "good")
        before = roots(server.engine)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with failing(place / "state", 3, full):
            error = post(server, "load_bundle", {"bundle_path": "cars"}, 507)["error"]
        assert error["code"] == "storage_failed"
        assert "free space on that disk" in error["message"]
        assert roots(server.engine) == before
        shutil.rmtree(place / "state")
        load(server, "other", "second")
        assert after_restart(place) == roots(server.engine)
        shutil.rmtree(place / "state")
        (place / "state").write_text("a file in its place")
        load(server, "other", "third", 507)


def test_what_could_not_be_restored_can_be_forgotten(place):
    with serving(**loading(place)) as server:
        load(server, "good")
        post(server, "load_bundle", {"bundle_path": "cars"})
    (place / "state" / "served.json.partial").write_text('{"adapters": {"two"')  # of a crash
    shutil.move(place / "adapters", place / "away")
    (place / "adapters").mkdir()
    served = make(place, FakeEngine())
    served.read()
    problems = run(served.restore())
    assert [text.partition(" is not served again: ")[0] for text in problems] == [
        "bundle cars", "adapter mine",
    ]  # fmt: skip
    run(served.unload("adapter", "mine"))
    run(served.unload_bundle("cars"))
    shutil.rmtree(place / "adapters")
    shutil.move(place / "away", place / "adapters")
    assert after_restart(place) == BUILT_IN


def test_a_load_goes_on_when_its_client_leaves(place, caplog):
    class Slow(FakeEngine):
        async def load(self, *given, **options):
            await asyncio.sleep(0.3)
            return await super().load(*given, **options)

    adapter(place / "adapters" / "bad", content=b"nope")
    with serving(Slow(), key=ADMIN, **loading(place)) as server:
        for path in ("bad", "good"):
            body = {"lora_name": "mine", "lora_path": path}
            with pytest.raises(Exception, match="timed out"):
                server.client.post("/v1/load_lora_adapter", json=body, timeout=0.1)
        until(lambda: server.service.serves("mine"))
        assert "a change of what is served failed: adapter mine is damaged" in caplog.text
        assert after_restart(place) == roots(server.engine)
