"""RefCOCO files: what they say comes out, what is wrong is named."""

from pathlib import Path

import pytest

from tests.support.data_sets import picture, write_json
from tests.support.detection_sets import read_split
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Split, Task


def read(file: Path, split: Split | None = None) -> list:
    return list(read_split("refcoco", file, split, task=Task.GROUNDING))


def refcoco_file(folder: Path, **changes: object) -> Path:
    for name in "ab":
        picture(folder / f"{name}.png", ord(name), (40, 30))
    refs = [
        {"ref_id": 1, "ann_id": 10, "image_id": 7, "split": "train",
         "sentences": [{"sent": "left cat", "raw": "Left cat!"}, {"raw": "the cat"}]},
        {"ref_id": 2, "ann_id": 11, "image_id": 8, "split": "testA", "sentences": ["a dog"]},
        {"ref_id": 3, "ann_id": 10, "image_id": 7, "split": "testB", "sentences": ["that"]},
    ]  # fmt: skip
    content = {
        "images": [{"id": 8, "file_name": "b.png"}, {"id": 7, "file_name": "a.png"}],
        "annotations": [{"id": 11, "bbox": [0, 0, 9, 9]}, {"id": 10, "bbox": [4, 5, 6, 7]}],
        "refs": refs,
    }
    return write_json(folder / "refs.json", content | changes)


def test_every_sentence_is_a_sample(tmp_path: Path) -> None:
    file = refcoco_file(tmp_path)
    first, second = read(file)
    assert [(s.id, s.prompt) for s in (first, second)] == [
        ("7#1-0", "left cat"), ("7#1-1", "the cat"),
    ]  # fmt: skip
    assert first.answer == Answer((Box(4, 5, 10, 12, "left cat"),))
    assert [(s.id, s.prompt) for s in read(file, Split.TEST)] == [
        ("8#2-0", "a dog"), ("7#3-0", "that"),
    ]  # fmt: skip
    ref = {"ref_id": 5, "file_name": "a.png", "bbox": [1, 2, 3, 4], "sentences": ["it"]}
    (sample,) = read(write_json(tmp_path / "flat.json", [ref]))
    assert (sample.id, sample.answer.boxes[0].xyxy) == ("a.png#5-0", (1, 2, 4, 6))


ONE = {"ref_id": 1, "image_id": 7, "ann_id": 10, "split": "test"}
FAULTS: dict[str, dict[str, object]] = {
    "reference 2 has ann_id 11, which is not listed, and no bbox": {"annotations": []},
    "has image_id 8, which is not listed, and no file_name": {"images": []},
    "has no references for None": {"refs": []},
    "has no list 'refs'": {"refs": None},
    "entry 0 of 'refs' has no sentences": {"refs": [ONE]},
    "ref id 1 occurs more than once": {"refs": [ONE | {"sentences": ["a"]}] * 2},
    "reference 1 has no sentences": {"refs": [ONE | {"sentences": []}]},
    "reference 1: sentence 0 is empty": {"refs": [ONE | {"sentences": [" "]}]},
    "outside its 40 × 30 image": {
        "annotations": [{"id": number, "bbox": [0, 0, 99, 9]} for number in (10, 11)],
    },
}


@pytest.mark.parametrize("message", list(FAULTS))
def test_references_of_no_use(tmp_path: Path, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(refcoco_file(tmp_path, **FAULTS[message]), Split.TEST)
