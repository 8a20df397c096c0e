"""Every setting that cannot be is refused at once, by its name and with a remedy."""

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from pathlib import Path
from typing import get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from valora_data.errors import ValoraError
from valora_train import checks, settings
from valora_train.checks import check, check_contracts_asked, check_with_libraries
from valora_train.cli import config_folder
from valora_train.configuration import from_config
from valora_train.errors import SettingsError


def configured(*overrides: str):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def plain():
    return configured("task=detection", "task.only=[person]")


def check_all(config) -> None:
    made = from_config(config)
    check(made)
    check_with_libraries(made)


def test_the_default_settings_pass(plain) -> None:
    check_all(plain)


def refused(config, place: str, value: object) -> str:
    values = OmegaConf.to_container(config)  # a copy of nodes takes five times as long
    *groups, last = place.split(".")
    reduce(lambda group, name: group.setdefault(name, {}), groups, values)[last] = value
    with pytest.raises(ValoraError) as caught:
        check_all(OmegaConf.create(values))
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["domains.person.relative=true", "domains.person.of_teacher=0.9"],
         "two shares of its teacher's accuracy, 0.8 by relative=true and of_teacher=0.9"),
        (["domains.person.relative=true", "domains.person.required=null"],
         "domains.person.required is null: set it"),
        (["domains.person.relative=true", "domains.person.required=3"],
         "domains.person.relative=true and must lie in (0, 1], got 3"),
        (["domains.person.required=null", "task.of_teacher=null"],
         "person has no contract: set domains.person.required"),
        (["domains.person.of_teacher=97"], "must be at most 1, got 97: 97 % is 0.97"),
        (["task.of_teacher=1.01"], "task.of_teacher must be at most 1, got 1.01"),
        (["domains.person.of_teacher=0"], "must be greater than 0, got 0"),
        (["domains.person.teacher=labels", "domains.person.of_teacher=0.9"],
         "domains.person.of_teacher=0.9 asks for a share of the teacher's accuracy, but the domain "
         "learns from labels"),
        (["domains.person.teacher=labels", "domains.person.relative=true"],
         "domains.person.relative=true asks for a share"),
        (["task=vqa", "task.only=[]", "experiment=teacher97"],
         "task.of_teacher=0.97 asks for nothing, because every domain of task vqa learns from"),
        (["task=counting", "task.only=[]", "experiment=relative"],
         "domains.license_plate has settings but no name, because task counting has no such"),
        (["+domains.dog.required=0.8"], "domains.dog has settings but no name"),
    ],
)  # fmt: skip
def test_contracts_that_cannot_be_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValoraError) as caught:
        check_all(configured("task=detection", "task.only=[person]", *overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("said", ["task.of_teacher=0.9", "domains.person.of_teacher=0.9"])
@pytest.mark.parametrize("experiment", ["experiment=paper", "+experiment=[paper,quick]"])
def test_experiment_paper_asks_for_the_papers_figures_alone(said: str, experiment: str) -> None:
    check_contracts_asked(from_config(configured("experiment=paper")), [experiment])
    asked = from_config(configured("experiment=paper", said))
    with pytest.raises(SettingsError, match=r"^experiment=paper asks .* keep 0\.9 of its teacher"):
        check_contracts_asked(asked, [experiment, said])
    check_contracts_asked(asked, ["fusion=paper", said])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["domains.person.required=0.9"], "so that domains.person.required=0.9 would be ignored"),
        (["task.of_teacher=0.99"], "so that task.of_teacher=0.99 would be ignored"),
        (["experiment=teacher97"], "so that experiment=teacher97 would be ignored"),
        (["experiment=paper"], "so that experiment=paper would be ignored"),
        (["experiment=mixed", "task=video"], "experiment=mixed is task=mixed, but task=video is"),
        (["task.of_teacher=null"], None),
        (["experiment=mixed", "task=mixed"], None),
    ],
)
def test_a_share_of_dedicated_adapters_is_the_only_contract(
    overrides: list[str], message: str | None
) -> None:
    asked = ["fusion.of_dedicated=0.95", *overrides]
    given = from_config(configured(*asked))
    if message is None:
        check_contracts_asked(given, asked)
        return
    with pytest.raises(SettingsError) as caught:
        check_contracts_asked(given, asked)
    assert message in str(caught.value)


