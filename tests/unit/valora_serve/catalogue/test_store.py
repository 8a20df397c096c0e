"""Names of bundles, adapters and domains: staged, then committed as a whole or not at all."""

import json
import shutil

import pytest
import torch

from tests.support.helpers import save_random_llava
from tests.support.serve_helpers import (
    ADAPTERS,
    DOMAINS,
    DomainSpec,
    hidden_width,
    load_base,
    make_adapter,
    make_bundle,
    make_label_head,
    targets_of,
)
from tests.support.serve_helpers import rewrite as change_tensors
from valora_data.contract.bundle import GOLDEN, MANIFEST, write_manifest
from valora_serve.catalogue.adapters import read_adapter
from valora_serve.catalogue.store import Store
from valora_serve.errors import AdapterError, BusyError, UnknownModelError

BY_WRITING = ("schema_version", "files")


@pytest.fixture(scope="module")
def base(random_llava):
    return str(random_llava)


@pytest.fixture(scope="module")
def targets(base):
    return targets_of(load_base(base))


@pytest.fixture(scope="module")
def bundle(base, tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("bundles") / "sample", base)


@pytest.fixture
def copied(bundle, tmp_path):
    """Return a copy of the bundle that a test may damage."""
    return shutil.copytree(bundle, tmp_path / "sample")


@pytest.fixture
def store(base, targets):
    return Store(base, targets, width=hidden_width(base))


@pytest.fixture(scope="module")
def filled(base, targets, bundle):
    """A store with the bundle, for what changes nothing."""
    made = Store(base, targets, width=hidden_width(base))
    made.commit(made.stage_bundle(bundle))
    return made


def names(store):
    return [model.name for model in store.models()]


def contents(store):
    return {adapter.content for adapter in store.adapters().values()}


def bundles(store):
    return {model.bundle for model in store.models() if model.bundle}


