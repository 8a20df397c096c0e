"""Label files of Ultralytics, read like Ultralytics reads them."""

import pytest
import yaml
from PIL import Image

from tests.support.detection_sets import read_split, write_yolo
from valora_data.errors import DataError
from valora_data.faults import FaultKind, ImageReader
from valora_data.schema import Answer, Box, Sample, Split

LABELS = ("dog", "cat")


def sample(name, size, *boxes):
    return Sample(name, Image.new("RGB", size, (len(name), 0, 0)), Answer(boxes))


SAMPLES = {
    Split.TRAIN: [
        sample("a", (40, 30), Box(1, 2, 11, 22, "dog"), Box(4.5, 0, 13.75, 30, "cat")),
        sample("bb", (30, 50)),
        sample("ccc", (64, 64), Box(0, 0, 64, 64, "cat")),
    ],
    Split.VAL: [sample("dddd", (20, 20), Box(5, 6, 17, 18, "dog"))],
}


@pytest.fixture
def data(tmp_path):
    return write_yolo(SAMPLES, LABELS, tmp_path / "set")


def edit(file, /, **changes):
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**content, **changes}))
    return file


def test_polygon_counts_as_the_box_around_it(data):
    (data.parent / "labels/val/000000.txt").write_text("1 0.5 0.1 0.9 0.6 0.2 0.4\n")
    (box,) = next(read_split("yolo", data, "val", LABELS)).answer.boxes
    assert box.label == "cat"
    assert box.xyxy == pytest.approx((4, 2, 18, 12))


def test_names_as_a_list_and_images_as_a_text_file(data):
    (data.parent / "some.txt").write_text("./images/train/000002.png\nimages/train/000000.png\n\n")
    edit(data, names=["dog", "cat"], train="some.txt", val="images/train")
    reader = ImageReader("set", tolerance=9)
    ids = [s.id for s in read_split("yolo", data, "train", LABELS, reader=reader)]
    assert not any(fault.kind is FaultKind.LABELS_ORPHANED for fault in reader.found)
    assert ids == ["images/train/000000.png", "images/train/000002.png"]


@pytest.mark.parametrize(
    ("changes", "count"),
    [({"train": ["images/train", "images/val"]}, 4), ({"path": None}, 3), ({"path": "/gone"}, 3)],
    ids=["several folders", "no path", "moved"],
)
def test_folders(data, changes, count):
    edit(data, **changes)
    assert len(list(read_split("yolo", data, "train", LABELS))) == count


FAULTS = {  # more in tests/unit/valora_data/validation
    "or 10 of keypoints, got 6": {"kpt_shape": [5, 2]},
    r"kpt_shape \[5\] is not": {"kpt_shape": [5]},
    "no category 'cat', only dog, pig": {"names": ["dog", "pig"]},
    "has no 'names'": {"names": None},
    "split 'val' names .*gone, which does not exist": {"val": "gone"},
    "split 'val' holds no images": {"val": "labels"},
    "is not valid YAML": "names: [",
    "is no Ultralytics data set": "[1]",
}


@pytest.mark.parametrize("message", list(FAULTS))
def test_what_is_refused(data, message):
    (data.parent / "labels/val/000000.txt").write_text("0 0.5 0.5 0.1 0.1 0 0\n")
    change = FAULTS[message]
    data.write_text(change) if isinstance(change, str) else edit(data, **change)
    with pytest.raises(DataError, match=message):
        list(read_split("yolo", data, "val", LABELS))