@pytest.mark.parametrize("experiment", ["paper", "relative", "teacher97"])
def test_experiments_with_contracts_replace_shares_of_dedicated_adapters(experiment: str) -> None:
    assert configured("task=detection", f"experiment={experiment}").fusion.of_dedicated is None


def numbers(kind: type, prefix: str) -> list[str]:
    """Places of all settings that are numbers."""
    places, hints = [], get_type_hints(kind)
    for item in fields(kind):
        inner = hints[item.name] if is_dataclass(hints[item.name]) else None
        words = {"Count", "Whole", "Seed", "Positive", "Weight", "Share", "ShareBelowOne"}
        words |= {"ShareAboveZero", "float"}
        if inner is not None and inner.__name__ != "TaskSettings":
            places += numbers(inner, f"{prefix}{item.name}.")
        elif words & set(str(item.type).split()) or str(item.type) == "int":
            places.append(f"{prefix}{item.name}")
    return places


NUMBERS = numbers(settings.Settings, "") + numbers(
    settings.DomainSettings, "domains.person."
)  # fmt: skip


def test_the_table_has_all_numbers() -> None:
    assert {
        "model.batch_size", "train.lora.rank", "train.warmup", "train.augment.views", "heads.soft",
        "fusion.margin", "teacher.threshold", "domains.person.required",
        "domains.person.of_teacher",
        "domains.person.source.frames", "domains.person.source.max_faulty",
    } <= set(NUMBERS)  # fmt: skip
    assert len(NUMBERS) > 40


