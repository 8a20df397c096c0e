"""Planted faults: each is found and named by one `check`, and none hides another."""

import io
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import yaml
from PIL import Image, ImageOps

from tests.support import detection_sets as sets
from tests.support.data_sets import metadata, natural_picture
from valora_data.cli import main
from valora_data.faults import FaultKind


@pytest.fixture(autouse=True)
def _no_sheets(monkeypatch):
    """Sheets, which tests/unit/valora_data/test_cli.py looks at, take most of a check's time."""
    monkeypatch.setattr("valora_data.cli.contact_sheet", lambda _: Image.new("RGB", (1, 1)))


@cache
def picture(seed):
    """File of a picture, which is drawn and compressed once for all tests."""
    file = io.BytesIO()
    natural_picture(seed).save(file, "PNG")
    return file.getvalue()


def report(path, tmp_path, capsys, *more):
    """What `check` prints, and the lines of its list of faults."""
    main(["check", str(path), "--out", str(tmp_path / "out"), *more])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    faults = tmp_path / "out" / "faults.tsv"
    lines = faults.read_text().splitlines() if faults.is_file() else []
    assert {line.split("\t")[0] for line in lines} <= {k.name.lower() for k in FaultKind} | {"copy"}
    return " ".join((captured.out + captured.err).split()), "\n".join(lines)


def yolo(folder, count=8):
    """A sound set of two splits."""
    some = [sets.marked("cat", "dog", count=count, first=first) for first in (0, 100)]
    return sets.write_yolo(folder, dict(zip(("train", "val"), some, strict=True)))


def image(content):
    return lambda folder, n: (folder / f"images/train/{n}.png").write_bytes(content)


def label(content):
    return of_label(lambda file: file.write_bytes(content))


def copy(split, change=lambda image: image):
    def plant(folder, n):
        change(natural_picture(n)).save(folder / f"images/{split}/9{n}.png")
        shutil.copy(folder / f"labels/train/{n}.txt", folder / f"labels/{split}/9{n}.txt")

    return plant


def of_label(change):
    return lambda folder, n: change(folder / f"labels/train/{n}.txt")


def second(text):
    return of_label(lambda file: file.write_text(f"{file.read_text()}{text}\n"))


YOLO = [  # what is done to image n, and what is said
    (second("0 0.5 0.5 0 0.5"), "{n}.txt, row 2: box (48, 24, 48, 72) has no area"),
    (second("0 0.5 0.5 -0.2 0.3"), "{n}.txt, row 2: box (57.6, 33.6, 38.4, 62.4) has no area"),
    (second("0 nan 0.5 0.2 0.3"), "box_empty\t{n}.txt, row 2"),
    (second("1 0.5 inf 0.2 0.3"), "box_empty\t{n}.txt, row 2"),
    (second("1 1.5 0.5 0.2 0.3"), "box_outside\t{n}.txt, row 2"),
    (second("1 0.95 0.5 0.3 0.3"), "box_outside\t{n}.txt, row 2"),
    (second("0 48 48 20 20"), "lies outside its 96 × 96 image"),
    (second("7 0.5 0.5 0.2 0.3"), "{n}.txt, row 2: class 7 is none of 0, 1"),
    (second("-1 0.5 0.5 0.2 0.3"), "{n}.txt, row 2: class -1 is none of 0, 1"),
    (second("0.5 0.5 0.5 0.2 0.3"), "{n}.txt, row 2: class 0.5 is none of 0, 1"),
    (second("cat 0.5 0.5 0.2 0.3"), "{n}.txt, row 2: 'cat 0.5 0.5 0.2 0.3' is not a row of"),
    (second("0 0.5 0.5 0.2"), "{n}.txt, row 2: expected a class and 4 numbers"),
    (second("0 0.5 0.5 0.2 0.2 0.9"), "got 5 numbers, of which the last may be a confidence"),
    (second("0,0.5,0.5,0.2,0.2"), "'0,0.5,0.5,0.2,0.2' is not a row of numbers"),
    (second("0 0.1 0.2 0.3 0.2 0.5 0.2"), "box_empty\t{n}.txt, row 2"),
    (
        of_label(lambda file: file.write_text(file.read_text() * 2)),
        "{n}.txt, row 2 repeats an earlier object",
    ),
    (of_label(lambda file: (file.unlink(), file.mkdir())), "train/{n}.txt (Is a directory)"),
    (label(b""), "the labels of {n}.png name no object"),
    (label(b" \n\n"), "the labels of {n}.png name no object"),
    (label(b"\xff\xfa0\x00"), "{n}.txt is no text in UTF-8"),
    (of_label(Path.unlink), "{n}.png has no label file {n}.txt"),
    (of_label(lambda file: file.with_stem("77").touch()), "77.txt belongs to no image"),
    (image(picture(3)[:900]), "image_unreadable\t{n}.png cannot be decoded"),
    (image(b""), "{n}.png cannot be decoded (the file is empty)"),
    (image(b"<html>404</html>"), "{n}.png cannot be decoded (it is no image of a known format)"),
    (copy("val"), "image of images/train/{n}.png in train is that of images/val/9{n}.png in val"),
    (copy("val", lambda image: image.resize((70, 70))), "train/{n}.png in train looks like"),
    (copy("val", ImageOps.mirror), "train/{n}.png in train looks like images/val/9{n}.png in val"),
    (copy("train"), "images/train/{n}.png in train is that of images/train/9{n}.png in train"),
    (copy("train", ImageOps.mirror), "{n}.png in train looks like images/train/9{n}.png in train"),
]


