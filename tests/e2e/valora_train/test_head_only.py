"""Domains without an adapter, and fusions that continue after a domain was out of reach."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from mlflow import MlflowClient
from rich.console import Console

from tests.e2e.test_architectures import replayed, settings_of
from tests.support.stores import new_store
from valora_data.contract.bundle import read_bundle
from valora_train.cli import run
from valora_train.errors import UnreachableError
from valora_train.fusion.trainer import Trainer
from valora_train.reporting.progress import Display

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "gate_here")]


@pytest.fixture
def trained(monkeypatch):
    """The domains that adapters were trained on, in order."""
    names = []
    train = Trainer.train

    def counted(self, adapter, new, **options):
        names.extend(new)
        train(self, adapter, new, **options)

    monkeypatch.setattr(Trainer, "train", counted)
    yield names


def asks(base, folder, required, **fusion):
    new_store(folder)
    settings = settings_of(base, folder, tuple(required))
    for name, least in required.items():
        settings.domains[name] = replace(settings.domains[name], required=least)
    fusion = {"margin": 0.0, "head_only": True, **fusion}
    return replace(settings, fusion=replace(settings.fusion, **fusion))


def fuse(settings):
    console = Console(record=True, width=300, file=StringIO())
    run(settings, Display(console))
    return console.export_text()


def test_a_bundle_without_any_adapter(base, tmp_path, trained):
    required = {"plant_type": 0.1, "people_count": 0.1, "vehicle_color": 0.1}
    said = fuse(asks(base, tmp_path, required, margin=-1.0))
    assert trained == []
    bundle = read_bundle(tmp_path / "bundles" / "all")
    assert bundle.adapters == {}
    for name, facts in bundle.domains.items():
        assert facts["adapter"] is None
        assert (facts["head"] is None) == (name == "vehicle_color")  # what the model itself writes
        accuracy = facts["accuracy"]
        assert accuracy["test"] == accuracy["head_only"]
        assert re.fullmatch(
            rf"without LoRA {accuracy['val']:.3f} ≥ -0\.900 \(required 0\.100 − margin 1\.000\): "
            "takes no adapter",
            facts["reason"],
        )
        assert f"{name}: without LoRA {accuracy['val']:.3f} ≥ -0.900" in said
        assert (bundle.folder / "pictures" / f"{name}.png").is_file()
    card = (bundle.folder / "README.md").read_text()
    assert "peft import" not in card
    assert card.count("takes no adapter") == 3
    assert replayed(base, bundle.folder) == 6
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("valora/all")
    found = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in found if "mlflow.parentRunId" in run.data.tags} == {
        name
        for domain in required
        for name in (f"{domain} (no adapter)", f"data {domain}", f"distill {domain}")
    }


def test_what_is_trained_is_kept_when_a_domain_is_out_of_reach(base, tmp_path, trained):
    required = {"plant_type": 0.01, "vehicle_color": 0.9, "people_count": 1.0}
    settings = asks(base, tmp_path, required)
    keep = replace(settings, fusion=replace(settings.fusion, unreachable="keep"))
    for attempts in (["vehicle_color"], []):  # the second time, all that was tried is known
        with pytest.raises(UnreachableError) as found:
            fuse(settings)
        assert re.search(
            r"vehicle_color reached 0\.000 < 0\.900 \(required 0\.900\).*"
            r"unreachable=keep to export the domains that met \(plant_type\) after trying the "
            r"others \(people_count\)",
            str(found.value),
        )
        assert trained == attempts
        trained.clear()
    assert not (tmp_path / "bundles").exists()
    fuse(keep)
    assert trained == ["people_count"]
    trained.clear()
    bundle = read_bundle(tmp_path / "bundles" / "all")
    status = {name: (facts["adapter"], facts["status"]) for name, facts in bundle.domains.items()}
    assert status["plant_type"][0] is None
    # A random model writes no colour, with LoRA or without: the adapter would be worth nothing.
    assert status["vehicle_color"] == (None, "missed")
    assert "even alone" in bundle.domains["vehicle_color"]["reason"]
    assert status["people_count"][1] == "missed"
    assert replayed(base, bundle.folder) == 6
    # The other way round, the finished fusion is refused.
    with pytest.raises(UnreachableError, match=r"people_count reached .* \(required 1\.000\)"):
        fuse(settings)
    assert trained == []

    # The bundle is extended: what takes no adapter stays so, and nothing is trained.
    more = asks(base, tmp_path, {**required, "street_presence": 0.01}, unreachable="keep")
    more = replace(more, fusion=replace(more.fusion, parent=str(bundle.folder)))
    fuse(more)
    assert trained == []
    grown = read_bundle(bundle.folder)
    assert (grown.version, grown.domains["street_presence"]["adapter"]) == (2, None)
    for name in required:
        assert grown.domains[name] == bundle.domains[name]
    with pytest.raises(UnreachableError, match="vehicle_color"):
        fuse(replace(more, fusion=replace(more.fusion, unreachable="fail")))

    # Less is asked: the first attempt is taken over, and the gate measures what it reached.
    least = bundle.domains["people_count"]["accuracy"]["head_only_val"]
    fuse(asks(base, tmp_path, {**required, "people_count": least}, unreachable="keep"))
    assert trained == []
    less = read_bundle(bundle.folder)
    assert (less.adapters, less.manifest["attempts"]) == ({}, 1)
    assert less.domains["people_count"]["required"] == least
    assert less.domains["vehicle_color"] == bundle.domains["vehicle_color"]
