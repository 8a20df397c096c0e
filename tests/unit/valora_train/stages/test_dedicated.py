"""Domains that are trained alone first, and requirements that follow from what they reach."""

import json
import sys
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from tests.support.stores import new_store
from tests.unit.valora_train.test_cli import write_coco
from valora_data.schema import Task
from valora_train import cli
from valora_train.errors import SettingsError
from valora_train.reporting.progress import Display
from valora_train.settings import DomainSettings, FusionSettings, Settings
from valora_train.stage import write_json
from valora_train.stages import dedicated
from valora_train.stages.fuse import DomainInputs


@pytest.mark.parametrize("unreachable", ["fail", "keep"])
def test_a_domain_that_reaches_nothing_alone_keeps_its_contract(tmp_path, monkeypatch, unreachable):
    settings = Settings(fusion=FusionSettings(of_dedicated=0.9, unreachable=unreachable))
    alone = {"sky": (0.5, 0.0), "apple": (0.6, 0.4), "leaf": (None, None)}
    domain = DomainSettings("x", task=Task.DETECTION, labels=["x"], required=0.7)
    domains = [DomainInputs(replace(domain, name=name), tmp_path, tmp_path) for name in alone]
    for name, (val, test) in alone.items():
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / dedicated.REACHED, {"val": val, "test": test})
    monkeypatch.setattr(dedicated, "_train_missing", lambda *_: None)
    monkeypatch.setattr(dedicated, "_key", lambda _: "key")
    monkeypatch.setattr(
        dedicated, "dedicated_stage",
        lambda _, item: SimpleNamespace(folder=lambda _: tmp_path / item.settings.name),
    )  # fmt: skip
    display = Display(Console(file=StringIO(), width=300))
    if unreachable == "fail":
        with pytest.raises(SettingsError, match=r"reached by sky, leaf, .*raise train.steps"):
            dedicated.measure_dedicated(settings, domains, display)
        return
    found = dedicated.measure_dedicated(settings, domains, display)
    assert [item.dedicated for item in found] == [None, (0.6, 0.4, 0.9), None]
    assert found[0].contract == {"required": 0.7, "of_teacher": None}
    assert "reached by sky, leaf" in display.console.file.getvalue()


@pytest.fixture
def prepared(tmp_path, monkeypatch, capfd, random_llava):
    """Runs the command on two domains that take labels instead of a teacher; gives its output."""
    monkeypatch.chdir(tmp_path)
    new_store(tmp_path)
    dog = write_coco(tmp_path / "dogs", colour="blue", name="dog")
    given = [
        *write_coco(tmp_path / "cats"), *dog[1:], "domains.cat.teacher=labels", "train.flip=false",
        "domains.dog.teacher=labels", f"model.id={random_llava}", "train.probe_steps=20",
    ]  # fmt: skip

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["valora-train", *given, *arguments])
        cli.main()
        return capfd.readouterr().out

    return run


@pytest.mark.slow
def test_requirements_follow_from_dedicated_adapters(prepared, tmp_path):
    asked = ["command=fuse", "fusion.of_dedicated=0.5", "fusion.unreachable=keep", "processes=2",
             "fusion.head_only=false", "fusion.processes=2", "train.seed=4", "train.steps=60",
             "train.threads=1", "train.batch_size=8", "train.lora.rank=4"]  # fmt: skip
    out = prepared(*asked)
    done = [line.split() for line in out.splitlines() if line.endswith(" s")]
    assert sorted(" ".join(words[:2]) for words in done if words[0] in ("data", "distill")) == [
        "data cat", "data dog", "distill cat:", "distill dog:",
    ]  # fmt: skip
    (folder,) = tmp_path.glob(".valora/fuse-own-*[0-9a-f]")
    fused = json.loads((folder / "fusion.json").read_text())
    for name in ("cat", "dog"):
        (alone,) = tmp_path.glob(f".valora/alone-{name}-*[0-9a-f]")
        reached = json.loads((alone / dedicated.REACHED).read_text())
        assert 0 < fused["domains"][name]["required"] == pytest.approx(0.5 * reached["test"])
        contract = {"required": None, "of_teacher": None, "of_dedicated": 0.5}
        assert fused["domains"][name]["contract"] == contract
    assert "dedicated adapter's" in out

    # A domain that shares with no other takes its dedicated adapter; nothing is trained again.
    prepared(*asked, "task.only=[cat]")
    (alone,) = tmp_path.glob(".valora/alone-cat-*[0-9a-f]")
    mine = load_file(alone / "snapshots" / dedicated.FILE)
    (file,) = tmp_path.glob(".valora/fuse-own-*[0-9a-f]/snapshots/adapter-1-01.safetensors")
    taken = load_file(file)
    assert set(taken) == set(mine)
    assert all(torch.equal(taken[name], mine[name]) for name in mine if name.startswith("lora/"))
