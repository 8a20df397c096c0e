"""One door to all sources, also of other packages; Ultralytics' runs as domains."""

import math
import os

import pytest
import yaml

from tests.support.configs import configured
from tests.support.data_sets import picture, write_json
from tests.support.detection_sets import marked, write_yolo
from valora_data import shards
from valora_data.cli import main
from valora_data.errors import DataError
from valora_data.registry import Registry
from valora_data.schema import Answer, Sample, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import FORMATS, detect_kind, files_of, open_source
from valora_data.sources.shelf import is_shelf, read_shelf
from valora_train.settings import DomainSettings, SourceSettings, from_config
from valora_train.stages.data import build_data, data_stage


def test_splits_of_a_folder(tmp_path):
    for index, name in enumerate(["train/cat/a.png", "train/dog/b.png", "test/cat/c.png"]):
        picture(tmp_path / name, index)
    source = Source("imagefolder", Task.CLASSIFICATION, path=str(tmp_path))
    splits = open_source(source)
    assert set(splits) == {None, Split.TEST}  # the rest, of which missing splits are taken
    assert [s.id for s in splits[None]()] == ["train/cat/a.png", "train/dog/b.png"]
    assert [s.answer.label for s in splits[Split.TEST]()] == ["cat"]
    for index, name in enumerate(["val/cat/d.png", "unlabelled/e.png"]):
        picture(tmp_path / name, 9 + index)
    splits = open_source(source)
    assert set(splits) == set(Split)
    stream = splits[Split.UNLABELLED]  # which can be read again
    assert [s.answer for s in stream()] == [s.answer for s in stream()] == [Answer()]


