"""The command on the shipped model: it predicts every stage, and leaves nothing behind."""

from dataclasses import replace

import pytest
from rich.console import Console

from valora_data.schema import Task
from valora_data.sources.scenes.builtin import builtin_labels, builtin_prompt
from valora_train import checks, cli
from valora_train.errors import SettingsError
from valora_train.estimate import calibration
from valora_train.reporting.progress import Display
from valora_train.settings import (
    DomainSettings,
    LoraSettings,
    PathSettings,
    Settings,
    SourceSettings,
    TaskSettings,
    TeacherSettings,
    TrainSettings,
)

COUNTS = {"train": 12, "unlabelled": 12, "val": 10, "test": 10}
KINDS = {"person": Task.DETECTION, "weather": Task.CLASSIFICATION, "vehicle_color": Task.VQA}


def domain(name, teacher):
    task = KINDS[name]
    return DomainSettings(
        name=name, task=task, labels=list(builtin_labels(task, name)),
        prompt=builtin_prompt(task, name), required=0.5, teacher=teacher,
        taught_by=TeacherSettings(kind="small", options={"epochs": 5, "batch": 4}),
        source=SourceSettings(kind="scenes", counts=COUNTS),
    )  # fmt: skip


@pytest.fixture
def settings(tmp_path):
    return Settings(
        command="estimate",
        task=TaskSettings(name="some"),
        domains={
            "weather": domain("weather", "train"),
            "person": domain("person", "labels"),
            "vehicle_color": domain("vehicle_color", "labels"),
        },
        train=TrainSettings(threads=1, batch_size=4, lora=LoraSettings(rank=4, alpha=8)),
        paths=PathSettings(str(tmp_path / "work"), str(tmp_path / "bundles"),
                           f"sqlite:///{tmp_path}/mlflow.db"),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "STEPS", (2, 3))
    monkeypatch.setattr(calibration, "_program", lambda: 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_it_predicts_every_stage_and_leaves_nothing(settings, tmp_path, capsys):
    cli.run(settings, Display(Console(width=120)))
    said = capsys.readouterr().out
    for stage in ("start", "data", "teach", "distill", "without LoRA", "attempts", "export"):
        assert stage in said
    for case in ("best:", "expected:", "worst:"):
        assert case in said
    assert "3 of 3 domains drawn" in said
    assert list(tmp_path.iterdir()) == []


def test_several_processes_are_refused(settings, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="command=estimate measures one process"):
        checks.check(settings)


def test_what_a_run_would_refuse_is_refused(settings):
    wrong = replace(settings, train=replace(settings.train, lora=LoraSettings(rank=7)))
    with pytest.raises(SettingsError, match="rank must be one of"):
        cli.run(wrong, Display(Console(quiet=True)))
