"""`valora-data`: what is wrong is found, named and shown; what is right passes."""

import pytest
from PIL import Image

from tests.support.data_sets import metadata, natural_picture, picture
from valora_data import shards
from valora_data.cli import main
from valora_data.schema import Split, Task
from valora_data.sources.scenes.builtin import SCENES, builtin_domain, builtin_samples


@pytest.fixture
def pets(tmp_path):
    for index, name in enumerate(
        ["train/cat/a.png", "train/cat/b.png", "train/dog/c.png", "val/cat/d.png", "val/dog/e.png"]
    ):
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        natural_picture(index).save(tmp_path / "pets" / name)
    return tmp_path / "pets"


def check(path, tmp_path, *more):
    return main(["check", str(path), "--out", str(tmp_path / "out"), *more])


def test_a_sound_set_passes(pets, tmp_path, capsys):
    assert check(pets, tmp_path) == 0
    out = capsys.readouterr().out
    assert "task classification" in out
    assert "nothing is wrong" in out
    rows = {line.split()[1]: line.split() for line in out.splitlines() if "│" in line}
    assert [rows["train"][i] for i in (3, 5, 7)] == ["3", "3", "3"]
    assert rows["cat"][3:6:2] == ["2", "1"]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"train.png", "val.png"}


def test_labels_that_differ(pets, tmp_path, capsys):
    (pets / "val" / "fox").mkdir()
    natural_picture(9).save(pets / "val" / "fox" / "f.png")
    assert check(pets, tmp_path) == 1
    assert "split val has labels that are not in train (fox)" in capsys.readouterr().out
    assert check(pets, tmp_path, "--labels", "cat") == 1
    out = capsys.readouterr().out
    assert "not in train" not in out and "there is only one class, 'cat'" in out


def test_questions_about_one_image_are_no_duplicates(tmp_path, capsys):
    picture(tmp_path / "set" / "a.png", 0)
    picture(tmp_path / "set" / "b.png", 0)
    rows = [("a.png", "one?", "1"), ("a.png", "two?", "2"), ("b.png", "one?", "1")]
    metadata(tmp_path / "set", *({"file_name": f, "question": q, "answer": a} for f, q, a in rows))
    assert check(tmp_path / "set", tmp_path) == 0
    out = capsys.readouterr().out
    assert "task vqa" in out
    assert "1 picture occurs again in its own split" in out


@pytest.mark.parametrize("task", [Task.DETECTION, Task.VIDEO, Task.CAPTION])
def test_what_the_factory_wrote(task, tmp_path, capsys):
    name = next(iter(SCENES[task]))
    for split in (Split.TRAIN, Split.TEST):
        some = builtin_samples(task, name, split, 7)
        shards.write(some, builtin_domain(task, name).labels, tmp_path / "data" / split)
    main(["check", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--task", task])
    out = capsys.readouterr().out
    assert f"task {task}" in out
    with Image.open(tmp_path / "out" / "train.png") as image:
        assert image.width > 6 * 190
        assert image.height > 2 * 190


def test_mistakes_are_told_in_one_sentence(tmp_path, pets, capsys):
    for path, more, message in (
        (tmp_path / "no", "", "no does not exist: check the path"),
        (pets, "--task=vqa", "has no metadata.jsonl, which task vqa needs"),
        (pets, "--column=x", "--column x names no column"),
        (pets, "--kind=tar", "unknown source kind 'tar': choose one of album"),
        (pets, "--kind=scenes", "does not tell its task: give one with --task"),
        (pets, "--labels=cat,fox", "has no category 'fox'"),
    ):
        assert main(["check", str(path), *filter(None, [more])]) == 1
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