def test_kinds_are_recognised(tmp_path):
    assert detect_kind(write_json(tmp_path / "f.jsonl", {})) == "llava"
    image = picture(tmp_path / "images" / "cat" / "a.png", 0)
    shards.write([Sample("a", image, Answer())], (), tmp_path / "shard")
    assert detect_kind(tmp_path / "shard") == "shards"
    write_json(tmp_path / "h.json", {"x": 1})
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("h.json", r"h\.json is of no known kind"), ("nowhere", "nowhere does not exist"),
        ("empty", "holds no images, videos or tables"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            detect_kind(tmp_path / name)


def test_the_only_annotation_file_of_a_folder_is_found(tmp_path):
    """People name the folder that they unpacked, not the file in it."""
    picture(tmp_path / "images" / "train" / "a.png", 0)
    label = tmp_path / "labels" / "train" / "a.txt"
    label.parent.mkdir(parents=True)
    label.write_text("1 0.5 0.5 0.5 0.5\n")
    bare = Source("yolo", Task.DETECTION, path=str(tmp_path))
    lacking = r"has no data\.yaml: .* train: images/train, and names"
    assert detect_kind(tmp_path) == "yolo"
    with pytest.raises(DataError, match=lacking):
        open_source(bare)
    (tmp_path / "pets.yml").write_text("{train: images/train, names: [cat, dog]}")
    assert detect_kind(tmp_path) == "yolo"
    (found,) = open_source(bare)[None]()
    assert [box.label for box in found.answer.boxes] == ["dog"]
    assert tmp_path / "pets.yml" in set(files_of(bare))
    (tmp_path / "other.yaml").write_text("{}")  # which of them?
    with pytest.raises(DataError, match=lacking):
        open_source(bare)


def test_what_does_not_fit():
    for kind, task, path, message in (
        ("tar", Task.VQA, "x", "unknown source kind 'tar': choose one of album, coco, cvat, doc"),
        ("yolo", Task.VQA, "x", "yolo has no answers for task vqa: choose one of hub, im"),
        ("coco", Task.DETECTION, None, r"coco needs a path: set domains\.\w+\.source\.path"),
    ):
        with pytest.raises(DataError, match=message):
            open_source(Source(kind, task, path=path))
    for task in Task.all():
        assert sum(found().supports(task) for found in FORMATS.values()) >= 3


CSV = """
import csv

from valora_data.schema import Answer, Task
from valora_data.sources.formats.annotated import AnnotatedFormat, Record


class CsvFormat(AnnotatedFormat):
    answers, task = {"label"}, Task.CLASSIFICATION

    def recognises(self, location):
        return location.path.suffix == ".csv"

    def records(self, source, part, reading):
        with open(part, newline="") as file:
            rows = list(csv.DictReader(file))
        reading.total += len(rows)
        for row in rows:
            image = source.image_folder / row["file"]
            yield Record((image,), row["file"], answer=Answer(label=row["label"]))


extension = CsvFormat
"""


def test_a_format_of_another_package(installed, tmp_path, capsys):
    installed("valora.sources", "csv", CSV)
    names = [f"{index}.png" for index in range(24)]
    for index, name in enumerate(names):
        picture(tmp_path / "set" / name, index)
    rows = [f"{name},{('cat', 'dog')[i % 2]}" for i, name in enumerate(names)]
    file = tmp_path / "set" / "labels.csv"
    file.write_text("\n".join(["file,label", *rows]))

    assert main(["check", str(file), "--out", str(tmp_path / "out")]) == 0
    assert "task classification" in capsys.readouterr().out
    assert (tmp_path / "out" / "all.png").is_file()

    source = SourceSettings(kind="csv", path=str(file))
    domain = DomainSettings("pet", Task.CLASSIFICATION, ["cat", "dog"], source=source)
    before = data_stage(domain)
    assert {"source", "code"} <= set(before.inputs)
    build_data(domain, tmp_path / "data")
    found = {split: shards.open_shard(tmp_path / "data" / split) for split in Split}
    assert sorted(s.id for shard in found.values() for s in shard) == sorted(names)
    for sample in found[Split.TRAIN]:
        assert sample.answer.label == ("cat", "dog")[int(sample.id.removesuffix(".png")) % 2]


def test_names_of_extensions(installed):
    installed("valora.tests", "one", "extension = 'mine'")
    installed("valora.tests", "three", "extension = 3")
    installed("valora.tests", "bad", "raise RuntimeError('out of order')")
    things = Registry("valora.tests", "thing", {"one": "math:pi", "two": "no_module:x"}, DataError)
    assert things["one"] == math.pi  # a built-in name cannot be taken over
    assert things["three"] == 3
    for name, error, said in (
        ("two", ModuleNotFoundError, "no_module"),
        ("four", DataError, "unknown thing 'four': choose one of bad, one, three, two"),
        ("bad", DataError, r"thing 'bad' .* cannot be imported: out of order"),
    ):
        with pytest.raises(error, match=said):
            things[name]


def data_set(folder, *names, file="data.yaml", splits=("train", "val", "test")):
    first = len(folder.name)
    some = {split: marked(*names, count=2, first=first + 2 * n) for n, split in enumerate(splits)}
    return write_yolo(folder, some).rename(folder / file)


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
             "task.prompt=null", "+domains.saws.source.max_faulty=0.5",
             "task.only=[saws,cats]",
             "teacher.threshold=0.35", "+domains.cats.taught_by.min_confidence=0.1"]  # fmt: skip
    saws, cats = from_config(configured(*given)).chosen()
    assert (saws.of_teacher, cats.of_teacher) == (0.9, 0.97)
    assert (saws.taught_by.threshold, cats.taught_by.threshold) == (0.35, 0.35)
    assert (saws.taught_by.min_confidence, cats.taught_by.min_confidence) == (0.05, 0.1)
    assert saws.source.max_faulty == 0.5
    assert (cats.labels, cats.prompt, cats.required) == (["cat"], "detect cats", None)
    assert cats.teacher == str(tmp_path / "runs" / "cats" / "weights" / "best.pt")
    assert cats.taught_by.kind == "yolo"
    assert cats.source.path == str(tmp_path / "pets" / "data.yaml")
