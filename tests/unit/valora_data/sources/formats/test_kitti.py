"""KITTI's label files: pixels of the original, regions that do not count, faults."""

from pathlib import Path

from tests.support.detection_sets import BOXES, read_split, write_pictures
from valora_data.faults import FaultKind
from valora_data.schema import Task
from valora_data.sources.base import Source
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.registry import FORMATS, detect_kind, open_source

REST = "1.5 1.6 3.9 0.1 1.7 20.0 -1.6"


def write_kitti(folder: Path) -> Path:
    write_pictures(folder / "training" / "image_2")
    (folder / "training" / "label_2").mkdir()
    for name, boxes in BOXES.items():
        rows = [
            f"{label} 0.0 0 -1.5 {x0} {y0} {x1} {y1} {REST}" for label, (x0, y0, x1, y1) in boxes
        ]
        rows.append("DontCare -1 -1 -10 1 1 5 5 -1 -1 -1 -1000 -1000 -1000 -10")
        (folder / "training" / "label_2" / f"{name}.txt").write_text("\n".join(rows) + "\n")
    return folder


def test_boxes_are_those_of_the_files(tmp_path: Path) -> None:
    path = write_kitti(tmp_path)
    assert detect_kind(path) == detect_kind(path / "training") == "kitti"
    assert FORMATS["kitti"]().guess_task(str(path)) is Task.DETECTION
    found = {sample.id[0]: sample.answer.boxes for sample in read_split("kitti", path)}
    assert {k: [(b.label, b.xyxy) for b in boxes] for k, boxes in found.items()} == BOXES


def test_faults_are_named(tmp_path: Path) -> None:
    path = write_kitti(tmp_path)
    labels = path / "training" / "label_2"
    with (labels / "a.txt").open("a") as file:
        file.write(f"cat 0 0 0 1 2 3\ncat 0 0 0 a 2 3 4 {REST}\ncat 0 0 0 9 9 999 20 {REST}\n")
    (labels / "b.txt").rename(labels / "z.txt")
    reader = ImageReader.for_check("set")
    source = Source("kitti", Task.DETECTION, path=str(path), reader=reader)
    assert len(list(open_source(source)[None]())) == 4
    assert {fault.kind for fault in reader.faults.found} >= {
        FaultKind.ROW_MALFORMED, FaultKind.BOX_MALFORMED, FaultKind.BOX_OUTSIDE,
        FaultKind.LABELS_ORPHANED, FaultKind.IMAGE_UNLABELLED,
    }  # fmt: skip