def rewrite(folder, change):
    """Change a bundle's manifest, with matching hashes."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    write_manifest(folder, {k: v for k, v in manifest.items() if k not in BY_WRITING})


def test_a_bundle_brings_adapters_and_domains(store, bundle, base, targets):
    served = store.commit(store.stage_bundle(bundle))
    assert names(store) == [store.base_name, "sample/adapter-1", "sample/adapter-2", *DOMAINS]
    assert [model.name for model in served] == names(store)[1:]
    adapters = {name: read_adapter(bundle / "adapters" / name, targets) for name in ADAPTERS}
    assert contents(store) == {adapter.content for adapter in adapters.values()}
    for number, (name, spec) in enumerate(DOMAINS.items()):
        target = store.resolve(name)
        model = target.model
        by = f"sample/{spec.adapter}"
        assert (model.kind, model.parent, model.adapter) == ("domain", by, by)
        assert model.accuracy == pytest.approx(0.6 + 0.01 * number)
        assert (model.required, model.bundle) == (0.5, "sample@1")
        assert (model.prompt, model.labels) == (spec.prompt, tuple(spec.labels))
        assert model.head == spec.kind and model.root == str(bundle)
        assert (target.head is None) == (spec.kind is None)
        assert target.adapter.content == adapters[spec.adapter].content
        assert model.rank == target.adapter.rank == ADAPTERS[spec.adapter]["rank"]
        assert not target.adapter.modules  # the matrices are the memory's business
    assert store.resolve("plates").head.threshold == pytest.approx(0.2)
    by = store.resolve("sample/adapter-2").model
    expected = "adapter", store.base_name, None, "sample@1"
    assert (by.kind, by.parent, by.head, by.bundle) == expected
    assert bundles(store) == {"sample@1"}


def test_a_domain_without_an_adapter_is_answered_by_the_base_model(store, base, tmp_path):
    spec = DomainSpec(None, "classification", ["a", "b"], prompt="which?")
    folder = make_bundle(tmp_path / "bare", base, name="bare", domains={"bare": spec}, adapters={})
    store.commit(store.stage_bundle(folder))
    assert names(store) == [store.base_name, "bare"]  # a bundle may have no adapter at all
    target, short = store.resolve("bare"), store.base_name
    assert target.adapter is None
    assert target.head.labels == ("a", "b")
    assert (target.model.parent, target.model.adapter, target.model.rank) == (short, None, None)
    assert (target.model.bundle, target.model.loaded_at > 0) == ("bare@1", True)
    store.unregister("bundle", "bare")
    assert names(store) == [store.base_name]
    empty = make_bundle(tmp_path / "empty", base, name="empty", domains={}, adapters={})
    with pytest.raises(AdapterError, match="holds no domain"):
        store.stage_bundle(empty)


def test_a_plain_adapter_comes_is_replaced_and_goes(store, base, tmp_path):
    first = make_adapter(tmp_path / "a", base, seed=1, rank=4)
    second = make_adapter(tmp_path / "b", base, seed=2, rank=8)
    store.commit(store.stage_adapter("mine", first))
    before = store.resolve("mine")
    model = before.model
    assert (model.kind, model.parent, model.rank) == ("adapter", store.base_name, 4)
    store.commit(store.stage_adapter("other", first))
    assert len(contents(store)) == 1
    store.commit(store.stage_adapter("mine", second))
    assert store.resolve("mine").model.rank == 8
    assert store.resolve("mine").adapter.content != before.adapter.content
    assert before.model.rank == 4
    assert len(contents(store)) == 2
    store.unregister("adapter", "mine")
    assert names(store) == [store.base_name, "other"]
    with pytest.raises(UnknownModelError, match=r"no adapter is named mine.*other"):
        store.unregister("adapter", "mine")


def test_a_bundle_is_replaced_and_goes_as_a_whole(store, bundle, base, tmp_path):
    store.commit(store.stage_bundle(bundle))
    old = store.resolve("plates")
    fewer = {"plates": DomainSpec("adapter-1", labels=["plate"])}
    newer = make_bundle(tmp_path / "newer", base, version=2, domains=fewer, seed=5,
                        adapters={"adapter-1": {"rank": 4}})  # fmt: skip
    store.commit(store.stage_bundle(newer))
    assert names(store) == [store.base_name, "sample/adapter-1", "plates"]
    assert store.resolve("plates").model.bundle == "sample@2"
    assert store.resolve("plates").adapter.content != old.adapter.content
    with pytest.raises(BusyError, match="adapter sample/adapter-1 belongs to bundle sample"):
        store.unregister("adapter", "sample/adapter-1")
    with pytest.raises(UnknownModelError, match="no bundle is named sample@1"):
        store.unregister("bundle", "sample@1")
    store.unregister("bundle", "sample@2")
    assert names(store) == [store.base_name] and not bundles(store) and not contents(store)
    with pytest.raises(UnknownModelError, match="no bundle is named sample"):
        store.unregister("bundle", "sample")


def test_names_that_are_taken(store, bundle, base, tmp_path):
    store.commit(store.stage_bundle(bundle))
    before = names(store)
    plain = make_adapter(tmp_path / "plain", base, seed=1)
    for name in ("plates", "sample/adapter-1"):
        with pytest.raises(AdapterError, match=f"brings {name}"):
            store.commit(store.stage_adapter(name, plain))
    domains = {"new": DomainSpec("one"), "traffic": DomainSpec("one")}
    again = make_bundle(tmp_path / "again", base, name="again", domains=domains,
                        adapters={"one": {"rank": 2}})  # fmt: skip
    with pytest.raises(AdapterError, match="brings traffic"):
        store.commit(store.stage_bundle(again))
    assert names(store) == before and bundles(store) == {"sample@1"}
    for name in (base, "", " x", "a\nb"):
        with pytest.raises(AdapterError, match="name"):
            store.commit(store.stage_adapter(name, plain))


def test_a_bundle_for_another_base_model(store, tmp_path):
    other = save_random_llava(tmp_path / "other", seed=9)
    with pytest.raises(AdapterError, match="was made for base model"):
        store.stage_bundle(make_bundle(tmp_path / "b", str(other)))


def test_changed_files_are_refused(store, copied, base):
    for file in ("adapters/adapter-1/adapter_model.safetensors", "heads/scene.safetensors"):
        place = copied / file
        whole = place.read_bytes()
        place.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(AdapterError, match=f"{file}.*changed"):
            store.stage_bundle(copied)
        place.unlink()
        with pytest.raises(AdapterError, match=f"{file}.*missing"):
            store.stage_bundle(copied)
        place.write_bytes(whole)
    store.stage_bundle(copied)
    assert names(store) == [store.base_name]


def drop_sha(name):
    def change(folder):
        file = folder / MANIFEST
        manifest = json.loads(file.read_text())
        del manifest["files"][name]
        file.write_text(json.dumps(manifest))

    return change


def manifest_with(change):
    return lambda folder: rewrite(folder, change)


def written(text):
    return lambda folder: (folder / MANIFEST).write_text(text)


def wide_head(folder):
    make_label_head(folder / "heads/scene.safetensors", 7, ["forest", "street", "beach"], seed=1)
    rewrite(folder, lambda manifest: None)


def sick_adapter(folder):
    change_tensors(folder / "adapters/adapter-2", lambda _, tensor: tensor * torch.nan)
    rewrite(folder, lambda manifest: None)


def entry(value, *way):
    """Put a value into the manifest."""

    def change(manifest):
        for key in way[:-1]:
            manifest = manifest[key]
        manifest[way[-1]] = value

    return manifest_with(change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((entry(value, "name"), "name: ") for value in (None, 5, "", "a/b", "a@1", ["x"])),
        *((entry(value, "version"), "version: ") for value in (0, -1, "1", True, 1.5)),
        *((entry(v, "domains", "scene", "max_tokens"), "max_tokens: ") for v in (-1, "x")),
        *((entry(v, "domains", "scene", "threshold"), "threshold: Input should be")
          for v in ("0.5", True, float("nan"), float("inf"), [0.5])),
        (entry(float("nan"), "domains", "scene", "required"), "required: Input should be"),
        *((entry("high", "domains", "scene", "accuracy", by), f"{by}: Input should be")
          for by in ("test", "teacher")),
        (entry("forest", "domains", "scene", "labels"), "labels: Input should be"),
        (entry([1, 2, 3], "domains", "scene", "labels"), "labels.0: Input should be"),
        (entry("x" * 40_000, "domains", "scene", "prompt"), "prompt: String should have at most"),
        (entry(7, "adapters", "adapter-1", "path"), "path: Input should be"),
        (entry({}, "adapters"), "expected an adapter"),
        (entry(5, "domains", "scene", "adapter"), "adapter: Input should be a valid string, got 5"),
        (manifest_with(lambda m: m["domains"]["scene"].pop("adapter")), "adapter: Field"),
        (entry("x", "base"), "base: Input should be"),
        (entry(5, "base", "sha256"), "base.sha256: Input should be"),
        *((written(text * 10**5), "nested more than 64") for text in ("[", '{"a":')),
        *((drop_sha(file), "has no sha256") for file in (
            "adapters/adapter-2/adapter_model.safetensors",
            "adapters/adapter-2/adapter_config.json", "heads/scene.safetensors")),
        (entry(["beach", "street"], "domains", "scene", "labels"), "domain scene has labels"),
        (entry("adapter-9", "domains", "scene", "adapter"), "adapter-9"),
        *((entry(f"{head}.safetensors", "domains", "scene", "head"), "has no sha256")
          for head in ("heads/none", "../heads/scene")),
        (manifest_with(lambda m: m.pop("domains")), "manifest is damaged.*domains"),
        (entry(["head"], "domains", "scene"), "manifest is damaged"),
        (entry(0, "domains", "caption", "max_tokens"), r"max_tokens: .* got 0"),
        (wide_head, "expected shape"), (sick_adapter, "NaN or Inf"),
        (written("{}"), "schema version"), (written("[1]"), "manifest is damaged"),
        (written("{"), "no readable"), (written('{"schema_version": 1}'), "files: F"),
    ],
)  # fmt: skip
def test_damaged_bundles_change_nothing(damage, message, filled, copied):
    before = filled.models()
    damage(copied)
    with pytest.raises(AdapterError, match=message):
        filled.stage_bundle(copied)
    assert filled.models() == before


def test_what_a_domain_was_measured_with(store, copied):
    """Its media, their number and its questions come from the manifest and the examples."""

    def facts(manifest):
        domains = manifest["domains"]
        domains["scene"] |= {"media": "images"}
        domains["crowd"] |= {"media": "video"}
        domains["caption"] |= {"prompt": "read {}", "media": "images", "max_tokens": 24}

    (copied / GOLDEN).parent.mkdir()
    examples = [
        {"domain": "scene", "image": "a.png", "rest": ["b.png"]},
        {"domain": "scene", "image": "c.png", "rest": ["d.png"]},
        {"domain": "crowd", "image": "e.png", "rest": ["f.png", "g.png"], "media": "video"},
        {"domain": "plates", "image": "h.png"},
        {"domain": "plates", "image": "i.png", "rest": ["j.png"]},
        {"domain": "traffic", "image": "k.png", "question": "Find it.", "prompt": "it"},
    ]
    (copied / GOLDEN).write_text(json.dumps(examples))
    rewrite(copied, facts)
    store.commit(store.stage_bundle(copied))
    found = {
        name: (one.media, one.images, one.prompted, one.max_tokens)
        for name, one in ((name, store.resolve(name).model) for name in DOMAINS)
    }
    assert found == {
        "scene": ("images", 2, False, None), "crowd": ("video", 3, False, None),
        "plates": (None, None, False, None), "traffic": (None, 1, True, None),
        "caption": ("images", None, True, 24),
    }  # fmt: skip
