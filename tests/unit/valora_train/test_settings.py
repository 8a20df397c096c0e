"""Every setting that cannot be is refused before any work, by its name and with a remedy."""

import json
import os
import re
import subprocess
import sys
from dataclasses import is_dataclass
from functools import reduce
from pathlib import Path
from typing import get_type_hints

import pytest
from omegaconf import OmegaConf

from tests.support.configs import configured
from valora_data.contract.base_model import base_folder
from valora_data.errors import ValoraError
from valora_train import checks, settings
from valora_train.checks import check, check_contracts_asked, check_with_libraries
from valora_train.settings import from_config


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def plain():
    return OmegaConf.to_container(configured("task=detection", "task.only=[person]"), resolve=True)


def check_all(config, overrides=()):
    made = from_config(config)
    check_contracts_asked(made, overrides)
    check(made)
    check_with_libraries(made)


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = {"fusion.parent": "b", "paths.work": "w", "domains.person.teacher": "t.pt"}
    made = from_config(configured(*(f"++{place}='~/{end}'" for place, end in given.items())))
    found = made.fusion.parent, made.paths.work, made.domains["person"].teacher
    assert found == ("/home/me/b", "/home/me/w", "/home/me/t.pt")
    check_all(configured("task=detection", "task.only=[person]"))  # the default settings pass


def refused(plain, place, value):
    values = json.loads(json.dumps(plain))
    *groups, last = place.split(".")
    reduce(lambda group, name: group.setdefault(name, {}), groups, values)[last] = value
    with pytest.raises(ValoraError) as caught, pytest.MonkeyPatch.context() as patch:
        # Hydra's objects of so many settings take a tenth of a second.
        patch.setattr(settings.OmegaConf, "to_container", lambda given, **_: given)
        check_all(values)
    said = str(caught.value)
    assert "\n" not in said
    return said


def numbers(section, prefix, kinds="int|float"):
    """Places of all settings that are numbers."""
    for name, kind in get_type_hints(section, include_extras=True).items():
        if is_dataclass(kind):
            yield from numbers(kind, f"{prefix}{name}.", kinds)
        elif re.search(rf"\b({kinds})\b", str(kind)) and not str(kind).startswith("dict"):
            yield f"{prefix}{name}"


NUMBERS = [*numbers(settings.Settings, ""), *numbers(settings.DomainSettings, "domains.person.")]
WHOLE = [*numbers(settings.Settings, "", "int")]


def test_numbers(plain):
    assert len(NUMBERS) > 40
    for place in NUMBERS:
        for value in [-1, float("nan"), "many", True, [1], *[10**18] * (place in WHOLE)]:
            assert place.rpartition(".")[2] in refused(plain, place, value), (place, value)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("train.lora.rank", 7, "must be one of 4, 8, 16, 32, 64, 128, 256, got 7"),
        ("train.lora.targets", [], "train.lora.targets=.*at least 1"),
        ("train.lora.targets", ["query"], "tiny has no linear layers query for LoRA in its lang"),
        ("train.lora.targets", ["q_proj", "fc1"], "no linear layers fc1 .*correct train.lora"),
        ("train.lora.target", ["q_proj"], "did you mean targets"),
        ("train.flip", "perhaps", "bad setting train.flip='perhaps'"),
        ("heads.options", {"poetry": {}}, "poetry"),
        ("heads.options", {"context": {"token": 3}}, "heads.options.context.token=3.*mean tokens"),
        ("heads.options", {"context": {"tokens": True}}, "heads.options.context.tokens=True"),
        ("fusion.parent", "~nobody-here/b", "fusion.parent=~nobody-here/b holds no bundle"),
        ("model.id", "~nobody-here/m", "base model folder ~nobody-here/m does not exist"),
        ("model.id", "", "bad setting model.id=''"),
        ("model.id", "owner/no-such-model", "model.id=owner/no-such-model is no folder"),
        ("model.device", "gpu", "bad setting model.device='gpu'.*cpu"),
        ("model.attention", "flash_attention_2", "needs the package flash-attn"),
        ("paths.work", "", "paths.work=''"),
        ("paths.bundles", "/dev/null/x", "paths.bundles=/dev/null/x: /dev/null is a file"),
        ("paths.work", "x" * 300, "paths.work=x.*[Nn]ame too long.*choose another"),
        ("task.name", "a/b", "task.name='a/b'"),
        ("task.only", ["person", "person"], "task.only=.*twice"),
        ("domains.bicycle.name", "person", "two domains have one name .*person"),
        ("domains.person.labels", ["a", "a"], "needs a list of distinct labels"),
        ("domains.person.labels", [False], 'write .domains.person.labels.0="no"'),
        ("domains.person.teacher", "/no/best.pt", "person.teacher=/no/best.pt does not exist"),
        ("domains.person.source.kind", "coco", "source.path is missing"),
        ("domains.person.source.counts", {"valid": 3}, "bad setting .*counts"),
        ("domains.person.source.fractions", {"val": 2}, "fractions.val must be less .* 2 % is 0.0"),
        ("domains.person.source.fractions", {"val": 0}, "domains.person.source: fractions are all"),
        ("teacher.kind", "huggingface", "huggingface is not trained here: set domains.person"),
        ("teacher.options.epoch", 3, "unknown option epoch of teacher yolo"),
        ("context.encoder_steps", 3, "set context.form=memory_tokens"),
        ("context.start", "nowhere", "context.start=nowhere is no folder"),
        ("domains.dog", {"required": 0.8}, "domains.dog.name is missing: .* leave domains.dog out"),
        ("domains.person.of_teacher", 97, "must be less than or equal to 1, got 97: 97 % is 0.97"),
    ],
)  # fmt: skip
def test_each_wrong_value_is_named(plain, place, value, said):
    found = refused(plain, place, value)
    assert re.search(said, found), found


