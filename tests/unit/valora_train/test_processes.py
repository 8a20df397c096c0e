"""Worker processes and their cores, the end of one that trained with others, and `valora label`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.data_sets import picture
from valora_data import cpu
from valora_data.schema import Answer, Box
from valora_data.sources.formats.files import images_below
from valora_serve.predict.beside import compare, found_in
from valora_serve.predict.run import Prediction
from valora_teachers.base import Teacher
from valora_train import label, processes

PROGRAM = """
import atexit
from valora_train.model.distributed import end_process

class Kept:
    def __del__(self):
        print("taken down")

kept = Kept()
atexit.register(print, "at exit")
end_process()
"""


@pytest.mark.parametrize(
    ("cores", "asked", "device", "waiting", "expected"),
    [(3, 0, "cpu", 6, 3), (3, 0, "cpu", 0, 1), (3, 0, "cuda:1", 6, 1), (3, 5, "cpu", 6, 5),
     (3, 5, "cpu", 4, 4), (64, 0, "cpu", 37, 4)],
)  # fmt: skip
def test_one_for_each_core_and_none_idle(cores, asked, device, waiting, expected, monkeypatch):
    monkeypatch.setattr(processes, "usable_cores", lambda: cores)
    assert processes.preparing_processes(asked, device, waiting) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8), ({"cpu.max": ""}, 8), ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "300000 100000\n"}, 3), ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "20000 100000\n"}, 1), ({"cpu.max": "6400000 100000\n"}, 8),
    ],
)  # fmt: skip
def test_cores_of_a_container(tmp_path, monkeypatch, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cpu, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cpu.usable_cores() == expected
    monkeypatch.delattr(os, "sched_getaffinity")  # a system that knows no affinity
    monkeypatch.setattr(cpu, "CGROUP", tmp_path / "none")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpu.usable_cores() == 1


@pytest.mark.slow
def test_the_interpreter_is_not_taken_down_where_others_train_too():
    """A thread of gloo that wants the lock of an interpreter that ends aborts the process."""
    environment = {**os.environ, "WORLD_SIZE": "2"}
    said = subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True)
    assert said == "at exit\n"


class Corner(Teacher):
    """Finds a car in the corner of each image, and something that it hardly believes in."""

    batch = 2

    def load(self, weights):
        self.match_classes(weights, {0: "auto"})

    left = 99  # batches until it is interrupted

    def answer_batch(self, samples):
        assert len(samples) <= self.batch
        if not self.left:
            raise KeyboardInterrupt
        Corner.left -= 1
        boxes = (Box(0, 0, 5, 4, "car", 0.75), Box(5, 5, 9, 9, "car", 0.125))
        return [Answer(boxes)] * len(samples)


def test_a_folder_and_what_is_wrong(tmp_path, monkeypatch, capsys):
    def made(kind, weights, labels, options, task):
        teacher = Corner(task, labels, {}, options["names"])
        teacher.load(f"{kind} {weights}")
        return teacher

    def listed(folder):  # one of which is removed at once
        return [*images_below(folder), folder / "gone.png"]

    monkeypatch.setattr(label, "load_teacher", made)
    monkeypatch.setattr(label, "images_below", listed)
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        picture(tmp_path / "in" / f"{number}.png", number, (40 + number, 20))
    (tmp_path / "in" / "broken.png").write_bytes(b"none")
    asked = ["best.pt", "in", "--labels", "car", "--domain", "d"]
    assert label.main([*asked, "--names", "auto=car"]) == 0
    said = capsys.readouterr().err
    assert "left out: broken.png cannot be decoded" in said
    assert "left out: gone.png cannot be read (No such file" in said
    rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert {row["file"]: row["width"] for row in rows} == {"0.png": 40, "1.png": 41, "2.png": 42}
    found = {"label": "car", "confidence": 0.75, "box": [0, 0, 5, 4]}
    assert rows[0]["answer"] == {"detections": [found]}
    same = [Prediction(**row) for row in rows]
    assert compare(same, {row["file"]: found_in(row["answer"]) for row in rows}).agreement == 1
    for given, said in (
        ([*asked, "--labels", '"a, b"'], "best.pt has no class 'a, b', only auto: map one of its"),
        (["in/0.png", *asked[1:]], "yolo in/0.png has no class"),  # such as an .onnx
        (["best.pt", "in/broken.png", *asked[2:], "--names", "auto=car"], "holds no image that"),
        ([*asked, "--labels", ","], "--labels , names none"),
        ([*asked, "--min-score", "nan"], "--min-score is nan: name one from 0 to 1"),
        (["best.pt", "empty", *asked[2:], "--names", "auto=car"], "folder empty does not exist"),
        ([*asked, "--names", "auto"], "--names auto maps nothing: write CLASS=LABEL"),
        ([*asked, "--out=~/none/x"], f"{Path.home()}/none/x cannot be written (No such"),
        ([*asked, "--out", "."], "--out . is a folder: name a file"),
    ):
        assert label.main(given) == 1
        assert said in capsys.readouterr().err
    before, again = (tmp_path / "labels.jsonl").read_text(), [*asked, "--names=auto=car", "--out=b"]
    (tmp_path / ".labels.jsonl.partial").symlink_to("/dev/full")
    assert label.main([*asked, "--names", "auto=car"]) == 1  # its file is whole, or as it was
    assert "labels.jsonl cannot be written (No space" in capsys.readouterr().err
    assert before and (tmp_path / "labels.jsonl").read_text() == before
    Corner.left = 1
    with pytest.raises(KeyboardInterrupt):
        label.main(again)
    Corner.left = 1  # with the third picture
    assert label.main(again) == 0 and (tmp_path / "b").read_text() == before
