"""Trainings of small models that were killed continue to the bit."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import valora_data.checkpoint
import valora_teachers.progress
from tests.unit.valora_teachers.test_small import QUICK, WAYS, clip
from tests.unit.valora_teachers.test_yolo import LABELS, SCENES, TINY
from valora_data.checkpoint import Checkpoint
from valora_data.schema import Answer, Task
from valora_teachers.progress import CHECKPOINT
from valora_teachers.registry import train_teacher
from valora_teachers.small import train_small
from valora_teachers.yolo import train_yolo


class Killed(Exception):
    pass


def small(folder: Path) -> tuple[dict, float]:
    settings = replace(QUICK, epochs=3, batch=5, size=16)
    clips = [clip(seed) for seed in range(18)]
    report = train_small(clips, Task.VIDEO, WAYS, folder, settings=settings)
    return load_file(folder / "teacher" / "model.safetensors"), report.loss


def detector(folder: Path) -> tuple[dict, float]:
    report = train_yolo(SCENES[:18], LABELS, folder, settings=replace(TINY, epochs=3))
    saved = torch.load(folder / "teacher.pt", weights_only=False)
    return saved["model"].state_dict(), report.loss


@pytest.mark.parametrize("train", [small, detector])
@pytest.mark.parametrize("killed_at", [1, 4, 5])
def test_a_training_that_was_killed_continues_to_the_bit(
    train, killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weights, loss = train(tmp_path / "whole")
        monkeypatch.setattr(valora_data.checkpoint, "SECONDS", 0)
        save, count = Checkpoint.save, [0]

        def kill(self, *arguments):
            written = save(self, *arguments)
            count[0] += 1
            if count[0] == killed_at:
                raise Killed
            return written

        monkeypatch.setattr(Checkpoint, "save", kill)
        with pytest.raises(Killed):
            train(tmp_path / "killed")
        assert (tmp_path / "killed" / CHECKPOINT).is_file()
        torch.manual_seed(77)
        again, again_loss = train(tmp_path / "killed")
    finally:
        torch.set_num_threads(threads)
    assert again_loss == loss
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    assert not (tmp_path / "killed" / CHECKPOINT).exists()


@pytest.mark.parametrize("kind", ["small", "yolo"])
@pytest.mark.parametrize("share", [0.0, math.inf])
def test_validation_samples_draw_a_curve_and_change_nothing(
    kind: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valora_teachers.progress, "LOOK_SHARE", share)
    task, labels = (Task.VIDEO, WAYS) if kind == "small" else (Task.DETECTION, LABELS)
    samples = [clip(seed) for seed in range(30)] if kind == "small" else SCENES[:30]
    settings = replace(QUICK, size=16) if kind == "small" else TINY
    options = asdict(replace(settings, epochs=4, batch=5))
    seen: dict[bool, list[Mapping[str, float]]] = {True: [], False: []}
    weights = {}
    for looks, curve in seen.items():
        train_teacher(
            kind,
            samples[:18],
            labels,
            tmp_path / str(looks),
            options,
            lambda *found, curve=curve: curve.append(found[3]),
            task,
            samples[18:] if looks else (),
        )
        (file,) = (tmp_path / str(looks)).rglob("*.safetensors" if kind == "small" else "*.pt")
        weights[looks] = (
            load_file(file)
            if kind == "small"
            else torch.load(file, weights_only=False)["model"].state_dict()
        )
    names = {"validation loss", "validation accuracy"} if kind == "small" else {"validation loss"}
    assert [set(figures) for figures in seen[False]] == [{"lr"}] * 4
    looked = [names <= set(figures) for figures in seen[True]]
    assert looked == [True, *[share > 0] * 3]  # the first look shows what one takes
    losses = [figures["validation loss"] for figures in seen[True] if names <= set(figures)]
    assert all(math.isfinite(loss) for loss in losses)
    assert len(set(losses)) == len(losses)
    assert all(torch.equal(weights[True][name], value) for name, value in weights[False].items())


def test_samples_with_unknown_answers_are_left_out_of_the_curve(tmp_path: Path) -> None:
    clips = [clip(seed) for seed in range(18)]
    strange = [replace(one, answer=Answer(label="sideways")) for one in clips[:4]]
    seen: list[Mapping[str, float]] = []
    train_teacher(
        "small", clips, WAYS, tmp_path, asdict(replace(QUICK, epochs=1, batch=5, size=16)),
        lambda *found: seen.append(found[3]), Task.VIDEO, strange,
    )  # fmt: skip
    assert [set(figures) for figures in seen] == [{"lr"}]
