"""Exports of annotation tools; COCO and YOLO, read as their own libraries do; images alone."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from tests.support import detection_sets as sets
from tests.support.data_sets import natural_picture, write_json
from tests.support.detection_sets import BOXES, SIZES, pets, picture_of, read_split, write_pictures
from valora_data.errors import DataError
from valora_data.faults import ImageReader
from valora_data.schema import Split, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import FORMATS, detect_kind, files_of, open_source
from valora_teachers.yolo import load_ultralytics

EXPORTS = {
    "roboflow": sets.write_roboflow, "voc": sets.write_voc, "cvat": sets.write_cvat,
    "kitti": sets.write_kitti, "labelstudio": sets.write_labelstudio,
}  # fmt: skip
SPLITS = {"a": None, "c": None, "b": Split.VAL, "d": Split.TEST}
"""The split of each image; None for the part from which the unlabelled split is taken."""


def source_of(kind, path, task=Task.DETECTION, **more):
    folder = str(path.parent / "images") if kind == "labelstudio" else None
    return Source(kind, task, path=str(path), **({"images": folder} | more))


def read(source):
    """Split and sample of every image, by the first letter of its name."""
    splits = open_source(source).items()
    return {_name(one): (split, one) for split, stream in splits for one in stream()}


def _name(sample):
    (name,) = [name for name in SIZES if sample.image.size == SIZES[name]]
    assert np.abs(np.asarray(sample.image, float) - np.asarray(picture_of(name))).mean() < 8
    return name


@pytest.mark.parametrize("kind", list(EXPORTS))
def test_boxes_and_splits(kind, tmp_path):
    path = EXPORTS[kind](tmp_path / "set")
    assert detect_kind(path) == {"roboflow": "coco"}.get(kind, kind)
    assert FORMATS[kind]().guess_task(str(path)) is Task.DETECTION
    found = read(source_of(kind, path))
    assert set(found) == set(SIZES)
    for name, (split, sample) in found.items():
        assert split == (None if kind in ("labelstudio", "kitti") else SPLITS[name])
        for box, (label, edges) in zip(sample.answer.boxes, BOXES[name], strict=True):
            assert box.label == label and box.xyxy == pytest.approx(edges, abs=1e-6)
    assert len({sample.id for _, sample in found.values()}) == 4
    only = read(source_of(kind, path, labels=("dog",)))
    assert {box.label for _, sample in only.values() for box in sample.answer.boxes} == {"dog"}


def test_shapes_of_cvat(tmp_path):
    write_pictures(tmp_path / "images", pets("c"))
    shapes = """
      <polygon label="cat" points="10.0,20.0;30.5,8.0;25.0,40.0"/>
      <mask label="cat" rle="0" left="4" top="6" width="10" height="20"/>
      <box label="cat" xtl="20" ytl="20" xbr="40" ybr="30" rotation="90"/>
      <ellipse label="cat" cx="30" cy="20" rx="10" ry="5"/>"""
    image = f'<image id="0" name="c.jpg" width="64" height="64">{shapes}</image>'
    file = tmp_path / "annotations.xml"
    file.write_text(f"<annotations>{image}</annotations>")
    reader = ImageReader("set", tolerance=9)
    ((_, sample),) = read(source_of("cvat", tmp_path, reader=reader)).values()
    (fault,) = reader.found
    assert fault.text == "c.jpg, shape 4: ellipses are not read, draw a box"
    edges = (10, 8, 30.5, 40), (4, 6, 14, 26), pytest.approx((25, 15, 35, 35))
    assert tuple(box.xyxy for box in sample.answer.boxes) == edges
    for text, message in (
        ('<annotations><track id="0"/></annotations>', "tracks of a video: export the task"),
        ("<annotation/>", "is no export of CVAT"), ("<annotations/>", "lists no images"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            read(source_of("cvat", tmp_path))


def test_shapes_and_choices_of_label_studio(tmp_path):
    turned = {"x": 50, "y": 25, "width": 25, "height": 12.5, "rotation": 90}
    results = [
        {"type": "rectanglelabels", "value": turned | {"rectanglelabels": ["cat"]}},
        {"type": "polygonlabels",
         "value": {"points": [[0, 0], [50, 12.5], [25, 75]], "polygonlabels": ["cat"]}},
    ]  # fmt: skip
    write_pictures(tmp_path / "images", pets("c"))
    task = {"data": {"image": "/data/local-files/?d=images%2Fc.jpg"}, "id": 1}
    path = write_json(tmp_path / "export.json", [task | {"annotations": [{"result": results}]}])
    reader = ImageReader("set", tolerance=9)
    ((_, sample),) = read(source_of("labelstudio", path, reader=reader)).values()
    assert [box.xyxy for box in sample.answer.boxes] == [pytest.approx((0, 0, 32, 48), abs=1e-6)]
    assert [fault.text for fault in reader.found] == [
        "export.json, task 1, result 1: the image or the box is turned, draw it upright"
    ]
    for count in (1, 2):
        chosen = [{"type": "choices", "value": {"choices": ["cat"]}}] * count
        write_json(path, [task | {"annotations": [{"result": chosen}]}])
        assert FORMATS["labelstudio"]().guess_task(str(path)) is Task.CLASSIFICATION
        source = source_of("labelstudio", path, Task.CLASSIFICATION)
        with pytest.raises(DataError, match="expected one label") if count > 1 else nullcontext():
            assert [one.answer.label for _, one in read(source).values()] == ["cat"]
    path = write_json(tmp_path / "export.json", [{"image": "c.jpg", "id": 1, "annotation_id": 1}])
    with pytest.raises(DataError, match="is an export as JSON-MIN: export it as JSON"):
        read(source_of(detect_kind(path), path))


@pytest.mark.parametrize("kind", [kind for kind in EXPORTS if kind != "kitti"])  # says no size
@pytest.mark.parametrize("stored", [True, False], ids=["as stored", "as shown"])
def test_boxes_follow_exif(kind, stored, tmp_path):
    """The size in an annotation says whether it was made on the stored or the shown image."""
    path = EXPORTS[kind](tmp_path / "set")
    for file in (tmp_path / "set").rglob("a.jpg"):
        image = picture_of("a")
        if not stored:  # the annotated picture is what is shown
            image = image.transpose(Image.Transpose.ROTATE_90)
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned clockwise
        image.save(file, quality=95, exif=exif)
    splits = open_source(source_of(kind, path)).values()
    width, height = SIZES["a"]
    size = (height, width) if stored else (width, height)
    (sample,) = (one for stream in splits for one in stream() if one.image.size == size)
    for box, (_, (x0, y0, x1, y1)) in zip(sample.answer.boxes, BOXES["a"], strict=True):
        edges = (height - y1, x0, height - y0, x1) if stored else (x0, y0, x1, y1)
        assert box.xyxy == pytest.approx(edges, abs=1e-6)


def test_images_alone(tmp_path):
    write_pictures(tmp_path / "raw" / "day 1", pets("ab"))
    write_pictures(tmp_path / "raw", pets("c"))
    (tmp_path / "raw" / "._c.jpg").write_bytes(b"a Mac's note")
    source = Source("images", Task.DETECTION, path=str(tmp_path / "raw"))
    samples = list(open_source(source)[None]())
    assert [sample.id for sample in samples] == ["c.jpg", "day 1/a.jpg", "day 1/b.jpg"]
    assert {sample.answer.boxes for sample in samples} == {()}
    path = sets.write_voc(tmp_path / "set")
    more = Source("voc", Task.DETECTION, path=str(path), unlabelled=str(tmp_path / "raw"))
    splits = open_source(more)
    assert set(splits) == {None, Split.VAL, Split.TEST, Split.UNLABELLED}
    assert [s.id for s in splits[Split.UNLABELLED]()] == [
        "unlabelled/c.jpg", "unlabelled/day 1/a.jpg", "unlabelled/day 1/b.jpg",
    ]  # fmt: skip
    assert {p.name for p in files_of(more)} >= {"a.xml", "train.txt", "c.jpg"}


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


def test_coco_agrees_with_pycocotools(tmp_path):
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


def test_yolo_agrees_with_ultralytics(tmp_path):
    load_ultralytics()  # imported otherwise, it would change PIL for all tests after this one
    from ultralytics.data.dataset import YOLODataset
    from ultralytics.data.utils import check_det_dataset

    data = sets.write_yolo(tmp_path / "set", {"train": pets("abc"), "val": pets("a")})
    polygon = "1 0.5 0.1 0.9 0.6 0.2 0.4\n"  # counts as the box around it
    (tmp_path / "set/labels/train/c.txt").write_text(polygon)
    described = check_det_dataset(str(data), autodownload=False)
    dataset = YOLODataset(
        img_path=described["train"], data=described, task="detect", augment=False, imgsz=64
    )
    ours = {Path(s.id).name: s for s in read_split("yolo", data, "train", ("cat", "dog"))}
    assert len(dataset.labels) == len(ours) == 3
    for entry in dataset.labels:
        found = ours[Path(entry["im_file"]).name]
        height, width = entry["shape"]
        assert found.image.size == (width, height)
        theirs = zip(entry["cls"], entry["bboxes"].tolist(), strict=True)
        for box, ((c,), (x, y, w, h)) in zip(found.answer.boxes, theirs, strict=True):
            edges = ((x - w / 2) * width, (y - h / 2) * height, w * width, h * height)
            assert box.label == described["names"][int(c)]
            found_edges = (box.x0, box.y0, box.x1 - box.x0, box.y1 - box.y0)
            assert found_edges == pytest.approx(edges, abs=1e-3)