def test_all_faults_of_an_ultralytics_set_are_found_at_once(tmp_path, capsys):
    path = yolo(tmp_path / "set", len(YOLO))
    assert report(path, tmp_path, capsys)[0].endswith("nothing is wrong")
    for number, (plant, _) in enumerate(YOLO):
        plant(tmp_path / "set", number)
    said, faults = report(path, tmp_path, capsys)
    for number, (_, message) in enumerate(YOLO):
        assert message.format(n=number) in faults, message
    for counted in (
        "5 boxes have no area (", "4 rows are malformed",
        "2 images have empty labels", "1 image has no label file or entry",
        "1 picture is in two splits, equal", "1 picture occurs again in its own split, equal (",
        "2 pictures are in two splits, resized, recompressed or mirrored",
    ):  # fmt: skip
        assert counted in said, counted
    assert "nothing is wrong" not in said


def listed(folder, **changes):
    content = yaml.safe_load((folder / "data.yaml").read_text())
    (folder / "data.yaml").write_text(yaml.safe_dump({**content, **changes}))


def validate_on(folder, *names):
    (folder / "some.txt").write_text("".join(f"images/val/{name}\n" for name in names))
    listed(folder, val="some.txt")


WHOLE = [
    (lambda folder: listed(folder, val="images/train"),
     "1 split has the images of train, of which a part is taken for it"),
    (lambda folder: listed(folder, val="images/gone"), "which does not exist"),
    (lambda folder: listed(folder, train="x" * 300), "which does not exist"),
    (lambda folder: ((folder / "images/none").mkdir(), listed(folder, val="images/none")),
     "holds no images"),
    (lambda folder: validate_on(folder, "100.png", "gone.png"),
     "1 image is listed but missing (gone.png"),
    (lambda folder: validate_on(folder, "100.png", "100.png"), "1 image is listed twice"),
    (lambda folder: (folder / "labels").rename(folder / "annotations"),
     "none of the 3 images of split train has objects"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "message"), WHOLE, ids=[message for _, message in WHOLE])
def test_a_fault_of_a_whole_set(plant, message, tmp_path, capsys):
    path = yolo(tmp_path / "set", 3)
    plant(tmp_path / "set")
    assert message in report(path, tmp_path, capsys)[0]


