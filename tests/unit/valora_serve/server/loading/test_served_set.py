"""Loading and unloading at run time: who may, from where, what is refused, what is remembered."""

import asyncio
import errno
import json
import os
import shutil
import stat
import zipfile

import pytest

from tests.support.disk_faults import failing
from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import serving
from valora_serve.errors import SettingsError, StorageError
from valora_serve.server.access.keys import new_key
from valora_serve.server.loading.served_set import ServedSet

SECRET = "an-admin-key-of-32-characters-ok"


def adapter(folder, base="tiny", content=b"\0" * 8):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": base, "r": 8})
    )
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def bundle(folder, domains=("car",), name="cars", base="tiny"):
    folder.mkdir(parents=True)
    manifest = {"name": name, "base": base, "domains": list(domains)}
    (folder / "bundle.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def place(tmp_path):
    root = tmp_path / "adapters"
    adapter(root / "good")
    adapter(root / "other")
    bundle(root / "cars")
    adapter(tmp_path / "outside")
    return tmp_path


def settings(place, **more):
    return {
        "allow_runtime_loading": True, "adapter_folder": str(place / "adapters"),
        "api_key": SECRET, "state_file": str(place / "state" / "served.json"), **more,
    }  # fmt: skip


def post(server, path, body, key=SECRET):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return server.client.post(f"/v1/{path}", json=body, headers=headers)


def names(server):
    listed = server.client.get("/v1/models", headers={"authorization": f"Bearer {SECRET}"})
    return {model["id"] for model in listed.json()["data"]}


def load(server, path, name="mine", **more):
    return post(server, "load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


def test_load_ask_and_unload(place):
    with serving(**settings(place)) as server:
        answer = load(server, "good")
        assert answer.status_code == 200, answer.text
        assert answer.json()["models"][0]["id"] == "mine"
        assert answer.json()["models"][0]["parent"] == "tiny"
        asked = post(server, "completions", {"model": "mine", "prompt": "x", "max_tokens": 1})
        assert asked.json()["model"] == "mine"
        assert load(server, place / "adapters" / "other", "second").status_code == 200
        assert {"mine", "second"} <= names(server)
        assert post(server, "unload_lora_adapter", {"lora_name": "mine"}).status_code == 200
        assert "mine" not in names(server)
        gone = post(server, "completions", {"model": "mine", "prompt": "x"})
        assert gone.status_code == 404


def test_a_name_that_is_taken(place):
    with serving(**settings(place)) as server:
        assert load(server, "good").status_code == 200
        assert load(server, "other").status_code == 409
        assert load(server, "other", load_inplace=True).status_code == 200
        for name in ("tiny", "person", "adapter-1"):
            assert load(server, "good", name, load_inplace=True).status_code == 409


def test_bundles(place):
    with serving(**settings(place)) as server:
        answer = post(server, "load_bundle", {"bundle_path": "cars"})
        assert [model["id"] for model in answer.json()["models"]] == ["car"]
        assert "car" in names(server)
        assert post(server, "unload_bundle", {"bundle_name": "cars"}).status_code == 200
        assert "car" not in names(server)
        assert post(server, "unload_bundle", {"bundle_name": "cars"}).status_code == 404
        assert post(server, "load_bundle", {"bundle_path": "good"}).status_code == 400


def test_only_admins_and_only_where_it_is_opted_in(place, tmp_path):
    secret, line = new_key("app", "user")
    keys = tmp_path / "keys"
    keys.write_text(line + "\n")
    with serving(**settings(place, keys_file=str(keys))) as server:
        body = {"lora_name": "mine", "lora_path": "good"}
        assert post(server, "load_lora_adapter", body, key=None).status_code == 401
        assert post(server, "load_lora_adapter", body, key="wrong").status_code == 401
        assert post(server, "load_lora_adapter", body, key=secret).status_code == 403
        assert post(server, "completions", {"prompt": "x"}, key=secret).status_code == 200
        assert server.engine.asked[-1].client == "app"  # whom shares by key charge
    with serving(api_key=SECRET) as server:
        for path in ("load_lora_adapter", "unload_lora_adapter", "load_bundle", "unload_bundle"):
            assert post(server, path, {}).status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "../outside", "good/../../outside", "/etc", "/", ".", "", "good/..", "link", "~", "good\0",
        "nothing", "good/adapter_config.json", "a" * 5000, "\ud800",
    ],
)  # fmt: skip
def test_paths_that_lead_elsewhere(place, path):
    (place / "adapters" / "link").symlink_to(place / "outside")
    with serving(**settings(place)) as server:
        for endpoint, field in (("load_lora_adapter", "lora_path"), ("load_bundle", "bundle_path")):
            body = {field: path} | ({"lora_name": "x"} if field == "lora_path" else {})
            answer = server.client.post(
                f"/v1/{endpoint}", content=json.dumps(body),
                headers={"authorization": f"Bearer {SECRET}", "content-type": "application/json"},
            )  # fmt: skip
            assert answer.status_code == 400, (path, answer.text)
            assert "outside" not in answer.text.replace("leads outside", "")
        assert server.engine.models() == FakeEngine().models()


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "-x", "x" * 129, "é"])
def test_names_that_cannot_be(place, name):
    with serving(**settings(place)) as server:
        assert load(server, "good", name).status_code == 400