@pytest.mark.parametrize("place", NUMBERS)
def test_numbers(plain, place: str) -> None:
    wrong = [-1, float("nan"), "many", True, [1], -(10**30)]
    if not place.startswith("train.augment."):
        wrong.append(float("inf"))
    for value in wrong:
        said = refused(plain, place, value)
        assert place.rpartition(".")[2] in said, said


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("train.lora.rank", 7, "must be one of 4, 8, 16, 32, 64, 128, 256, got 7"),
        ("train.lora.rank", 100_000, "must be one of 4, 8"),
        ("train.lora.alpha", 0, "train.lora.alpha must be greater than 0"),
        ("train.lora.targets", [], "train.lora.targets is empty"),
        ("train.lora.targets", ["q_proj", "q_proj"], "twice"),
        ("train.lora.targets", ["query"], "has no projection query"),
        ("train.lora.target", ["q_proj"], "did you mean targets"),
        ("train.warmup", 2, "train.warmup must be less than 1, got 2"),
        ("train.warmup", 1, "train.warmup must be less than 1"),
        ("train.steps", 0, "train.steps must be greater than 0"),
        ("train.steps", 2.5, "bad setting train.steps=2.5"),
        ("train.lr", 0, "train.lr must be greater than 0"),
        ("train.flip", "perhaps", "bad setting train.flip='perhaps'"),
        ("train.seed", 2**40, "train.seed must be less than"),
        ("train.optimizer", "adam", "bad setting train.optimizer='adam'"),
        ("train.stepz", 3, "bad setting train.stepz=3: .*did you mean steps"),
        ("command", "estimate", "command=estimate was removed: start the run"),
        ("fusion.strategy", "exact", "fusion.strategy=exact was removed: fusion.strategy=affinity"),
        ("tracking.also", ["wandb"], "tracking was removed: MLflow has every run"),
        ("heads.nms_iou", 1.5, "heads.nms_iou must be at most 1"),
        ("heads.pooling", "best", "bad setting heads.pooling='best'"),
        ("heads.options", {"poetry": {}}, "poetry"),
        ("fusion.strategy", "best", "unknown fusion strategy 'best'"),
        ("fusion.order", "best", "bad setting fusion.order='best'"),
        ("fusion.parent", "nowhere", "fusion.parent=nowhere holds no bundle"),
        ("fusion.parent", "~nobody-here/b", "fusion.parent=~nobody-here/b holds no bundle"),
        ("model.id", "~nobody-here/m", "base model folder ~nobody-here/m does not exist"),
        ("model.id", "/nope", "base model folder /nope does not exist"),
        ("model.id", "./nope", "does not exist"),
        ("model.id", "", "model.id is empty"),
        ("model.id", "no-such-model", "model.id=no-such-model is no folder, and no model"),
        ("model.id", "owner/no-such-model", "model.id=owner/no-such-model is no folder"),
        ("model.device", "gpu", "model.device='gpu' is no device"),
        ("model.device", "cuda:99", "model.device=cuda:99: this machine.* set model.device=cpu"),
        ("model.dtype", "int8", "bad setting model.dtype='int8'"),
        ("model.quantize", "int3", "bad setting model.quantize='int3'"),
        ("model.attention", "flash_attention_2", "needs the package flash-attn"),
        ("paths.work", "", "paths.work is empty"),
        ("paths.work", "/proc/version", "paths.work=/proc/version: /proc/version is a file"),
        ("paths.work", "/proc/version/deep/er", "/proc/version is a file"),
        ("paths.bundles", "/dev/null/x", "paths.bundles=/dev/null/x"),
        ("paths.work", "x" * 300, "paths.work=x.* cannot be used .*[Nn]ame too long"),
        ("task.name", "a/b", "task.name='a/b' names a folder"),
        ("task.name", "", "task.name='' names a folder"),
        ("task.name", "..", "task.name='..' names a folder"),
        ("task.type", "poetry", "bad setting task.type='poetry'"),
        ("task.only", ["person", "person"], "task.only lists person twice"),
        ("task.only", ["dragon"], "unknown domain 'dragon'"),
        ("domains.bicycle.name", "person", "domains.bicycle and domains.person have one name"),
        ("domains.person.name", "a b", "domain name 'a b' must be letters"),
        ("domains.person.labels", [], "needs a list of distinct labels"),
        ("domains.person.labels", ["a", "a"], "needs a list of distinct labels"),
        ("domains.person.labels", [" "], "has an empty label"),
        ("domains.person.required", 1.5, r"required accuracy of domain person must lie in \(0, 1"),
        ("domains.person.required", 0, r"must lie in \(0, 1"),
        ("domains.person.teacher", "/no/best.pt", "teacher of domain person not found: /no/best"),
        ("domains.person.source.kind", "tar", "unknown source kind 'tar'"),
        ("domains.person.source.kind", "coco", "source.path is missing"),
        ("domains.person.source.counts", {"valid": 3}, "bad setting .*counts"),
        ("domains.person.source.fractions", {"val": 2}, "fractions.val must be at most 1"),
        ("domains.person.source.colour", 3, "bad setting domains.person.source.colour=3"),
        ("teacher.kind", "oracle", "unknown teacher kind 'oracle'"),
        ("teacher.kind", "huggingface", "huggingface is not trained here: set domains.person"),
        ("teacher.options.epoch", 3, "unknown option epoch of teacher yolo"),
        ("teacher.options.epochs", -3, "teacher.options.epochs=-3 is not possible"),
        ("teacher.options.epochs", "many", "teacher.options.epochs='many'"),
        ("teacher.options.lr", float("nan"), "teacher.options.lr=nan"),
        ("teacher.options.size", 50, "size=50 .* a multiple of 32"),
        ("teacher.options.names", ["a"], "teacher.options.names=.* is no mapping"),
    ],
)  # fmt: skip
def test_each_wrong_value_is_named(plain, place: str, value: object, said: str) -> None:
    found = refused(plain, place, value)
    assert re.search(said, found), found