COCO = [  # what is done to the content, and entry n of its tables; and what is said
    (lambda c, n: c["images"][n].pop("file_name"), "entry {n} of 'images' has no file_name"),
    (lambda c, n: c["images"][n].update(id=[1]), "entry {n} of 'images' has the id [1], which"),
    (lambda c, n: c["images"][n].update(width=640, height=480), "96 × 96 pixels, its annotation"),
    (lambda c, n: c["images"].append(c["images"][n]), "image id {n} occurs more than once"),
    (lambda c, n: c["images"].append({"id": 77, "file_name": f"{n}.png"}), "lists {n}.png twice"),
    (lambda c, n: c["images"].append({"id": 78, "file_name": "no.png"}), "image_missing\tno.png"),
    (lambda c, n: c["images"].append({"id": 79, "file_name": "\0.png"}), "(embedded null byte: "),
    (lambda c, n: c["annotations"][n].update(category_id=[1]), "has the category_id [1], which"),
    (lambda c, n: c["annotations"][n].pop("bbox"), "entry {n} of 'annotations' has no bbox"),
    (lambda c, n: c["annotations"][n].update(bbox=None), "{n}.png: box None is not four numbers"),
    (lambda c, n: c["annotations"][n].update(bbox=[1, 2, 3]), "box [1, 2, 3] is not four"),
    (lambda c, n: c["annotations"][n].update(bbox=[9, 2, -3, 4]), "box (9, 2, 6, 6) has no area"),
    (lambda c, n: c["annotations"][n].update(bbox=[60, 60, 90, 90]), "box_outside\tinstances.json"),
    (lambda c, n: c["annotations"][n].update(image_id=99), "belongs to image 99, which is not"),
    (lambda c, n: c["annotations"][n].update(category_id=9), "{n}.png has category id 9, which is"),
    (lambda c, n: c["annotations"].append(c["annotations"][n]), "of {n}.png repeats"),
    (lambda c, n: c["annotations"].append("cat"), "'annotations' is not a valid JSON object"),
]  # fmt: skip


CATEGORIES = [{"id": 1, "name": "cat", "supercategory": {"a": 1}}, {"id": 9, "name": None}]


def test_all_faults_of_a_coco_set_are_found_at_once(tmp_path, capsys):
    content, file = {"categories": CATEGORIES}, tmp_path / "set" / "instances.json"
    file.parent.mkdir()
    numbers = range(len(COCO) + 1)
    content["images"] = [{"id": n, "file_name": f"{n}.png"} for n in numbers]
    content["annotations"] = [
        {"id": n, "image_id": n, "category_id": 1, "bbox": [1, 2, 9, 9 + n]} for n in numbers
    ]
    for number in (*numbers, 200):
        (file.parent / f"{number}.png").write_bytes(picture(number))
    del content["annotations"][-1]
    for number, (plant, _) in enumerate(COCO):
        plant(content, number)
    file.write_text(json.dumps(content))
    said, faults = report(file, tmp_path, capsys)
    for number, (_, message) in enumerate(COCO):
        assert message.format(n=number) in faults, message
    assert "image_unlisted\t200.png is not listed" in faults
    assert "entry 1 of 'categories' has the name None, which is no number or text" in faults
    assert f"{len(COCO)}.png has no label" in faults and "nothing is wrong" not in said


ROWS = {  # `n` is the number of the row
    '{{"file_name": "0.png", ': "row {n} is not a valid JSON object",
    "[1, 2]": "row {n} is not a valid JSON object",
    '{{"label": "cat"}}': "row {n} has no file_name",
    '{{"file_name": "{n}.png"}}': "row {n} ({n}.png) has no label",
    '{{"file_name": "{n}.png", "label": null}}': "row {n} ({n}.png) has no label",
    '{{"file_name": "{n}.png", "label": 3}}': "row {n} ({n}.png): label 3 and, before, 'dog'",
    '{{"file_name": "{n}.png", "label": ["a", "b"]}}': "label ['a', 'b'] is no name and no number",
    '{{"file_name": "{n}.png", "label": {{"a": 1}}}}': "label {{'a': 1}} is no name and no number",
    '{{"file_name": "0.png", "label": "dog"}}': "lists 0.png twice",
    '{{"file_name": "0.png", "label": "cat"}}': "row {n} (0.png): it repeats an earlier row",
    '{{"file_name": "gone.png", "label": "cat"}}': "image_missing\tgone.png",
    '{{"file_name": "../4.png", "label": "cat"}}': "../4.png lies outside the folder",
}  # fmt: skip


