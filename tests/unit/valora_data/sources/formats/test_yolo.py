"""Label files of Ultralytics, read like Ultralytics reads them."""

from pathlib import Path

import pytest

from tests.support.data_sets import natural_picture
from tests.support.detection_sets import read_split, write_yolo
from valora_data.schema import Answer, Box, Sample
from valora_teachers.yolo import load_ultralytics

BOXES = [
    [Box(1, 2, 11, 22, "dog"), Box(4.5, 0, 13.75, 30, "cat")], [], [Box(0, 0, 96, 96, "cat")],
]  # fmt: skip


def test_agrees_with_ultralytics(tmp_path):
    load_ultralytics()  # imported otherwise, it would change PIL for all tests after this one
    from ultralytics.data.dataset import YOLODataset
    from ultralytics.data.utils import check_det_dataset

    some = [Sample("", natural_picture(n), Answer(tuple(b))) for n, b in enumerate(BOXES)]
    data = write_yolo({"train": some, "val": some[:1]}, ("dog", "cat"), tmp_path / "set")
    polygon = "1 0.5 0.1 0.9 0.6 0.2 0.4\n"  # counts as the box around it
    (tmp_path / "set/labels/train/000001.txt").write_text(polygon)
    described = check_det_dataset(str(data), autodownload=False)
    dataset = YOLODataset(
        img_path=described["train"], data=described, task="detect", augment=False, imgsz=64
    )
    ours = {Path(s.id).name: s for s in read_split("yolo", data, "train", ("dog", "cat"))}
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
