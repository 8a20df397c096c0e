"""Teachers that are trained here: continued after a kill to the bit, and what none can learn."""

import random
from dataclasses import replace

import pytest
import torch

import valora_data.checkpoint
from tests.unit.valora_teachers import test_small as small
from tests.unit.valora_teachers import test_yolo as yolo
from valora_data.checkpoint import Checkpoint
from valora_data.schema import Answer, Box, Sample, Task
from valora_teachers.base import CHECKPOINT, TeacherError
from valora_teachers.registry import make_teacher

SCENES, CLIPS = yolo.SCENES[:4], small.CLIPS[:4]
ODD = [*SCENES, Sample("odd", SCENES[0].image, Answer((Box(0, 0, 9, 9, "cone"),)))]


@pytest.mark.parametrize(
    ("kind", "samples", "options"),
    [(yolo, yolo.SCENES[:18], {}), (small, small.CLIPS, {"batch": 5, "size": 16})],
    ids=["yolo", "small"],
)
def test_a_training_that_was_killed_continues_to_the_bit(
    kind, samples, options, tmp_path, monkeypatch
):
    loss = kind.train(tmp_path / "whole", samples, epochs=3, **options)["loss"]
    monkeypatch.setattr(valora_data.checkpoint, "SECONDS", 0)
    save, epochs = Checkpoint.save, []

    def kill(self, *arguments):  # after each epoch but the last
        epochs.append(save(self, *arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "save", kill)
    for epoch in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            kind.train(tmp_path / "killed", samples, epochs=3, **options)
        assert len(epochs) == epoch  # none was trained again
        assert (tmp_path / "killed" / CHECKPOINT).is_file()
        torch.manual_seed(77)
        random.seed(77)
    assert kind.train(tmp_path / "killed", samples, epochs=3, **options)["loss"] == loss
    assert kind.same(tmp_path / "whole", tmp_path / "killed")
    assert not (tmp_path / "killed" / CHECKPOINT).exists()


@pytest.mark.parametrize(
    ("kind", "task", "labels", "samples", "message"),
    [
        ("huggingface", Task.CLASSIFICATION, small.WAYS, CLIPS, "is not trained here: name a"),
        ("yolo", Task.VIDEO, yolo.LABELS, SCENES, "trained here for detection only, not for video"),
        ("yolo", Task.DETECTION, yolo.LABELS, SCENES[:1], "needs at least 2 samples, got 1"),
        ("yolo", Task.DETECTION, yolo.LABELS, [replace(s, answer=Answer()) for s in SCENES],
         "no training image has a box"),
        ("yolo", Task.DETECTION, yolo.LABELS, ODD,
         "sample odd has label 'cone', which is none of ball, box"),
        ("small", Task.VQA, small.WAYS, CLIPS, "cannot do task vqa: let labels stand in"),
        ("small", Task.VIDEO, ("left", "up"), CLIPS,
         "sample c1 has label 'right', which is none of left, up"),
    ],
)  # fmt: skip
def test_what_none_can_learn(kind, task, labels, samples, message, tmp_path):
    with pytest.raises(TeacherError, match=message):
        make_teacher(kind, task, labels).train(samples, tmp_path)
