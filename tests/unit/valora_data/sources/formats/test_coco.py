"""COCO: read like pycocotools reads them, refused with a clear sentence."""

import json

import pytest
from PIL import Image
from pycocotools.coco import COCO

from tests.support.detection_sets import read_split
from valora_data.errors import DataError

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
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    for position, entry in enumerate(IMAGES):
        size = (int(entry["width"]), int(entry["height"]))
        Image.new("RGB", size, (position, 0, 0)).save(tmp_path / str(entry["file_name"]))
    return tmp_path


def read(folder, content):
    path = folder / "instances.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return list(read_split("coco", path, None, ("dog", "cat")))


def test_agrees_with_pycocotools(folder):
    samples = {sample.id: sample for sample in read(folder, CONTENT)}
    reference = COCO(str(folder / "instances.json"))
    assert list(samples) == [str(entry["id"]) for entry in IMAGES]
    assert [one.image.getpixel((0, 0))[0] for one in samples.values()] == [0, 1, 2]
    wanted = reference.getCatIds(catNms=["dog", "cat"])
    for image_id, entry in reference.imgs.items():
        ids = reference.getAnnIds(imgIds=image_id, catIds=wanted, iscrowd=False)
        expected = [
            ((x, y, x + w, y + h), reference.cats[annotation["category_id"]]["name"])
            for annotation in reference.loadAnns(ids)
            for x, y, w, h in [annotation["bbox"]]
        ]
        sample = samples[str(image_id)]
        assert [(box.xyxy, box.label) for box in sample.answer.boxes] == expected
        assert sample.image.size == (entry["width"], entry["height"])


def test_box_over_the_edge_by_rounding_is_clipped(folder):
    annotations = [ANNOTATIONS[0] | {"bbox": [-0.6, 1, 31.5, 49.9]}]
    (box,) = read(folder, CONTENT | {"annotations": annotations})[1].answer.boxes
    assert box.xyxy == (0, 1, 30, 50)


FAULTS = {  # more in tests/unit/valora_data/validation
    r"box \(25, 0, 35, 10\) lies outside its 30 .*check the unit": {
        "annotations": [ANNOTATIONS[0] | {"bbox": [25, 0, 10, 10]}]
    },
    r"instances\.json is not valid JSON .*export it again": '{"images": [',
    r"instances\.json is not valid JSON .*surrogates not allowed": '["\\ud800"]',
    "has no list 'images': expected COCO JSON": "[1, 2]",
    "has no list 'categories'": {"categories": None},
    "lists no images: the data set is empty": {"images": []},
    "category ids occur more than once": {"categories": [*CATEGORIES, CATEGORIES[1]]},
    "no category 'dog', only cat": {"categories": CATEGORIES[:1]},
}


@pytest.mark.parametrize("message", list(FAULTS))
def test_what_is_refused(folder, message):
    change = FAULTS[message]
    with pytest.raises(DataError, match=message):
        read(folder, CONTENT | change if isinstance(change, dict) else change)
