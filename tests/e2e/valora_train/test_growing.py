"""A bundle that grows, shrinks and changes: only what can be affected is trained and tested."""

from dataclasses import replace

import pytest

from tests.e2e.test_architectures import domain, replayed, settings_of
from tests.support.stores import run_quietly
from valora_data.contract.bundle import read_bundle
from valora_train.errors import SettingsError
from valora_train.stage import read_json

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "gate_here")]


class Shop:
    """Fuses in one folder, each time going on from what stands there."""

    def __init__(self, base, folder):
        self.base, self.folder = base, folder
        self.bundle = folder / "bundles" / "all"

    def settings(self, names, **fusion):
        settings = settings_of(self.base, self.folder, names)
        fusion = {"parent": str(self.bundle) if self.bundle.exists() else None, **fusion}
        return replace(settings, fusion=replace(settings.fusion, **fusion))

    def fuse(self, settings):
        run_quietly(settings, self.folder)
        return read_bundle(self.bundle)

    def attempts(self, bundle):
        stage = self.folder / "work" / bundle.manifest["lineage"]["fusion_stage"]
        return [name for one in read_json(stage / "fusion.json")["attempts"] for name in one["new"]]


def files(bundle, part):
    return {name: sha for name, sha in bundle.manifest["files"].items() if part in name}


def test_a_bundle_grows_shrinks_and_changes(base, tmp_path):
    shop = Shop(base, tmp_path)
    first = shop.fuse(shop.settings(("plant_type", "people_count")))
    assert shop.attempts(first) == ["plant_type", "people_count"]
    assert first.manifest["lineage"]["parent"] is None

    # One more that nothing can satisfy: the open adapter is tried and left as it was.
    names = ("plant_type", "people_count", "ball_path")
    wish = shop.settings(names, margin=0.0, unreachable="keep")
    wish.domains["ball_path"] = replace(wish.domains["ball_path"], required=1.0)
    second = shop.fuse(wish)
    assert shop.attempts(second) == ["ball_path", "ball_path"]
    assert second.version == 2
    parent = second.manifest["lineage"]["parent"]
    assert parent == {
        "version": 1, "fusion_stage": first.manifest["lineage"]["fusion_stage"],
    }  # fmt: skip
    assert list(second.domains) == list(names)
    assert {name: facts["adapter"] for name, facts in second.domains.items()} == {
        "plant_type": "adapter-1", "people_count": "adapter-1", "ball_path": "adapter-2",
    }  # fmt: skip
    for name in ("plant_type", "people_count"):
        # The target is that of the run's own margin.
        assert second.domains[name] | {"bar": 0.0} == first.domains[name] | {"bar": 0.0}
        assert files(second, f"heads/{name}") == files(first, f"heads/{name}")
    assert files(second, "adapters/adapter-1/") == files(first, "adapters/adapter-1/")

    # The same asked again is there already.
    again = replace(wish, fusion=replace(wish.fusion, parent=str(shop.bundle)))
    assert shop.fuse(again).version == 2

    # One leaves: nothing is trained, the others keep adapter, head and figures.
    third = shop.fuse(shop.settings(("people_count",)))
    assert shop.attempts(third) == []
    assert list(third.adapters) == ["adapter-1"]
    assert third.domains["people_count"] == first.domains["people_count"]
    assert files(third, "adapters/") == files(first, "adapters/adapter-1/")
    assert replayed(base, shop.bundle) == 2

    # One changes (another question), one is new: both are trained beside the one that stays, and
    # a name that once was an adapter's is not given again.
    changed = shop.settings(("people_count", "vehicle_color"))
    fourth = shop.fuse(changed)
    assert shop.attempts(fourth) == ["vehicle_color"]
    assert fourth.adapters["adapter-1"]["domains"] == ["people_count", "vehicle_color"]
    assert files(fourth, "adapters/") != files(first, "adapters/adapter-1/")
    changed = shop.settings(("people_count", "vehicle_color"))
    changed.domains["people_count"] = replace(domain("people_count"), prompt="count people")
    fifth = shop.fuse(changed)
    assert shop.attempts(fifth) == ["people_count"]
    assert fifth.domains["people_count"]["prompt"] == "count people"
    assert [bundle.name for bundle in sorted((tmp_path / "bundles").iterdir())] == [
        "all", "all@1", "all@2", "all@3", "all@4",
    ]  # fmt: skip


def test_what_does_not_fit_is_one_sentence(base, tmp_path):
    shop = Shop(base, tmp_path)
    shop.fuse(shop.settings(("plant_type",)))
    other = shop.settings(("plant_type", "people_count"))
    train = replace(other.train, lora=replace(other.train.lora, rank=8))
    with pytest.raises(SettingsError, match=r"other settings of train\.lora"):
        shop.fuse(replace(other, train=train))
    (result,) = (tmp_path / "work").glob("fuse-*/fusion.json")
    text = result.read_text()
    result.write_text(text.replace('"rank": 4', '"rank": 6'))  # as `grow` of earlier versions left
    with pytest.raises(SettingsError, match=r"other settings of train\.lora"):
        shop.fuse(other)
    result.write_text(text)
    (tmp_path / "work").rename(tmp_path / "gone")
    with pytest.raises(SettingsError, match=r"is no longer in"):
        shop.fuse(other)
