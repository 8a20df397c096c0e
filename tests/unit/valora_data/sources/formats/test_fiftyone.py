"""FiftyOne's exports: fields, splits by tags, media in other places, faults."""

import json
from pathlib import Path

import pytest

from tests.support.data_sets import picture
from valora_data.errors import DataError
from valora_data.schema import Box, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.registry import detect_kind, files_of, open_source


def detections(*rows):
    found = [{"_cls": "Detection", "label": label, "bounding_box": box} for label, box in rows]
    return {"_cls": "Detections", "detections": found}


def sample(name, tag="good", **fields):
    return {"filepath": f"data/{name}.png", "tags": [tag], **fields}


def export(folder, *samples):
    for each in samples:
        if "filepath" in each:
            picture(folder / "data" / Path(each["filepath"]).name, 3, (40, 20))
    (folder / "samples.json").write_text(json.dumps({"samples": samples}))
    (folder / "metadata.json").write_text(json.dumps({"name": "pets", "version": "1.7.0"}))


def read(folder, task=Task.DETECTION, **more):
    splits = open_source(Source("fiftyone", task, path=str(folder), **more))
    return {split: list(stream()) for split, stream in splits.items()}


def test_boxes_are_shares_of_the_image(tmp_path):
    box = detections(("cat", [0.25, 0.5, 0.5, 0.25]))
    export(tmp_path, sample("a", ground_truth=box), sample("b", ground_truth=None))
    assert detect_kind(tmp_path) == detect_kind(tmp_path / "samples.json") == "fiftyone"
    first, second = read(tmp_path, labels=("cat",))[None]
    assert (first.id, second.answer.boxes) == ("data/a.png", ())
    assert first.answer.boxes == (Box(10.0, 10.0, 30.0, 15.0, "cat"),)
    files = files_of(Source("fiftyone", Task.DETECTION, path=str(tmp_path)))
    assert {file.name for file in files} == {"samples.json", "a.png", "b.png"}


def test_tags_are_splits(tmp_path):
    box = detections(("cat", [0, 0, 0.5, 0.5]))
    tags = {"a": "train", "b": "validation", "c": "Test", "d": "train"}
    export(tmp_path, *(sample(name, tag, ground_truth=box) for name, tag in tags.items()))
    assert {split: [one.id[5] for one in found] for split, found in read(tmp_path).items()} == {
        None: ["a", "d"], Split.VAL: ["b"], Split.TEST: ["c"],
    }  # fmt: skip


def test_labels_of_another_field_and_media_elsewhere(tmp_path):
    label = {"_cls": "Classification", "label": "cat"}
    export(tmp_path, {"filepath": "/gone/a.png", "kind": label})
    more = {"images": str(tmp_path / "data")}
    assert read(tmp_path, Task.CLASSIFICATION, **more)[None][0].answer.label == "cat"
    with pytest.raises(DataError, match=r"source\.columns\.label names another"):
        read(tmp_path, Task.CLASSIFICATION, columns={"label": "other"}, **more)


def test_faults_are_named(tmp_path):
    wrong = detections(("cat", [0.5, 0.5, 0.9, 0.2]), ("cat", "none"), (None, [0, 0, 1, 1]))
    two = {"predictions": detections(("cat", [0, 0, 0.5, 0.5])), "other": detections()}
    export(tmp_path, sample("a", ground_truth=wrong), sample("b", **two), {"tags": []})
    reader = ImageReader.for_check("set")
    read(tmp_path, reader=reader)
    said = " ".join(fault.text for fault in reader.faults.found)
    for part in ("lies outside", "is not four numbers", "detection 3 has no label",
                 "sample 2 has no filepath", "only in predictions"):  # fmt: skip
        assert part in said
    (tmp_path / "samples.json").write_text("[1]")
    with pytest.raises(DataError, match="FiftyOneDataset"):
        read(tmp_path)
