"""Exports of annotation tools: boxes, splits, turned images; and images without annotations."""

from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image

from tests.support.data_sets import write_json
from tests.support.detection_sets import (
    BOXES,
    SIZES,
    picture_of,
    write_cvat,
    write_kitti,
    write_labelstudio,
    write_pictures,
    write_roboflow,
    write_voc,
)
from valora_data.errors import DataError
from valora_data.faults import ImageReader
from valora_data.schema import Split, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import FORMATS, detect_kind, files_of, open_source

EXPORTS = {
    "roboflow": write_roboflow, "voc": write_voc, "cvat": write_cvat, "kitti": write_kitti,
    "labelstudio": write_labelstudio,
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
    write_pictures(tmp_path / "images", "c")
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
    write_pictures(tmp_path / "images", "c")
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
        with pytest.raises(DataError, match="expected one choice") if count > 1 else nullcontext():
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
    write_pictures(tmp_path / "raw" / "day 1", "ab")
    write_pictures(tmp_path / "raw", "c")
    (tmp_path / "raw" / "._c.jpg").write_bytes(b"a Mac's note")
    source = Source("images", Task.DETECTION, path=str(tmp_path / "raw"))
    samples = list(open_source(source)[None]())
    assert [sample.id for sample in samples] == ["c.jpg", "day 1/a.jpg", "day 1/b.jpg"]
    assert {sample.answer.boxes for sample in samples} == {()}
    path = write_voc(tmp_path / "set")
    more = Source("voc", Task.DETECTION, path=str(path), unlabelled=str(tmp_path / "raw"))
    splits = open_source(more)
    assert set(splits) == {None, Split.VAL, Split.TEST, Split.UNLABELLED}
    assert [s.id for s in splits[Split.UNLABELLED]()] == [
        "unlabelled/c.jpg", "unlabelled/day 1/a.jpg", "unlabelled/day 1/b.jpg",
    ]  # fmt: skip
    assert {p.name for p in files_of(more)} >= {"a.xml", "train.txt", "c.jpg"}
