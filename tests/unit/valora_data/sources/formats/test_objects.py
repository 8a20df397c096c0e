"""Grounding data of ms-swift and of Qwen-VL: units, names, several entries of one image, faults."""

import json

import pytest

from tests.support.data_sets import picture
from valora_data.errors import DataError
from valora_data.schema import Box, Task
from valora_data.sources.base import Source
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.registry import detect_kind, files_of, open_source

SIZE = (200, 100)


def write(tmp_path, *entries, name="set.jsonl"):
    for image in ("a.png", "b.png"):
        picture(tmp_path / image, ord(image[0]), SIZE)
    lines = "\n".join(map(json.dumps, entries))
    (tmp_path / name).write_text(json.dumps(entries) if name.endswith(".json") else lines)
    return tmp_path / name


def read(file, task=Task.GROUNDING, **more):
    given = Source(detect_kind(file), task, path=str(file), **more)
    return list(open_source(given)[None]())


def swift(image, ref, bbox, **more):
    asked = {"role": "user", "content": "<image>Where is <ref-object>?"}
    said = {"role": "assistant", "content": "<bbox>"}
    objects = {"ref": ref, "bbox": bbox, **more}
    return {"messages": [asked, said], "images": [image], "objects": objects}


def qwen(image, *found, fence=False):
    text = json.dumps(list(found))
    turns = [
        {"from": "human", "value": "<image>\nFind the birds."},
        {"from": "gpt", "value": f"```json\n{text}\n```" if fence else text},
    ]
    return {"image": image, "conversations": turns}


def test_swift_in_pixels_and_in_shares(tmp_path):
    file = write(
        tmp_path,
        swift("a.png", ["bird", "nest"], [[10, 20, 50, 60], [100, 10, 180, 90]]),
        swift("b.png", ["bird"], [[0.1, 0.2, 0.5, 0.6], [0, 0, 1, 1]], bbox_type="norm1"),
    )
    assert detect_kind(file) == "swift"
    found = {sample.id: sample for sample in read(file)}
    assert {key: sample.prompt for key, sample in found.items()} == {
        "a.png#0": "bird", "a.png#1": "nest", "b.png": "bird",
    }  # fmt: skip
    assert found["a.png#1"].answer.boxes == (Box(100, 10, 180, 90, "nest"),)
    assert [box.xyxy for box in found["b.png"].answer.boxes] == [
        pytest.approx((20, 20, 100, 60)), pytest.approx((0, 0, 200, 100)),
    ]  # fmt: skip
    names = [path.name for path in files_of(Source("swift", Task.GROUNDING, path=str(file)))]
    assert names == ["set.jsonl", "a.png", "b.png"]


def test_entries_of_one_image_are_one_sample_of_detection(tmp_path):
    boxes = {"bird": [10, 20, 50, 60], "nest": [100, 10, 180, 90]}
    entries = [swift("a.png", [name], [boxes[name]]) for name in ("bird", "nest", "bird")]
    file = write(tmp_path, *entries, name="set.json")
    (sample,) = read(file, Task.DETECTION, labels=("bird", "nest"))
    assert sample.answer.boxes == tuple(Box(*box, name) for name, box in boxes.items())
    (some,) = read(file, Task.DETECTION, labels=("nest",))
    assert [box.label for box in some.answer.boxes] == ["nest"]


def test_qwen_on_a_grid(tmp_path):
    file = write(
        tmp_path,
        qwen("a.png", {"bbox_2d": [100, 200, 500, 1000], "label": "bird"}, fence=True),
        qwen("b.png", {"bbox_2d": [0, 0, 250, 500]}),
    )
    assert detect_kind(file) == "qwen3-vl"
    first, second = read(file)
    assert first.answer.boxes == (Box(20, 20, 100, 100, "bird"),)
    assert (second.prompt, second.answer.boxes[0].xyxy) == ("Find the birds.", (0, 0, 50, 50))


def test_qwen_in_pixels(tmp_path):
    picture(tmp_path / "wide.png", 3, (1200, 40))
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}
    said = {"role": "assistant", "content": '[{"bbox_2d": [900, 4, 1100, 30], "label": "cat"}]'}
    file = write(tmp_path, {"images": ["wide.png"], "messages": [asked, said]})
    assert detect_kind(file) == "qwen2.5-vl"
    (sample,) = read(file)
    assert sample.answer.boxes == (Box(900, 4, 1100, 30, "cat"),)


def test_faults_are_named(tmp_path):
    file = write(
        tmp_path,
        swift("a.png", ["bird", "nest"], [[1, 2, 3, 4]]),
        swift("a.png", ["bird"], [[1, 2, 3]]),
        swift("a.png", ["bird"], [[1, 2, 3, 4]], bbox_type="share"),
        {"messages": [], "objects": {}, "images": ["a.png", "b.png"]},
        swift("b.png", ["bird"], [[10, 10, 900, 20]]),
    )
    reader = ImageReader.for_check("set")
    read(file, reader=reader)
    said = " ".join(fault.text for fault in reader.faults.found)
    for part in ("2 names in objects.ref for 1", "four numbers", "real or norm1", "2 images",
                 "lies outside"):  # fmt: skip
        assert part in said
    broken = qwen("a.png", {"bbox_2d": [1, 2, 3, 4]})
    broken["conversations"][1]["value"] += " and"
    with pytest.raises(DataError, match="no valid JSON"):
        read(write(tmp_path, qwen("b.png", {"bbox_2d": [1, 2, 3, 4]}), broken, name="b.jsonl"))
