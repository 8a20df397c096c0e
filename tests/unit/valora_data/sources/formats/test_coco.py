"""COCO, RefCOCO and VQA: read like pycocotools reads them, refused with a clear sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from tests.support.data_sets import picture, write_json
from tests.support.detection_sets import read_split
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample, Split, Task

# Sparse ids in no order, a category that nobody asks for, a crowd, images of two shapes.
CATEGORIES = [{"id": 90, "name": "cat"}, {"id": 3, "name": "dog"}, {"id": 17, "name": "cow"}]
IMAGES = [
    {"id": 501, "file_name": "a.png", "width": 40, "height": 30},
    {"id": 7, "file_name": "sub/b.png", "width": 30, "height": 50},
    {"id": 42, "file_name": "c.png", "width": 20, "height": 20},
]
ANNOTATIONS = [
    {"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 2, 10, 20], "area": 200, "iscrowd": 0},
    {"id": 2, "image_id": 501, "category_id": 90, "bbox": [4.5, 0, 9.25, 30], "area": 277.5,
     "iscrowd": 0},
    {"id": 3, "image_id": 7, "category_id": 90, "bbox": [20, 40, 10, 10], "area": 100,
     "iscrowd": 0},
    {"id": 4, "image_id": 7, "category_id": 17, "bbox": [0, 0, 5, 5], "area": 25, "iscrowd": 0},
    {"id": 5, "image_id": 501, "category_id": 3, "bbox": [0, 0, 40, 30], "area": 900,
     "iscrowd": 1},
]  # fmt: skip


CONTENT = {"images": IMAGES, "annotations": ANNOTATIONS, "categories": CATEGORIES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for position, entry in enumerate(IMAGES):
        size = (int(entry["width"]), int(entry["height"]))
        Image.new("RGB", size, (position, 0, 0)).save(tmp_path / str(entry["file_name"]))
    return tmp_path


def read(folder: Path, content: object) -> list[Sample]:
    path = folder / "instances.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return list(read_split("coco", path, None, ("dog", "cat")))


def test_agrees_with_pycocotools(folder: Path) -> None:
    samples = {sample.id: sample for sample in read(folder, CONTENT)}
    reference = COCO(str(folder / "instances.json"))
    assert list(samples) == [str(entry["id"]) for entry in IMAGES]
    assert [one.image.getpixel((0, 0))[0] for one in samples.values()] == [0, 1, 2]
    for image_id, entry in reference.imgs.items():
        wanted = reference.getCatIds(catNms=["dog", "cat"])
        found = reference.loadAnns(
            reference.getAnnIds(imgIds=image_id, catIds=wanted, iscrowd=False)
        )
        expected = [
            ((x, y, x + w, y + h), reference.cats[annotation["category_id"]]["name"])
            for annotation in found
            for x, y, w, h in [annotation["bbox"]]
        ]
        sample = samples[str(image_id)]
        assert [(box.xyxy, box.label) for box in sample.answer.boxes] == expected
        assert sample.image.size == (entry["width"], entry["height"])
        assert sample.image.mode == "RGB"


def test_box_over_the_edge_by_rounding_is_clipped(folder: Path) -> None:
    annotations = [ANNOTATIONS[0] | {"bbox": [-0.6, 1, 31.5, 49.9]}]
    (box,) = read(folder, CONTENT | {"annotations": annotations})[1].answer.boxes
    assert box.xyxy == (0, 1, 30, 50)


FAULTS: dict[str, dict[str, Any] | str] = {  # more in tests/unit/valora_data/validation
    r"box \(25, 0, 35, 10\) lies outside its 30 .*check the unit": {
        "annotations": [ANNOTATIONS[0] | {"bbox": [25, 0, 10, 10]}],
    },
    r"instances\.json is not valid JSON .*export it again": '{"images": [',
    "has no list 'images': expected COCO instances": "[1, 2]",
    "has no list 'categories'": {"categories": None},
    "lists no images: the data set is empty": {"images": []},
    "category id 3 occurs more than once": {"categories": [*CATEGORIES, CATEGORIES[1]]},
    "no category 'dog', only cat": {"categories": CATEGORIES[:1]},
}


@pytest.mark.parametrize("message", list(FAULTS))
def test_what_is_refused(folder: Path, message: str) -> None:
    change = FAULTS[message]
    with pytest.raises(DataError, match=message):
        read(folder, CONTENT | change if isinstance(change, dict) else change)


def test_captions_agree_with_pycocotools(tmp_path: Path) -> None:
    for index in range(3):
        picture(tmp_path / f"{index}.png", index)
    images = [{"id": 40 + i, "file_name": f"{i}.png"} for i in range(3)]
    texts = [(40, "a cat"), (42, "a dog "), (40, "one cat")]
    annotations = [{"id": i, "image_id": image, "caption": text}
                   for i, (image, text) in enumerate(texts)]  # fmt: skip
    file = write_json(tmp_path / "captions.json", {"images": images, "annotations": annotations})
    samples = list(read_split("coco", file, task=Task.CAPTION))
    theirs = COCO(str(file))
    expected = {
        str(image): tuple(a["caption"].strip() for a in theirs.imgToAnns[image])
        for image in theirs.getImgIds()
        if theirs.imgToAnns[image]
    }
    assert {s.id: s.answer.captions for s in samples} == expected
    write_json(file, {"images": images, "annotations": []})
    with pytest.raises(DataError, match="no image has a caption"):
        list(read_split("coco", file, task=Task.CAPTION))


def read_refs(file: Path, split: Split | None = None) -> list[Sample]:
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
    first, second = read_refs(file)
    assert [(s.id, s.prompt) for s in (first, second)] == [
        ("7#1-0", "left cat"), ("7#1-1", "the cat"),
    ]  # fmt: skip
    assert first.answer == Answer((Box(4, 5, 10, 12, "left cat"),))
    assert [(s.id, s.prompt) for s in read_refs(file, Split.TEST)] == [
        ("8#2-0", "a dog"), ("7#3-0", "that"),
    ]  # fmt: skip
    ref = {"ref_id": 5, "file_name": "a.png", "bbox": [1, 2, 3, 4], "sentences": ["it"]}
    (sample,) = read_refs(write_json(tmp_path / "flat.json", [ref]))
    assert (sample.id, sample.answer.boxes[0].xyxy) == ("a.png#5-0", (1, 2, 4, 6))


ONE = {"ref_id": 1, "image_id": 7, "ann_id": 10, "split": "test"}
REFS: dict[str, dict[str, object]] = {
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


@pytest.mark.parametrize("message", list(REFS))
def test_references_of_no_use(tmp_path: Path, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_refs(refcoco_file(tmp_path, **REFS[message]), Split.TEST)


def read_vqa(
    questions: Path, annotations: Path, folder: Path, labels: list[str] = ()
) -> list[Sample]:
    more = {"images": str(folder), "annotations": str(annotations)}
    return list(read_split("vqa", questions, labels=labels, task=Task.VQA, **more))


def vqa_files(folder: Path) -> tuple[Path, Path]:
    questions = [
        {"question_id": 70, "image_id": 5, "question": "Is it red?"},
        {"question_id": 71, "image_id": 5, "question": "What is it?"},
        {"question_id": 72, "image_id": 6, "question": "Is it old? ", "image": "own.png"},
    ]
    given = {70: ["yes"] * 2 + ["no"], 71: ["cat", "dog", "cat"], 72: ["no", "no", "yes"]}
    annotations = [
        {"question_id": key, "image_id": 5, "answers": [{"answer": a, "answer_id": i + 1}
         for i, a in enumerate(answers)]}
        for key, answers in reversed(given.items())
    ]  # fmt: skip
    picture(folder / "COCO_val2014_000000000005.jpg", 5)
    picture(folder / "own.png", 6)
    return (
        write_json(folder / "q.json", {"data_subtype": "val2014", "questions": questions}),
        write_json(folder / "a.json", {"annotations": annotations}),
    )


def test_questions_and_annotations(tmp_path: Path) -> None:
    samples = read_vqa(*vqa_files(tmp_path), tmp_path)
    assert [(s.id, s.prompt, s.answer.answers) for s in samples] == [
        ("5#70", "Is it red?", ("yes", "yes", "no")),
        ("5#71", "What is it?", ("cat", "dog", "cat")),
        ("6#72", "Is it old?", ("no", "no", "yes")),
    ]  # fmt: skip
    own = np.asarray(Image.open(tmp_path / "own.png"))
    assert (np.asarray(samples[2].image) == own).all()


def test_a_closed_set_of_answers(tmp_path: Path) -> None:
    samples = read_vqa(*vqa_files(tmp_path), tmp_path, ["no", "yes"])
    assert [s.answer.choice for s in samples] == ["yes", "no"]
    with pytest.raises(DataError, match="no question is answered by one of left, right"):
        read_vqa(*vqa_files(tmp_path), tmp_path, ["left", "right"])


def test_questions_of_no_use(tmp_path: Path) -> None:
    questions, annotations = vqa_files(tmp_path)
    content = json.loads(annotations.read_text())
    first, *rest = content["annotations"]
    (tmp_path / "own.png").unlink()
    for message, tables in (
        ("has no list 'annotations': expected VQA annotations", {"annotations": None}),
        (r"question 72 has no annotation in a\.json", {"annotations": rest}),
        ("question 72 has no answers", {"annotations": [first | {"answers": []}, *rest]}),
        (r"1 of 3 images has faults.*own\.png", content),
    ):
        write_json(annotations, tables)
        with pytest.raises(DataError, match=message):
            read_vqa(questions, annotations, tmp_path)
