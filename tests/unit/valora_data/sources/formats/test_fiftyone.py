"""FiftyOne's exports: fields, splits by tags, media in other places, faults."""

import json
from pathlib import Path

import pytest

from tests.support.data_sets import picture
from valora_data.errors import DataError
from valora_data.faults import Faults
from valora_data.schema import Box, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.registry import detect_kind, files_of, open_source

SIZE = (40, 20)


def detections(*rows):
    found = [
        {"_id": {"$oid": "1"}, "_cls": "Detection", "label": label, "bounding_box": box, "tags": []}
        for label, box in rows
    ]
    return {"_id": {"$oid": "2"}, "_cls": "Detections", "detections": found}


def export(folder, samples, **more):
    for sample in samples:
        if not Path(sample["filepath"]).is_absolute():
            picture(folder / sample["filepath"], len(sample["filepath"]), SIZE)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.json").write_text(json.dumps({"samples": samples}))
    (folder / "metadata.json").write_text(json.dumps({"name": "pets", "version": "1.7.0"} | more))
    return folder


def sample(name, **fields):
    return {"_id": {"$oid": name}, "filepath": f"data/{name}.png", "tags": [], **fields}


def source(folder, task=Task.DETECTION, **more):
    return Source("fiftyone", task, path=str(folder), **more)


def test_boxes_are_shares_of_the_image(tmp_path):
    box = detections(("cat", [0.25, 0.5, 0.5, 0.25]))
    folder = export(
        tmp_path / "set", [sample("a", ground_truth=box), sample("b", ground_truth=None)]
    )
    assert detect_kind(folder) == "fiftyone"
    assert detect_kind(folder / "samples.json") == "fiftyone"
    (stream,) = open_source(source(folder, labels=("cat",))).values()
    first, second = stream()
    assert first.id == "data/a.png"
    assert first.answer.boxes == (Box(10.0, 10.0, 30.0, 15.0, "cat"),)
    assert second.answer.boxes == ()
    names = {file.name for file in files_of(source(folder))}
    assert names == {"samples.json", "a.png", "b.png"}


def test_tags_are_splits(tmp_path):
    box = detections(("cat", [0, 0, 0.5, 0.5]))
    tags = {"a": ["good", "train"], "b": ["validation"], "c": ["test"], "d": ["train"]}
    samples = [sample(name, ground_truth=box) | {"tags": tag} for name, tag in tags.items()]
    folder = export(tmp_path / "set", samples)
    found = open_source(source(folder))
    ids = {split: [item.id for item in stream()] for split, stream in found.items()}
    assert ids == {
        None: ["data/a.png", "data/d.png"], Split.VAL: ["data/b.png"], Split.TEST: ["data/c.png"],
    }  # fmt: skip


def test_labels_of_another_field_and_media_elsewhere(tmp_path):
    samples = [
        {"filepath": f"/gone/{name}.png", "kind": {"_cls": "Classification", "label": label}}
        for name, label in (("a", "cat"), ("b", "dog"))
    ]
    folder = export(tmp_path / "set", samples)
    for name in "ab":
        picture(tmp_path / "media" / f"{name}.png", ord(name), SIZE)
    (stream,) = open_source(
        source(folder, Task.CLASSIFICATION, images=str(tmp_path / "media"), labels=("cat", "dog"))
    ).values()
    assert [item.answer.label for item in stream()] == ["cat", "dog"]
    named = source(
        folder, Task.CLASSIFICATION, images=str(tmp_path / "media"), columns={"label": "other"}
    )
    with pytest.raises(DataError, match=r"source\.columns\.label names another"):
        list(open_source(named)[None]())


def test_faults_are_named(tmp_path):
    samples = [
        sample("a", ground_truth=detections(("cat", [0.5, 0.5, 0.9, 0.2]), ("cat", "none"))),
        sample("b", predictions=detections(("cat", [0, 0, 0.5, 0.5])), other=detections()),
        {"tags": []},
    ]
    folder = export(tmp_path / "set", samples[:2])
    (folder / "samples.json").write_text(json.dumps({"samples": samples}))
    reader = ImageReader.for_check("set")
    list(open_source(source(folder, reader=reader))[None]())
    assert isinstance(reader.faults, Faults)
    said = " ".join(fault.text for fault in reader.faults.found)
    for part in ("lies outside", "is not four numbers", "no filepath", "only in predictions"):
        assert part in said


def test_what_is_no_export_is_refused(tmp_path):
    (tmp_path / "samples.json").write_text("[1]")
    with pytest.raises(DataError, match="FiftyOneDataset"):
        open_source(source(tmp_path))
