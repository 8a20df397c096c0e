"""Planted faults: each is found, counted and named by one `check`, and none hides another."""

import io
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import yaml
from PIL import Image, ImageOps

from tests.support.data_sets import metadata, natural_picture
from tests.support.detection_sets import read_split, write_cvat, write_labelstudio, write_voc
from valora_data.cli import main
from valora_data.errors import DataError
from valora_data.faults import FaultKind
from valora_data.schema import Task
from valora_data.sources.base import Source
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.registry import open_source

Plant = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _no_sheets(monkeypatch):
    """Sheets, which tests/unit/valora_data/test_cli.py looks at, take most of a check's time."""
    monkeypatch.setattr("valora_data.cli.contact_sheet", lambda _: Image.new("RGB", (1, 1)))


@cache
def picture(seed, form):
    """File of a picture, which is drawn and compressed once for all tests."""
    file = io.BytesIO()
    natural_picture(seed).save(file, form)
    return file.getvalue()


def save(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(seed, Image.registered_extensions()[path.suffix]))


def yolo(folder, count=8):
    """A sound set of two splits."""
    for split, first in (("train", 0), ("val", 50)):
        for number in range(first, first + count):
            save(folder / "images" / split / f"{number}.png", number)
            label = folder / "labels" / split / f"{number}.txt"
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_text(f"{number % 2} 0.5 0.5 0.{number % 5 + 2} 0.25\n")
    content = {"path": ".", "train": "images/train", "val": "images/val", "names": ["cat", "dog"]}
    (folder / "data.yaml").write_text(yaml.safe_dump(content))
    return folder / "data.yaml"


def add_row(folder, text):
    with (folder / "labels/train/3.txt").open("a") as file:
        file.write(text + "\n")


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def copy(seed, name, change=lambda image: image):
    def plant(folder):
        change(natural_picture(seed)).save(folder / name)
        label = folder / name.replace("images", "labels")
        label.with_suffix(".txt").write_text(f"{seed % 2} 0.5 0.5 0.{seed % 5 + 2} 0.25\n")

    return plant


def listed(folder, **changes):
    content = yaml.safe_load((folder / "data.yaml").read_text())
    (folder / "data.yaml").write_text(yaml.safe_dump({**content, **changes}))


def validate_on(folder, *names):
    (folder / "some.txt").write_text("".join(f"images/val/{name}\n" for name in names))
    listed(folder, val="some.txt")


