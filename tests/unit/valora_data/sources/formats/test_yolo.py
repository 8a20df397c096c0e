"""Label files of Ultralytics, read like Ultralytics reads them, and of KITTI."""

from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests.support.detection_sets import BOXES, read_split, write_pictures, write_yolo
from valora_data.errors import DataError
from valora_data.faults import FaultKind
from valora_data.schema import Answer, Box, Sample, Split, Task
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.registry import FORMATS, detect_kind
from valora_teachers.yolo import load_ultralytics

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


def test_agrees_with_ultralytics(data):
    load_ultralytics()  # imported otherwise, it would change PIL for all tests after this one
    from ultralytics.data.dataset import YOLODataset
    from ultralytics.data.utils import check_det_dataset

    described = check_det_dataset(str(data), autodownload=False)
    dataset = YOLODataset(
        img_path=described["train"], data=described, task="detect", augment=False, imgsz=64
    )
    ours = {Path(s.id).name: s for s in read_split("yolo", data, "train", LABELS)}
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


def test_polygon_counts_as_the_box_around_it(data):
    (data.parent / "labels/val/000000.txt").write_text("1 0.5 0.1 0.9 0.6 0.2 0.4\n")
    (box,) = next(read_split("yolo", data, "val", LABELS)).answer.boxes
    assert box.label == "cat"
    assert box.xyxy == pytest.approx((4, 2, 18, 12))


def test_names_as_a_list_and_images_as_a_text_file(data):
    (data.parent / "some.txt").write_text("./images/train/000002.png\nimages/train/000000.png\n\n")
    edit(data, names=["dog", "cat"], train="some.txt", val="images/train")
    reader = ImageReader.for_check("set")
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


REST = "1.5 1.6 3.9 0.1 1.7 20.0 -1.6"


def write_kitti(folder):
    write_pictures(folder / "training" / "image_2")
    (folder / "training" / "label_2").mkdir()
    for name, boxes in BOXES.items():
        rows = [
            f"{label} 0.0 0 -1.5 {x0} {y0} {x1} {y1} {REST}" for label, (x0, y0, x1, y1) in boxes
        ]
        rows.append("DontCare -1 -1 -10 1 1 5 5 -1 -1 -1 -1000 -1000 -1000 -10")
        (folder / "training" / "label_2" / f"{name}.txt").write_text("\n".join(rows) + "\n")
    return folder


def test_boxes_of_kitti(tmp_path):
    path = write_kitti(tmp_path)
    assert detect_kind(path) == detect_kind(path / "training") == "kitti"
    assert FORMATS["kitti"]().guess_task(str(path)) is Task.DETECTION
    found = {sample.id[0]: sample.answer.boxes for sample in read_split("kitti", path)}
    assert {k: [(b.label, b.xyxy) for b in boxes] for k, boxes in found.items()} == BOXES


def test_faults_of_kitti_are_named(tmp_path):
    path = write_kitti(tmp_path)
    labels = path / "training" / "label_2"
    with (labels / "a.txt").open("a") as file:
        file.write(f"cat 0 0 0 1 2 3\ncat 0 0 0 a 2 3 4 {REST}\ncat 0 0 0 9 9 999 20 {REST}\n")
    (labels / "b.txt").rename(labels / "z.txt")
    reader = ImageReader.for_check("set")
    assert len(list(read_split("kitti", path, reader=reader))) == 4
    assert {fault.kind for fault in reader.found} >= {
        FaultKind.ROW_MALFORMED, FaultKind.BOX_MALFORMED, FaultKind.BOX_OUTSIDE,
        FaultKind.LABELS_ORPHANED, FaultKind.IMAGE_UNLABELLED,
    }  # fmt: skip