def test_what_a_trainer_leaves_beside_an_adapter_is_not_opened(place):
    folder = place / "adapters" / "good"
    (folder / "checkpoint-5").mkdir()
    for file in ("adapter_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth",
                 "checkpoint-5/adapter_model.bin"):  # fmt: skip
        os.mkfifo(folder / file)  # whoever opened it would wait
    (folder / "checkpoint-5" / "last").symlink_to(place / "outside")
    with serving(**settings(place)) as server:
        assert load(server, "good").status_code == 200


def test_a_pickle_alone_is_refused(place):
    folder = place / "adapters" / "good"
    (folder / "adapter_model.safetensors").unlink()
    with serving(**settings(place)) as server:
        assert load(server, "good").status_code == 400
        (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
        answer = load(server, "good")
        assert answer.status_code == 400
        assert "where you trust it, load it with PEFT" in answer.json()["error"]["message"]


def test_archives_are_not_unpacked(place):
    with zipfile.ZipFile(place / "adapters" / "evil.zip", "w") as file:
        file.writestr("../../evil/adapter_config.json", "{}")
    with serving(**settings(place)) as server:
        answer = load(server, "evil.zip")
        assert answer.status_code == 400
        assert "unpack" in answer.json()["error"]["message"]
    assert not (place / "evil").exists()


def test_links_inside_that_lead_out_are_refused(place):
    weights = place / "adapters" / "good" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(place / "outside" / "adapter_model.safetensors")
    with serving(**settings(place)) as server:
        answer = load(server, "good")
        assert answer.status_code == 400
        assert "link" in answer.json()["error"]["message"]


def test_links_of_a_hub_s_cache_are_followed(place):
    repository = place / "adapters" / "models--acme--cars"
    (repository / "snapshots").mkdir(parents=True)
    (place / "adapters" / "good").rename(repository / "snapshots" / "abc")
    weights = repository / "snapshots" / "abc" / "adapter_model.safetensors"
    (repository / "blobs").mkdir()
    weights.rename(repository / "blobs" / "hash")
    weights.symlink_to("../../blobs/hash")
    with serving(**settings(place)) as server:
        assert load(server, "models--acme--cars/snapshots/abc").status_code == 200


def test_a_foreign_base_and_damage_are_refused(place):
    adapter(place / "adapters" / "foreign", base="llava-13b")
    adapter(place / "adapters" / "damaged", content=b"nope")
    bundle(place / "adapters" / "foreign-bundle", base="llava-13b", name="f")
    with serving(**settings(place)) as server:
        before = names(server)
        assert load(server, "foreign").json()["error"]["code"] == "invalid_adapter"
        assert load(server, "damaged").status_code == 400
        assert post(server, "load_bundle", {"bundle_path": "foreign-bundle"}).status_code == 400
        assert names(server) == before
    assert not (place / "state" / "served.json").exists()


def test_an_adapter_of_a_bundle_stays(place):
    with serving(**settings(place)) as server:
        assert post(server, "unload_lora_adapter", {"lora_name": "adapter-1"}).status_code == 409
        assert post(server, "unload_lora_adapter", {"lora_name": "nobody"}).status_code == 404


# What is remembered


def make(place, engine, replay=None):
    folder = place / "adapters"
    return ServedSet(engine, folder, place / "state" / "served.json", replay)


async def served_after(place, bundles=()):
    """Return the ids that a new process serves."""
    engine = FakeEngine()
    again = make(place, engine)
    unloaded = again.read()
    for folder in bundles:
        await engine.load_bundle(folder)
    for name in unloaded:
        await engine.unload_bundle(name)
    problems = await again.restore()
    return {model.name for model in engine.models()}, problems


def run(coroutine):
    import asyncio

    return asyncio.run(coroutine)


def test_a_restart_comes_back_to_the_same_set(place):
    async def life():
        engine = FakeEngine()
        served = make(place, engine)
        await engine.load_bundle(bundle(place / "boats", ("boat",), "boats"))  # the command line's
        await served.load_adapter("one", "good", replace=False)
        await served.load_adapter("two", "other", replace=False)
        await served.load_bundle("cars")
        await served.unload_adapter("one")
        await served.unload_bundle("boats")
        return {model.name for model in engine.models()}

    before = run(life())
    after, problems = run(served_after(place, [place / "boats"]))
    assert after == before
    assert {"two", "car"} <= after
    assert not {"one", "boat"} & after
    assert problems == []


def test_what_is_gone_is_left_out_and_said(place):
    async def life():
        served = make(place, FakeEngine())
        await served.load_adapter("one", "good", replace=False)
        await served.load_adapter("two", "other", replace=False)

    run(life())
    for file in (place / "adapters" / "good").iterdir():
        file.unlink()
    (place / "adapters" / "good").rmdir()
    after, problems = run(served_after(place))
    assert "two" in after
    assert len(problems) == 1
    assert "one" in problems[0]


def test_the_state_file_is_whole_at_any_moment(place, monkeypatch):
    """A kill while it is written leaves the old one."""

    async def life():
        served = make(place, FakeEngine())
        await served.load_adapter("one", "good", replace=False)

        def killed(_):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            await served.load_adapter("two", "other", replace=False)

    run(life())
    monkeypatch.undo()
    after, problems = run(served_after(place))
    assert "one" in after
    assert "two" not in after
    assert problems == []


def test_a_damaged_state_file_is_said(place):
    file = place / "state" / "served.json"
    file.parent.mkdir()
    for content in ("{", "[]", '{"adapters": 5}', '{"unknown": {}}', '{"adapters": {"a": 1}}'):
        file.write_text(content)
        with pytest.raises(SettingsError, match="damaged"):
            make(place, FakeEngine()).read()


def test_a_bundle_whose_golden_examples_differ_is_not_served(place):
    from valora_serve.errors import AdapterError

    async def differs(folder):
        raise AdapterError("came out differently")

    async def life():
        engine = FakeEngine()
        served = make(place, engine, differs)
        with pytest.raises(AdapterError, match="differently"):
            await served.load_bundle("cars")
        return {model.name for model in engine.models()}

    assert "car" not in run(life())
    assert not (place / "state" / "served.json").exists()


def test_the_version_that_it_would_replace_comes_back(place):
    from valora_serve.errors import AdapterError

    newer = bundle(place / "adapters" / "cars-2", ("car", "van"))

    async def newer_differs(folder):
        if folder == newer:
            raise AdapterError("came out differently")

    async def life():
        engine = FakeEngine()
        served = make(place, engine, newer_differs)
        await served.load_bundle("cars")
        with pytest.raises(AdapterError):
            await served.load_bundle("cars-2")
        return {model.name for model in engine.models()}

    after = run(life())
    assert "car" in after
    assert "van" not in after
    assert run(served_after(place))[0] == after


def test_a_missing_folder_is_said(tmp_path):
    with pytest.raises(SettingsError, match="adapter_folder"):
        ServedSet(FakeEngine(), tmp_path / "none", tmp_path / "s.json")


def test_the_state_file_is_for_the_owner(place):
    run(make(place, FakeEngine()).load_adapter("one", "good", replace=False))
    mode = stat.S_IMODE((place / "state" / "served.json").stat().st_mode)
    assert mode & 0o022 == 0


# Whatever fails: what is served, what is recorded and what is answered agree


def roots(server):
    return {model.name: model.root for model in server.engine.models()}


def after_restart(place, bundles=()):
    """What a new process serves, by name."""
    from valora_serve.server.loading import startup

    async def start():
        engine = FakeEngine()

        async def warm_up():
            pass

        served = make(place, engine)
        await startup.load_all(engine, bundles, served, warm_up=warm_up, replay=False)
        return {model.name: model.root for model in engine.models()}

    return run(start())


CHANGES = {
    "load": lambda served: served.load_adapter("new", "good", replace=False),
    "replace": lambda served: served.load_adapter("mine", "other", replace=True),
    "unload": lambda served: served.unload_adapter("mine"),
    "load bundle": lambda served: served.load_bundle("vans"),
    "replace bundle": lambda served: served.load_bundle("cars-2"),
    "replace the command line's": lambda served: served.load_bundle("boats-2"),
    "unload bundle": lambda served: served.unload_bundle("cars"),
    "unload the command line's": lambda served: served.unload_bundle("boats"),
}
ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES)