PERSON = ["task=detection", "task.only=[person]"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*PERSON, "domains.person.required=null", "task.of_teacher=null"],
         "person has no contract: set domains.person.required"),
        ([*PERSON, "domains.person.teacher=labels", "domains.person.of_teacher=0.9"],
         "domains.person.of_teacher=0.9 asks for a share of the teacher's accuracy, but the domain "
         "learns from labels"),
        (["task=vqa", "experiment=teacher97"],
         "task.of_teacher=0.97 asks for nothing, because every domain of task vqa learns from"),
        ([*PERSON, "teacher.kind=function", "domains.person.teacher=labeller"],
         "names no function"),
        ([*PERSON, "teacher.kind=function", "domains.person.teacher=no_such_module:label"],
         "write module:function"),
        ([*PERSON, "teacher.kind=small", "domains.person.teacher=best"],
         "teacher=best does not exist"),
        ([*PERSON, "model.quantize=nf4", "model.shard=true"],
         "set model.shard=false, or model.quantize"),
        (["+experiment=[paper,quick]", "domains.license_plate.of_teacher=0.9"],
         "experiment=paper asks for the paper's figures alone, but domain license_plate must also "
         "keep 0.9 of its"),
        (["fusion.of_dedicated=0.95", "domains.person.required=0.9"],
         "so that domains.person.required=0.9 would be ignored"),
        (["fusion.of_dedicated=0.95", "experiment=teacher97"],
         "experiment=teacher97 would be ignored"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other(overrides, message):
    with pytest.raises(ValoraError) as caught:
        check_all(configured(*overrides), overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_contracts_that_go_together():
    for overrides in (
        ["fusion=paper", "task.of_teacher=0.9"],
        ["fusion.of_dedicated=0.95", "task.of_teacher=null"],
    ):
        check_contracts_asked(from_config(configured(*overrides)), overrides)


def test_models_that_are_no_models(plain, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    assert "holds no config.json" in refused(plain, "model.id", str(folder))
    (folder / "config.json").write_text("{}")
    assert "holds no model*.safetensors" in refused(plain, "model.id", str(folder))
    for content in (b"", b"\xff" * 20, (9).to_bytes(8, "little") + b"{"):
        (folder / "model.safetensors").write_bytes(content)
        assert "is damaged" in refused(plain, "model.id", str(folder))
    tensor = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({"layers.0.q_proj.weight": tensor}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "architecture 'None'" in refused(plain, "model.id", str(folder))
    config = json.loads(Path(base_folder("tiny"), "config.json").read_text())
    for method in ("awq", "gptq"):
        config["quantization_config"] = {"quant_method": method, "bits": 4}
        (folder / "config.json").write_text(json.dumps(config))
        said = refused(plain, "model.id", str(folder))
        assert f"saved in a quantised form already ({method})" in said


def test_packages_that_are_missing_and_folders_that_cannot_be_written(plain, monkeypatch):
    monkeypatch.setattr(checks.quantized, "is_installed", lambda: False)
    said = refused(plain, "model.quantize", "nf4")
    assert "needs the package bitsandbytes: pip install 'valora[quantize]'" in said
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "paths.work=.valora: " in refused(plain, "paths.work", ".valora")


def test_nothing_heavy_is_imported_before_the_checks():
    program = (
        "import sys\nfrom valora_train import checks, cli, settings\n"
        "from hydra import compose, initialize_config_dir\n"
        "with initialize_config_dir(str(cli.config_folder()), version_base='1.3'):\n"
        "    made = settings.from_config(compose('config', overrides=['model.device=cpu']))\n"
        "checks.check(made)\n"
        "print(sorted({'torch', 'transformers', 'mlflow', 'peft', 'ultralytics', 'datasets',"
        " 'matplotlib'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
