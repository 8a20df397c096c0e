"""COCO: instances and captions are read like pycocotools reads them."""

from pycocotools.coco import COCO

from tests.support.data_sets import natural_picture, write_json
from tests.support.detection_sets import read_split
from valora_data.schema import Task
from valora_data.sources.registry import FORMATS

CATEGORIES = [{"id": 90, "name": "cat"}, {"id": 3, "name": "dog"}, {"id": 17, "name": "cow"}]
IMAGES = [{"id": number, "file_name": f"{number}.png"} for number in (501, 7, 42)]
# Sparse ids in no order, a category that nobody asks for, a crowd, an image with nothing.
ANNOTATIONS = [
    {"id": number, "image_id": image, "category_id": category, "bbox": bbox, "area": 9,
     "iscrowd": int(number == 5), "caption": f"number {number} "}
    for number, (image, category, bbox) in enumerate([
        (7, 3, [1, 2, 10, 20]), (501, 90, [4.5, 0, 9.25, 30]), (7, 90, [20, 15, 10, 10]),
        (7, 17, [0, 0, 5, 5]), (501, 17, [0, 0, 5, 5]), (501, 3, [0, 0, 30, 25]),
    ])
]  # fmt: skip


def test_agrees_with_pycocotools(tmp_path):
    for entry in IMAGES:
        natural_picture(entry["id"]).save(tmp_path / entry["file_name"])
    content = {"images": IMAGES, "annotations": ANNOTATIONS, "categories": CATEGORIES}
    file = write_json(tmp_path / "instances.json", content)
    reference = COCO(str(file))
    wanted = reference.getCatIds(catNms=["dog", "cat"])
    found = {int(one.id): one.answer for one in read_split("coco", file, None, ("dog", "cat"))}
    assert list(found) == list(reference.imgs)
    for image, answer in found.items():
        ids = reference.getAnnIds(imgIds=image, catIds=wanted, iscrowd=False)
        expected = [
            ((x, y, x + w, y + h), reference.cats[one["category_id"]]["name"])
            for one in reference.loadAnns(ids)
            for x, y, w, h in [one["bbox"]]
        ]
        assert [(box.xyxy, box.label) for box in answer.boxes] == expected
    write_json(file, {"images": IMAGES, "annotations": ANNOTATIONS})
    assert FORMATS["coco"]().guess_task(str(file)) is Task.CAPTION
    captions = {int(s.id): s.answer.captions for s in read_split("coco", file, task=Task.CAPTION)}
    assert captions == {
        image: tuple(one["caption"].strip() for one in reference.imgToAnns[image])
        for image in reference.imgs
        if reference.imgToAnns[image]
    }