def test_all_faults_of_a_table_are_found_at_once(tmp_path, capsys):
    (tmp_path / "set").mkdir()
    for number in range(20):
        (tmp_path / "set" / f"{number}.png").write_bytes(picture(number))
    labels = ["cat", "dog", "cat", "dog"]
    metadata(tmp_path / "set", *({"file_name": f"{i}.png", "label": labels[i]} for i in range(4)))
    with (tmp_path / "set" / "metadata.jsonl").open("a") as file:
        file.writelines(text.format(n=number) + "\n" for number, text in enumerate(ROWS, 5))
    faults = report(tmp_path / "set", tmp_path, capsys)[1]
    for number, message in enumerate(ROWS.values(), 5):
        assert message.format(n=number) in faults, message
    assert "19.png is not listed" in faults


def replaced(name, old, new):
    def plant(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return plant


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


EXPORTS = [
    ("voc", write("Annotations/a.xml", b"<annotation><o"), "is not valid XML"),
    ("voc",
     write("Annotations/a.xml", b'<!DOCTYPE x [<!ENTITY a "aa">]><annotation>&a;</annotation>'),
     "is not valid XML"),
    ("voc", replaced("Annotations/a.xml", "<name>cat</name>", ""), "object 1 has no label"),
    ("voc", replaced("Annotations/a.xml", "<xmax>22</xmax>", ""), "'', '33'] is not four"),
    ("voc", replaced("Annotations/a.xml", "<xmax>22</xmax>", "<xmax>1</xmax>"),
     "box (2, 3, 1, 33) has no area"),
    ("voc", replaced("Annotations/a.xml", "<width>80<", "<width>800<"), "says 800 × 60"),
    ("voc", lambda folder: (folder / "Annotations/a.xml").unlink(),
     "a.jpg has no label file a.xml"),
    ("voc", lambda folder: (folder / "JPEGImages/a.jpg").unlink(), "listed but missing"),
    ("voc", write("Annotations/zz.xml", b"<annotation/>"), "zz.xml belongs to no image"),
    ("cvat", replaced("annotations.xml", 'xtl="2"', 'xtl="nan"'), "has no area"),
    ("cvat", replaced("annotations.xml", 'xtl="2"', 'xtl="left"'), "box ['left', '3'"),
    ("cvat", replaced("annotations.xml", 'xbr="22"', 'xbr="222"'), "lies outside"),
    ("cvat", replaced("annotations.xml", 'name="c.jpg"', 'name="a.jpg"'), "lists a.jpg twice"),
    ("cvat", replaced("annotations.xml", 'label="cat"', 'label=""'), "shape 1 has no label"),
    ("kitti", replaced("training/label_2/a.txt", "cat 0", "cat"), "got 14 cells"),
    ("kitti", replaced("training/label_2/a.txt", "-1.5 2", "-1.5 a"), "box ['a', '3'"),
    ("kitti", lambda folder: (folder / "training/label_2/a.txt").rename(folder / "z.txt"),
     "a.jpg has no label file a.txt"),
    ("labelstudio", replaced("export.json", "0123abcd-a.jpg", "0123abcd-z.jpg"),
     "1 image is listed but missing"),
    ("labelstudio", replaced("export.json", '"was_cancelled": false', '"was_cancelled": true'),
     "1 entry is not labelled yet"),
    ("labelstudio", replaced("export.json", '"annotations": [', '"annotations": 1, "x": ['),
     "1 entry is not labelled yet"),
    ("labelstudio", replaced("export.json", '"width": 25.0', '"width": null'),
     "None, 50.0] is not four numbers"),
    ("labelstudio", replaced("export.json", '"rectanglelabels": ["cat"]', '"labels": "cat"'),
     "expected one label, got cat"),
    ("labelstudio", replaced("export.json", '"rectanglelabels": ["cat"]', '"labels": ["cat", "b"]'),
     "expected one label, got ['cat', 'b']"),
    ("labelstudio", replaced("export.json", '"width": 25.0', '"width": 0'), "has no area"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "plant", "message"), EXPORTS)
def test_a_fault_of_an_export(kind, plant, message, tmp_path, capsys):
    path = getattr(sets, f"write_{kind}")(tmp_path / "set")
    more = ("--images", str(tmp_path / "set/images")) if path.suffix == ".json" else ()
    plant(tmp_path / "set")
    found, _ = report(path, tmp_path, capsys, *more)
    assert message in found and "nothing is wrong" not in found