YOLO_ROWS = {
    "0 0.5 0.5 0 0.5": "1 box has no area (3.txt, row 2",
    "0 0.5 0.5 -0.2 0.3": "edges are the wrong way round (3.txt, row 2",
    "0 nan 0.5 0.2 0.3": "edges are not finite numbers (3.txt, row 2",
    "1 0.5 inf 0.2 0.3": "edges are not finite numbers (3.txt, row 2",
    "1 1.5 0.5 0.2 0.3": "1 box lies outside its image (3.txt, row 2",
    "1 0.95 0.5 0.3 0.3": "1 box lies outside its image (3.txt, row 2",
    "0 48 48 20 20": "1 box lies outside its image (3.txt, row 2",
    "7 0.5 0.5 0.2 0.3": "row 2: class 7 is none of 0, 1",
    "-1 0.5 0.5 0.2 0.3": "row 2: class -1 is none of 0, 1",
    "0.5 0.5 0.5 0.2 0.3": "row 2: class 0.5 is none of 0, 1",
    "cat 0.5 0.5 0.2 0.3": "is not a row of numbers",
    "0 0.5 0.5 0.2": "expected a class and 4 numbers",
    "0 0.5 0.5 0.2 0.2 0.9": "got 5 numbers, of which the last may be a confidence",
    "0,0.5,0.5,0.2,0.2": "'0,0.5,0.5,0.2,0.2' is not a row of numbers",
    "1 0.5 0.5 0.5 0.25": "1 row is repeated",
    "0 0.1 0.2 0.3 0.2 0.5 0.2": "1 box has no area",
}
LABELS, PICTURE = "labels/train/3.txt", "images/train/3.png"
YOLO = [
    (lambda folder: ((folder / LABELS).unlink(), (folder / LABELS).mkdir()),
     "labels/train/3.txt (Is a directory)"),
    (write(LABELS, b""), "1 image has empty labels"),
    (write(LABELS, b" \n\n"), "1 image has empty labels"),
    (write(LABELS, b"\xff\xfa0\x00"), "3.txt is no text in UTF-8"),
    (lambda folder: (folder / LABELS).unlink(),
     "1 image has no label file or entry, which counts as no objects (3.png"),
    (write("labels/train/99.txt", b"0 0.5 0.5 0.2 0.2\n"),
     "1 label file belongs to no image (99.txt"),
    (lambda folder: (folder / PICTURE).write_bytes(picture(3, "PNG")[:900]),
     "1 image cannot be decoded (3.png"),
    (write(PICTURE, b""), "3.png cannot be decoded (the file is empty)"),
    (write(PICTURE, b"<html>404</html>"), "no image of a known format"),
    (copy(2, "images/val/60.png"), "1 picture is in two splits, equal"),
    (copy(2, "images/val/60.png", lambda image: image.resize((70, 70))),
     "1 picture is in two splits, resized, recompressed or mirrored"),
    (copy(2, "images/val/60.png", ImageOps.mirror), "1 picture is in two splits, resized"),
    (copy(2, "images/train/60.png"), "1 picture occurs again in its own split, equal ("),
    (copy(2, "images/train/60.png", ImageOps.mirror),
     "1 picture occurs again in its own split, resized, recompressed or mirrored"),
    (lambda folder: listed(folder, val="images/train"),
     "1 split has the images of train, of which a part is taken for it"),
    (lambda folder: listed(folder, val="images/gone"), "which does not exist"),
    (lambda folder: ((folder / "images/none").mkdir(), listed(folder, val="images/none")),
     "holds no images"),
    (lambda folder: validate_on(folder, "50.png", "gone.png"),
     "1 image is listed but missing (gone.png"),
    (lambda folder: validate_on(folder, "50.png", "50.png"), "1 image is listed twice"),
    (lambda folder: (folder / "labels").rename(folder / "annotations"),
     "none of the 8 images of split train has objects"),
    *((partial(add_row, text=text), message) for text, message in YOLO_ROWS.items()),
]  # fmt: skip


def report(path, tmp_path, capsys, *more):
    main(["check", str(path), "--out", str(tmp_path / "out"), *more])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    return " ".join((captured.out + captured.err).split())


@pytest.mark.parametrize(("plant", "message"), YOLO, ids=[message for _, message in YOLO])
def test_a_fault_of_an_ultralytics_set(plant, message, tmp_path, capsys):
    path = yolo(tmp_path / "set")
    plant(tmp_path / "set")
    found = report(path, tmp_path, capsys)
    assert message in found
    assert "nothing is wrong" not in found


def test_all_at_once(tmp_path, capsys):
    """What does not exclude each other is all found in one run; a sound set has no fault."""
    path, folder = yolo(tmp_path / "set", 20), tmp_path / "set"
    assert "nothing is wrong" in report(path, tmp_path, capsys)
    for text in (
        "0 0.5 0.5 0 0.5", "0 0.5 0.5 -0.2 0.3", "0 nan 0.5 0.2 0.3", "1 1.5 0.5 0.2 0.3",
        "7 0.5 0.5 0.2 0.3", "cat 0.5 0.5 0.2 0.3", "0 0.5 0.5 0.2", "0,0.5,0.5,0.2,0.2",
    ):  # fmt: skip
        add_row(folder, text)
    write("labels/train/99.txt", b"0 0.5 0.5 0.2 0.2\n")(folder)
    copy(2, "images/val/60.png")(folder)
    for number, damage in ((5, b""), (7, b"no image")):
        write(f"images/train/{number}.png", damage)(folder)
    write("labels/train/9.txt", b"")(folder)
    (folder / "labels/train/11.txt").unlink()
    found = report(path, tmp_path, capsys)
    for message in (
        "1 box has no area (", "the wrong way round", "not finite", "lies outside",
        "class 7 is none of", "3 rows are malformed", "1 label file belongs to no image",
        "1 picture is in two splits", "2 images cannot be decoded", "1 image has empty labels",
        "1 image has no label file",
    ):  # fmt: skip
        assert message in found, message
    lines = (tmp_path / "out" / "faults.tsv").read_text().splitlines()
    assert len(lines) == 14
    assert lines[0].split("\t")[0] in {kind.name.lower() for kind in FaultKind} | {"copy"}


