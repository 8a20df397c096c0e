"""One door to all sources: kinds are recognised, splits are found, what does not fit is refused."""

import pytest

from tests.support.data_sets import picture, write_json
from valora_data import shards
from valora_data.cli import main
from valora_data.errors import DataError
from valora_data.schema import Answer, Sample, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import FORMATS, detect_kind, files_of, open_source
from valora_train.settings import DomainSettings, SourceSettings
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