@pytest.mark.parametrize("change", CHANGES)
def test_a_disk_that_fails_at_any_moment(place, change):
    adapters = place / "adapters"
    bundle(adapters / "vans", ("van",), "vans")
    bundle(adapters / "cars-2", ("car", "bus"), "cars")
    bundle(adapters / "boats-2", ("ship",), "boats")
    boats = bundle(place / "boats", ("boat",), "boats")
    failed = []
    for at in range(9):
        shutil.rmtree(place / "state", ignore_errors=True)
        engine = FakeEngine()
        served = make(place, engine)

        def now(engine=engine):
            return {model.name: model.root for model in engine.models()}

        async def prepare(engine=engine, served=served):
            await engine.load_bundle(boats)
            await served.load_adapter("mine", "good", replace=False)
            await served.load_bundle("cars")

        run(prepare())
        before = now()
        error = ERRORS[at % len(ERRORS)]
        with failing(place / "state", at, OSError(error, os.strerror(error))) as faults:
            try:
                run(CHANGES[change](served))
            except StorageError as told:
                assert now() == before
                for part in (os.strerror(error), "served.json", "so nothing was changed"):
                    assert part in str(told)
                failed.append(faults.seen[at])
            else:
                assert now() != before
        assert after_restart(place, [boats]) == now()
    # Every operation up to the renaming fails the change, and none after it.
    assert failed == ["mkdir", "open", "write", "fsync", "write", "replace"]


