"""Ultralytics' runs as domains: data sets that have moved, better runs, names."""

import os

import pytest
import yaml
from hydra import compose, initialize_config_dir

from tests.support.data_sets import natural_picture
from tests.support.detection_sets import write_yolo
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample, Task
from valora_data.sources.shelf import is_shelf, read_shelf
from valora_train.cli import config_folder
from valora_train.settings import from_config


def data_set(folder, *names, file="data.yaml", splits=("train", "val", "test")):
    answer, first = Answer((Box(36, 24, 60, 72, names[0]),)), len(folder.name)
    some = {split: [] for split in splits}
    for number in range(2 * len(splits)):
        one = Sample("x", natural_picture(first + number), answer)
        some[splits[number // 2]].append(one)
    write_yolo(some, names, folder).rename(folder / file)
    return folder / file


def run(folder, data, task="detect", score=None, age=0, weights="best.pt"):
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / weights).write_bytes(b"no pickle")
    os.utime(folder / "weights" / weights, (1e9 + age, 1e9 + age))
    args = {"task": task, "mode": "train", "model": "yolo11n.pt", "data": str(data)}
    (folder / "args.yaml").write_text(yaml.safe_dump(args))
    if score is not None:
        rows = f"epoch,  metrics/mAP50-95(B)\n1, 0.1\n2, {score}\n3, 0.05\n"
        (folder / "results.csv").write_text(rows)
    return folder


def test_models_with_their_data(tmp_path):
    pets = data_set(tmp_path / "pets", "cat", "dog")
    tools = data_set(tmp_path / "tools", "saw", file="tools.yaml", splits=("train", "val"))
    for split in ("train", "val"):
        for label in ("rose", "oak"):
            (tmp_path / "plants" / split / label).mkdir(parents=True)
    runs = tmp_path / "runs"
    run(runs / "detect" / "train", pets, score=0.4)
    run(runs / "detect" / "multitrain" / "saws", tools, task="segment", weights="last.pt")
    run(runs / "classify" / "train2", tmp_path / "plants", task="classify")
    run(runs / "obb" / "train", pets, task="obb")
    assert is_shelf(runs)
    assert not is_shelf(tmp_path / "pets")
    shelf = read_shelf(runs)
    assert [(name, one.task, one.labels, one.kind) for name, one in shelf.models.items()] == [
        ("plants", Task.CLASSIFICATION, ("oak", "rose"), "imagefolder"),
        ("saws", Task.DETECTION, ("saw",), "yolo"),
        ("pets", Task.DETECTION, ("cat", "dog"), "yolo"),
    ]  # fmt: skip
    assert shelf.models["pets"].score == 0.4
    assert shelf.models["saws"].weights.name == "last.pt"
    said = " ".join(shelf.notes)
    assert "task obb" in said
    assert "the data of saws has no test split" in said
    assert "the data of pets" not in said


def test_the_better_run_of_a_data_set_is_taken(tmp_path):
    pets = data_set(tmp_path / "pets", "cat")
    runs = tmp_path / "runs" / "detect"
    run(runs / "train", pets, score=0.4, age=0)
    run(runs / "train2", pets, score=0.6, age=1)
    run(runs / "train3", pets, score=0.5, age=2)
    shelf = read_shelf(tmp_path / "runs")
    assert shelf.models["pets"].run.name == "train2"
    assert sum("left out" in note for note in shelf.notes) == 2
    run(runs / "train4", pets, age=3)  # not known: the newest counts
    assert read_shelf(tmp_path / "runs").models["pets"].run.name == "train4"


@pytest.mark.parametrize("before", ["/home/other/", "C:\\Users\\other\\", "../../", "other/"])
def test_a_data_set_that_has_moved_is_found_beside_the_shelf(tmp_path, before):
    data_set(tmp_path / "project" / "datasets" / "pets", "cat")
    run(tmp_path / "project" / "runs" / "train", f"{before}datasets/pets/data.yaml")
    shelf = read_shelf(tmp_path / "project" / "runs")
    assert shelf.models["pets"].data == tmp_path / "project" / "datasets" / "pets" / "data.yaml"


def test_what_cannot_be_used_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_shelf(tmp_path / "runs")
    folder = run(tmp_path / "runs" / "train", "gone.yaml")
    for args, message in (
        (None, r"gone\.yaml is not there any more"),
        ("task: [", "is no YAML"),
        ("{task: detect, mode: val}", "is no training"),
        ("{task: obb}", "task obb has no upright boxes"),
        ("{task: detect}", "names no data"),
    ):
        if args is not None:
            (folder / "args.yaml").write_text(args)
        with pytest.raises(DataError, match=message):
            read_shelf(tmp_path / "runs")


def test_the_factory_reads_a_shelf(tmp_path):
    run(tmp_path / "runs" / "cats", data_set(tmp_path / "pets", "cat"))
    run(tmp_path / "runs" / "saws", data_set(tmp_path / "tools", "saw"))
    given = ["task=own", f"shelf={tmp_path / 'runs'}", "+domains.saws.of_teacher=0.9",
             "+domains.saws.source.max_faulty=0.5", "task.only=[saws,cats]",
             "teacher.threshold=0.35", "+domains.cats.taught_by.min_confidence=0.1"]  # fmt: skip
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        saws, cats = from_config(compose("config", overrides=given)).chosen()
    assert (saws.of_teacher, cats.of_teacher) == (0.9, 0.97)
    assert (saws.taught_by.threshold, cats.taught_by.threshold) == (0.35, 0.35)
    assert (saws.taught_by.min_confidence, cats.taught_by.min_confidence) == (0.05, 0.1)
    assert saws.source.max_faulty == 0.5
    assert (cats.labels, cats.prompt, cats.required) == (["cat"], "detect cats", None)
    assert cats.teacher == str(tmp_path / "runs" / "cats" / "weights" / "best.pt")
    assert cats.taught_by.kind == "yolo"
    assert cats.source.path == str(tmp_path / "pets" / "data.yaml")