def own(**more: object):
    config = configured("task=own", "+domain@domains.cells=yolo")
    OmegaConf.set_struct(config, False)
    given = {"name": "cells", "labels": ["red"], "source.path": "data.yaml"} | more
    for name, value in given.items():
        OmegaConf.update(config, f"domains.cells.{name}", value, merge=False)
    return config


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "data of domain cells not found: data.yaml does not exist"),
        ({"source.path": "."}, None),
        ({"source.path": ".", "source.unlabelled": "none"}, "none does not exist"),
        ({"source.path": ".", "source.images": "none"}, "none does not exist"),
        ({"source.path": ".", "source.fractions": {"val": 0}}, "fractions are all zero"),
    ],
)
def test_sources(more: dict, said: str | None) -> None:
    if said is None:
        return check(from_config(own(**more)))
    with pytest.raises(ValoraError, match=said):
        check(from_config(own(**more)))
    return None


@pytest.mark.parametrize(
    ("kind", "teacher", "said"),
    [
        ("function", "labeller", "names no function"),
        ("function", "no_such_module:label", "there is no module no_such_module"),
        ("huggingface", "./vit", r"teacher=\./vit does not exist"),
        ("small", "best", "teacher of domain person not found: best"),
    ],
)
def test_given_teachers(plain, kind: str, teacher: str, said: str) -> None:
    config = plain.copy()
    config.teacher.kind = kind
    config.domains.person.teacher = teacher
    with pytest.raises(ValoraError, match=said):
        check(from_config(config))


def test_models_that_are_no_models(plain, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert "holds no config.json" in refused(plain, "model.id", str(folder))
    (folder / "config.json").write_text("{}")
    assert "holds no model*.safetensors" in refused(plain, "model.id", str(folder))
    for content in (b"", b"\xff" * 20, (9).to_bytes(8, "little") + b"{"):
        (folder / "model.safetensors").write_bytes(content)
        assert "is damaged" in refused(plain, "model.id", str(folder))
    header = json.dumps({"layers.0.q_proj.weight": {}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "has no projection k_proj" in refused(plain, "model.id", str(folder))


def test_a_base_model_in_4_bits(plain, monkeypatch) -> None:
    config = plain.copy()
    config.model.quantize = "nf4"
    check_all(config)
    assert "set model.shard=false, or model.quantize=null" in refused(config, "model.shard", True)
    monkeypatch.setattr(checks.quantized, "is_installed", lambda: False)
    said = refused(plain, "model.quantize", "nf4")
    assert said == (
        "model.quantize=nf4 needs the package bitsandbytes: pip install 'valora[quantize]', or set "
        "model.quantize=null"
    )


def test_folders_that_cannot_be_written(plain, monkeypatch) -> None:
    made = from_config(plain)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValoraError, match=r"paths\.work=\.valora: .* is not writable"):
        check(made)
    paths = replace(made.paths, work="/proc/self")

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "is_dir", fail)
    with pytest.raises(ValoraError, match=r"paths\.work=/proc/self cannot be used \(Input"):
        check(replace(made, paths=paths))


def test_nothing_heavy_is_imported_before_the_checks() -> None:
    program = (
        "import sys\nfrom valora_train import checks, cli, configuration\n"
        "from hydra import compose, initialize_config_dir\n"
        "with initialize_config_dir(str(cli.config_folder()), version_base='1.3'):\n"
        "    made = configuration.from_config(compose('config', overrides=['model.device=cpu']))\n"
        "checks.check(made)\n"
        "print(sorted({'torch', 'transformers', 'mlflow', 'peft', 'ultralytics', 'datasets',"
        " 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