def test_the_answer_of_a_full_disk(place):
    with serving(**settings(place)) as server:
        assert load(server, "good").status_code == 200
        before = names(server)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for path, body in (
            ("load_lora_adapter", {"lora_name": "new", "lora_path": "good"}),
            ("unload_lora_adapter", {"lora_name": "mine"}),
            ("load_bundle", {"bundle_path": "cars"}),
        ):
            with failing(place / "state", 3, full):
                answer = post(server, path, body)
            assert answer.status_code == 507
            assert answer.json()["error"]["code"] == "storage_failed"
            assert "free space on that disk" in answer.json()["error"]["message"]
            assert names(server) == before


def test_a_bundle_of_the_command_line_that_was_replaced_and_unloaded_stays_away(place):
    first = bundle(place / "cars-0", ("car", "bus"))
    engine = FakeEngine()
    run(engine.load_bundle(first))
    with serving(engine, **settings(place)) as server:
        assert post(server, "load_bundle", {"bundle_path": "cars"}).status_code == 200
        assert after_restart(place, [first]) == roots(server)
        assert "bus" not in roots(server)
        assert post(server, "unload_bundle", {"bundle_name": "cars"}).status_code == 200
        assert not {"car", "bus"} & names(server)
        assert after_restart(place, [first]) == roots(server)
        assert after_restart(place, [first]) == roots(server)
        assert post(server, "load_bundle", {"bundle_path": "cars"}).status_code == 200
        assert after_restart(place, [first]) == roots(server)
    assert run(served_after(place, [first]))[0] >= {"car"}


