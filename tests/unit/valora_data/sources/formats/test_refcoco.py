"""RefCOCO files: what they say comes out, what is wrong is named."""

from pathlib import Path

import pytest

from tests.support.data_sets import picture, write_json
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import open_source


def read(file: Path, split: Split | None = None) -> list:
    """The samples of a split, or of all that are named."""
    streams = open_source(Source("refcoco", Task.GROUNDING, path=str(file)))
    chosen = list(streams) if split is None else [split if split in streams else None]
    return [sample for key in chosen for sample in streams[key]()]


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
    samples = sorted(read(file), key=lambda sample: sample.id.split("#")[1])
    assert [(s.id, s.prompt) for s in samples] == [
        ("7#1-0", "left cat"), ("7#1-1", "the cat"), ("8#2-0", "a dog"), ("7#3-0", "that"),
    ]  # fmt: skip
    assert samples[0].answer == Answer((Box(4, 5, 10, 12, "left cat"),))
    assert samples[2].answer == Answer((Box(0, 0, 9, 9, "a dog"),))
    assert [s.prompt for s in read(file, Split.TEST)] == ["a dog", "that"]


def test_references_with_their_own_boxes(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 0, (40, 30))
    ref = {"ref_id": 5, "file_name": "a.png", "bbox": [1, 2, 3, 4], "sentences": ["it"]}
    (sample,) = read(write_json(tmp_path / "flat.json", [ref]))
    assert (sample.id, sample.answer.boxes[0].xyxy) == ("a.png#5-0", (1, 2, 4, 6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotations": []}, "reference 2 has ann_id 11, which is not listed, and no bbox"),
        ({"images": []}, "has image_id 8, which is not listed, and no file_name"),
        ({"refs": []}, "has no references for None"),
        ({"refs": None}, "has no list 'refs'"),
        ({"refs": [{"ref_id": 1}]}, "entry 0 of 'refs' has no sentences"),
        (
            {"refs": [{"ref_id": 1, "sentences": [], "split": "test"}] * 2},
            "ref id 1 occurs more than once",
        ),
        (
            {"annotations": [{"id": 10, "bbox": [0, 0, 99, 9]}, {"id": 11, "bbox": [0, 0, 9, 99]}]},
            "outside its 40 × 30 image",
        ),
        (
            {"refs": [{"ref_id": 4, "image_id": 7, "ann_id": 10, "split": "test",
                       "sentences": [" "]}]},
            "reference 4: sentence 0 is empty",
        ),
    ],
)  # fmt: skip
def test_references_of_no_use(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(refcoco_file(tmp_path, **changes), Split.TEST)
