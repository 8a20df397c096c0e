"""Trainings of small models that were killed continue to the bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import valora_data.checkpoint
from tests.unit.valora_teachers.test_small import QUICK, WAYS, clip
from tests.unit.valora_teachers.test_yolo import LABELS, SCENES, TINY
from valora_data.checkpoint import Checkpoint
from valora_data.schema import Task
from valora_teachers.progress import CHECKPOINT
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