def test_what_could_not_be_restored_can_be_forgotten(place):
    with serving(**settings(place)) as server:
        assert load(server, "good").status_code == 200
        assert post(server, "load_bundle", {"bundle_path": "cars"}).status_code == 200
    shutil.move(place / "adapters", place / "away")
    (place / "adapters").mkdir()
    engine = FakeEngine()
    served = make(place, engine)
    served.read()
    assert len(run(served.restore())) == 2
    run(served.unload_adapter("mine"))
    run(served.unload_bundle("cars"))
    shutil.rmtree(place / "adapters")
    shutil.move(place / "away", place / "adapters")
    assert after_restart(place) == {model.name: model.root for model in FakeEngine().models()}


def test_the_folder_of_the_state_file_may_go_under_a_running_server(place):
    with serving(**settings(place)) as server:
        assert load(server, "good").status_code == 200
        shutil.rmtree(place / "state")
        assert load(server, "other", "second").status_code == 200
        assert after_restart(place) == roots(server)
        shutil.rmtree(place / "state")
        (place / "state").write_text("a file in its place")
        assert load(server, "other", "third").status_code == 507
        assert post(server, "unload_lora_adapter", {"lora_name": "mine"}).status_code == 507
        assert {"mine", "second"} <= names(server) and "third" not in names(server)


@pytest.mark.parametrize(
    ("make_file", "message"),
    [
        (lambda file: file.write_text('{"version": 2, "fleets": {}}'), "newer version"),
        (lambda file: file.write_text('{"version": 0, "loaded": {}}'), "another version"),
        (lambda file: file.write_text('{"version": 1, "adapters": {"one": "goo'), "damaged"),
        (lambda file: file.write_text('{"version": "1", "adapters": {}}'), "damaged"),
        (lambda file: file.write_bytes(bytes(300)), "damaged"),
        (lambda file: file.write_text('["adapters"]'), "damaged"),
        (lambda file: file.write_text("[" * 10**5), "damaged, as it is nested"),
        (lambda file: file.write_text('{"adapters": {"a": "x", "a": "y"}}'), "key 'a' twice"),
        (lambda file: file.write_text('{"bundles": {"a": "\\ud800"}}'), "not Unicode"),
        (lambda file: file.write_bytes(b"\xff"), "damaged"),
        (lambda file: file.write_text(""), "damaged"),
        (lambda file: file.mkdir(), "no regular file"),
        (os.mkfifo, "no regular file"),
    ],
)
def test_state_files_that_are_none(place, make_file, message):
    file = place / "state" / "served.json"
    file.parent.mkdir()
    make_file(file)
    with pytest.raises(SettingsError, match=message):
        make(place, FakeEngine()).read()


def test_a_draft_that_a_crash_left_does_not_count(place):
    run(make(place, FakeEngine()).load_adapter("one", "good", replace=False))
    (place / "state" / "served.json.partial").write_text('{"adapters": {"two"')
    after, problems = run(served_after(place))
    assert "one" in after and problems == []
    run(make(place, FakeEngine()).load_adapter("two", "good", replace=False))


def test_a_replay_that_breaks_leaves_nothing_behind(place):
    async def breaks(folder):
        raise ZeroDivisionError

    async def life():
        engine = FakeEngine()
        served = make(place, engine, breaks)
        with pytest.raises(ZeroDivisionError):
            await served.load_bundle("cars")
        return {model.name for model in engine.models()}

    assert "car" not in run(life())
    assert list((place / "state").iterdir()) == []


def test_a_load_goes_on_when_its_client_leaves(place):
    class Slow(FakeEngine):
        async def load_adapter(self, name, folder, *, decode_only=False):
            await asyncio.sleep(0.5)
            return await super().load_adapter(name, folder, decode_only=decode_only)

    from tests.support.http_helpers import until

    with serving(Slow(), **settings(place)) as server:
        body = {"lora_name": "mine", "lora_path": "good"}
        with pytest.raises(Exception, match="timed out"):
            server.client.post("/v1/load_lora_adapter", json=body, timeout=0.1,
                               headers={"authorization": f"Bearer {SECRET}"})  # fmt: skip
        until(lambda: "mine" in roots(server))
        until(lambda: "mine" in names(server))
        assert after_restart(place) == roots(server)


def test_files_that_are_no_files_end_in_one_sentence(place):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = adapter(place / "adapters" / name.replace(".", "-"))
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with serving(**settings(place)) as server:
            answer = load(server, folder.name)
            assert answer.status_code == 400
            assert "is no PEFT adapter" in answer.json()["error"]["message"]