def coco_set(folder):
    content = {
        "images": [], "annotations": [], "categories": [{"id": 1, "name": "cat"}],
    }  # fmt: skip
    for number in range(6):
        save(folder / f"{number}.png", number)
        content["images"].append({"id": number, "file_name": f"{number}.png"})
        content["annotations"].append(
            {"id": number, "image_id": number, "category_id": 1, "bbox": [1, 2, 9, 9 + number]}
        )
    return content


COCO = [
    (lambda c: None, "nothing is wrong"),
    (lambda c: c["images"][1].pop("file_name"), "entry 1 of 'images' has no file"),
    (lambda c: c["annotations"][1].pop("bbox"), "entry 1 of 'annotations' has no bbox"),
    (lambda c: c["annotations"][1].update(bbox=None), "bbox None is not four"),
    (lambda c: c["annotations"][1].update(bbox=[1, 2, 3]), "is not four numbers"),
    (lambda c: c["annotations"][1].update(bbox=[9, 2, -3, 4]), "wrong way round"),
    (lambda c: c["annotations"][1].update(bbox=[60, 60, 90, 90]), "lies outside"),
    (lambda c: c["images"].append(c["images"][0]), "image id 0 occurs more than"),
    (lambda c: c["images"].append({"id": 77, "file_name": "0.png"}), "lists 0.png twice"),
    (lambda c: c["annotations"][1].update(image_id=99), "which is not listed"),
    (lambda c: c["annotations"][1].update(category_id=9), "category id 9"),
    (lambda c: c["annotations"].append(c["annotations"][0] | {"id": 90}), "1 row is repeated"),
    (lambda c: c["images"].append({"id": 77, "file_name": "gone.png"}), "listed but missing"),
    (lambda c: c["images"][1].update(width=640, height=480), "annotation says 640"),
    (lambda c: c["annotations"].pop(), "1 image has no label file or entry"),
    (lambda c: c["images"].pop(), "1 image file is not listed"),
    (lambda c: c["images"][1].update(id=[1]), "no number or text"),
    (lambda c: c["annotations"].append("cat"), "not a valid JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "message"), COCO, ids=[message for _, message in COCO])
def test_a_fault_of_a_coco_set(plant, message, tmp_path, capsys):
    content = coco_set(tmp_path / "set")
    plant(content)
    (tmp_path / "set/instances.json").write_text(json.dumps(content))
    assert message in report(tmp_path / "set/instances.json", tmp_path, capsys)


ROWS = {
    '{"file_name": "0.png", ': "row 5 is not a valid JSON object",
    "[1, 2]": "row 5 is not a valid JSON object",
    '{"label": "cat"}': "row 5 has no file_name",
    '{"file_name": "4.png"}': "row 5 (4.png) has no label",
    '{"file_name": "4.png", "label": null}': "row 5 (4.png) has no label",
    '{"file_name": "4.png", "label": 3}': "mixes numbers and names",
    '{"file_name": "4.png", "label": ["a", "b"]}': "is no name and no number",
    '{"file_name": "0.png", "label": "dog"}': "lists 0.png twice",
    '{"file_name": "0.png", "label": "cat"}': "1 row is repeated",
    '{"file_name": "1.png", "label": "dog"}': "1 image file is not listed and not used (4.png is",
    '{"file_name": "gone.png", "label": "cat"}': "image is listed but missing",
    '{"file_name": "../4.png", "label": "cat"}': "lies outside the folder",
    '{"file_name": "4.png", "label": {"a": 1}}': "is no name and no number",
}  # fmt: skip


@pytest.mark.parametrize("text", ROWS)
def test_a_fault_of_a_table(text, tmp_path, capsys):
    for number in range(5):
        save(tmp_path / "set" / f"{number}.png", number)
    labels = ["cat", "dog", "cat", "dog"]
    metadata(tmp_path / "set", *({"file_name": f"{i}.png", "label": labels[i]} for i in range(4)))
    with (tmp_path / "set" / "metadata.jsonl").open("a") as file:
        file.write(text + "\n")
    assert ROWS[text] in report(tmp_path / "set", tmp_path, capsys)


def replaced(name, old, new):
    def plant(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return plant


EXPORTS = [
    (write_voc, write("Annotations/a.xml", b"<annotation><o"), "is not valid XML"),
    (write_voc,
     write("Annotations/a.xml", b'<!DOCTYPE x [<!ENTITY a "aa">]><annotation>&a;</annotation>'),
     "is not valid XML"),
    (write_voc, replaced("Annotations/a.xml", "<name>cat</name>", ""), "object 1 has no label"),
    (write_voc, replaced("Annotations/a.xml", "<xmax>22</xmax>", ""), "'', '33'] is not four"),
    (write_voc, replaced("Annotations/a.xml", "<xmax>22</xmax>", "<xmax>1</xmax>"),
     "the wrong way round"),
    (write_voc, replaced("Annotations/a.xml", "<width>80<", "<width>800<"), "says 800 × 60"),
    (write_voc, lambda folder: (folder / "Annotations/a.xml").unlink(),
     "a.jpg has no label file a.xml"),
    (write_voc, lambda folder: (folder / "JPEGImages/a.jpg").unlink(), "listed but missing"),
    (write_voc, write("Annotations/zz.xml", b"<annotation/>"), "zz.xml belongs to no image"),
    (write_cvat, replaced("annotations.xml", 'xtl="2"', 'xtl="nan"'), "not finite numbers"),
    (write_cvat, replaced("annotations.xml", 'xtl="2"', 'xtl="left"'), "box ['left', '3'"),
    (write_cvat, replaced("annotations.xml", 'xbr="22"', 'xbr="222"'), "lies outside"),
    (write_cvat, replaced("annotations.xml", 'name="c.jpg"', 'name="a.jpg"'), "lists a.jpg twice"),
    (write_cvat, replaced("annotations.xml", 'label="cat"', 'label=""'), "shape 1 has no label"),
    (write_labelstudio, replaced("export.json", "0123abcd-a.jpg", "0123abcd-z.jpg"),
     "1 image is listed but missing"),
    (write_labelstudio, replaced("export.json", '"was_cancelled": false', '"was_cancelled": true'),
     "1 entry is not labelled yet"),
    (write_labelstudio, replaced("export.json", '"width": 25.0', '"width": null'),
     "None, 50.0] is not four numbers"),
    (write_labelstudio, replaced("export.json", '"width": 25.0', '"width": 0'), "has no area"),
]  # fmt: skip


@pytest.mark.parametrize(("maker", "plant", "message"), EXPORTS)
def test_a_fault_of_an_export(maker, plant, message, tmp_path, capsys):
    path = maker(tmp_path / "set")
    more = ("--images", str(tmp_path / "set/images")) if path.suffix == ".json" else ()
    plant(tmp_path / "set")
    found = report(path, tmp_path, capsys, *more)
    assert message in found
    assert "nothing is wrong" not in found


def test_a_run_skips_a_few_faults_with_one_warning(tmp_path, caplog):
    path = yolo(tmp_path / "set", 40)
    for text in ("0 0.5 0.5 0 0.5", "1 1.5 0.5 0.2 0.3", "7 0.5 0.5 0.2 0.3"):
        add_row(tmp_path / "set", text)  # three faults of one image
    (tmp_path / "set/images/train/7.png").write_bytes(b"broken")
    samples = {Path(sample.id).stem: sample for sample in read_split("yolo", path, "train")}
    assert set(samples) == {str(i) for i in range(40)} - {"7"}
    assert len(samples["3"].answer.boxes) == 1
    (record,) = caplog.records
    assert "2 of 40 images skipped in whole or in part" in record.message
    assert "1 box has no area (such as 3.txt, row 2" in record.message
    (tmp_path / "set/labels/train/9.txt").write_text("0 0 0 0 0\n")
    with pytest.raises(DataError, match=r"3 of 40 images have faults, more than 5%"):
        list(read_split("yolo", path, "train"))
    reader = ImageReader("set", tolerance=0.1)
    source = Source("yolo", Task.DETECTION, path=str(path), reader=reader)
    assert len(list(open_source(source)[None]())) == 39
    assert len(reader.faulty) == 3
