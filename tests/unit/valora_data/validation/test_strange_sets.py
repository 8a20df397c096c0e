"""Data sets as strangers have them: each is read like the plain one, or refused before training."""

import os
import unicodedata
from functools import cache, partial
from urllib.parse import quote

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.support import detection_sets as sets
from tests.support.data_sets import natural_picture, write_json
from tests.support.detection_sets import write_pictures, write_voc, write_yolo
from valora_data.errors import DataError
from valora_data.faults import FaultKind, ImageReader
from valora_data.prepare import prepare
from valora_data.schema import Split, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import detect_kind, files_of, open_source

NAMES = ("red", "blue")
SIDE = 96
COUNTS = {"train": 12, "val": 4}
SHARES = dict.fromkeys(Split, 0.25)


def boxes_of(number):
    """Class and edges of each object of an image."""
    x, y = 5 + number, 7 + 2 * number
    return [(number % 2, (x, y, x + 30, y + 20)), (1 - number % 2, (50, 60, 90, 95 - number % 3))]


def pictures(numbers, name="{}.png".format):
    """A set of some of the images."""
    return {
        name(n): (natural_picture(n), [(NAMES[index], edges) for index, edges in boxes_of(n)])
        for n in numbers
    }


def plain(folder, name="{}_{:03d}".format):
    """An Ultralytics set; every other one here is made from it."""
    first, splits = 0, {}
    for split, count in COUNTS.items():
        numbers = range(first, first + count)
        splits[split] = pictures(numbers, lambda n: f"{name(split, n - first)}.png")  # noqa: B023
        first += count
    return write_yolo(folder, splits)


def edit(file, **changes):
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes))


def thumbnail(image):
    return np.asarray(image.resize((8, 8)).convert("L"), float)


@cache
def thumbnails():
    return [thumbnail(natural_picture(number)) for number in range(sum(COUNTS.values()))]


def read(path):
    """Label and edges of the objects of each image, whose number its pixels tell."""
    reader = ImageReader("set", tolerance=0.0)
    source = Source(detect_kind(path), Task.DETECTION, path=str(path), reader=reader)
    assert len(set(files_of(source))) > 16
    found = {}
    for stream in open_source(source).values():
        for sample in stream():
            shown = thumbnail(sample.image)
            apart = [np.abs(shown - other).mean() for other in thumbnails()]
            number = int(np.argmin(apart))
            assert apart[number] < 5
            assert number not in found
            found[number] = [
                (box.label, *(round(edge, 2) for edge in box.xyxy)) for box in sample.answer.boxes
            ]
    return found


EXPECTED = {
    number: [(NAMES[index], *map(float, edges)) for index, edges in boxes_of(number)]
    for number in range(sum(COUNTS.values()))
}


def pose(file):
    edit(file, kpt_shape=[5, 2])
    for label in (file.parent / "labels").rglob("*.txt"):
        lines = label.read_text().splitlines()
        label.write_text("".join(f"{line}{' 0.9 0.8' * 5}\n" for line in lines))


def as_format(file, suffix, form):
    for path in sorted((file.parent / "images").rglob("*.png"))[::3]:
        Image.open(path).save(path.with_suffix(suffix), form)
        path.unlink()


def polygons(file):
    for label in (file.parent / "labels").rglob("*.txt"):
        rows = [list(map(float, line.split())) for line in label.read_text().splitlines()]
        corners = [
            f"{index:g} {x - w / 2} {y} {x} {y - h / 2} {x + w / 2} {y} {x} {y + h / 2}\n"
            for index, x, y, w, h in rows
        ]
        label.write_text("".join(corners))


def listed(file):
    names = sorted(path.name for path in (file.parent / "images" / "train").iterdir())
    lines = [f"{'./' * (number % 2)}images/train/{name}\n" for number, name in enumerate(names)]
    (file.parent / "some.txt").write_text("".join(lines) + "\n")
    edit(file, train="some.txt", names=dict(enumerate(NAMES)))


def auxiliary(file):
    for name in (".ipynb_checkpoints", "__MACOSX", "@eaDir", ".thumbs"):
        folder = file.parent / "images" / "train" / name
        folder.mkdir()
        natural_picture(70).save(folder / "train_000-checkpoint.png")


def linked(file):
    images = file.parent / "images" / "train"
    (file.parent / "elsewhere").mkdir()
    for path in sorted(images.glob("*.png"))[:3]:
        path.rename(file.parent / "elsewhere" / path.name)
        label = file.parent / "labels" / "train" / f"{path.stem}.txt"
        (label.parent / "more").mkdir(exist_ok=True)
        label.rename(label.parent / "more" / label.name)
    (images / "more").symlink_to(file.parent / "elsewhere")
    (images / "round").symlink_to(images)  # which must not be followed for ever


def renamed(change, file):
    for label in sorted((file.parent / "labels").rglob("*.txt"))[::2]:
        label.rename(label.with_name(change(label.stem) + ".txt"))


def odd(split, position):
    return unicodedata.normalize("NFC", f"Écran d’{split} {position:03d}")


STRANGE = {
    "plain": lambda file: None,
    "pose": pose,
    "polygons": polygons,
    "images as a text file": listed,
    "several folders": lambda file: edit(file, train=["images/train", "images/val"], val=None),
    "AVIF": lambda file: as_format(file, ".avif", "AVIF"),
    "GIF": lambda file: as_format(file, ".gif", "GIF"),
    "JFIF": lambda file: as_format(file, ".JFIF", "JPEG"),
    "hidden and auxiliary folders": auxiliary,
    "links": linked,
    "percent-encoded labels": partial(renamed, quote),
    "decomposed labels": partial(renamed, lambda stem: unicodedata.normalize("NFD", stem)),
    "labels in capitals": partial(renamed, str.upper),
    "a set that moved": lambda file: edit(file, path="/home/somebody/set"),
    "a set that moved from Windows": lambda file: edit(file, path="C:\\Users\\somebody\\set"),
    "a path from where it was trained": lambda file: edit(file, path="./set"),
    "a name below datasets/": lambda file: edit(file, path="coco8"),
}


@pytest.mark.parametrize("kind", list(STRANGE))
def test_strange_sets_are_read_like_the_plain_one(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = plain(tmp_path / "set", odd)
    STRANGE[kind](file)
    assert read(file) == EXPECTED


def coco(folder, split=None, place="{}", unit=1):
    """Content of a COCO file of the plain set, with ids of several types, and crowds."""
    some = pictures({"train": range(12), "val": range(12, 16), None: range(16)}[split])
    write_pictures(folder, some)
    found = sets.coco(some, list(NAMES))
    found["images"] = [
        {"id": float(one["id"]), "file_name": place.format(one["file_name"])}
        for one in found["images"]
    ]
    for one in found["annotations"]:
        one |= {"image_id": str(one["image_id"]), "bbox": [edge * unit for edge in one["bbox"]]}
    crowd = {"bbox": [1, 1, 9, 9], "category_id": 1, "iscrowd": 1}
    found["annotations"] += [crowd | {"image_id": one["id"]} for one in found["images"]]
    return found


def standard(folder):
    (folder / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        content = coco(folder / f"{split}2017", split)
        write_json(folder / "annotations" / f"instances_{split}2017.json", content)
    return folder


def upload(folder):
    content = coco(folder / "images", place="../../label-studio/data/media/upload/4/{}")
    return write_json(folder / "instances.json", content)


def voc(annotations, images, suffix, folder, form=None):
    some = pictures(range(16), lambda number: f"{number}{suffix}")
    return write_voc(folder, some, annotations, images, form)


LAYOUTS = {
    "COCO as it is published": ("coco", standard),
    "COCO with paths of a server": ("coco", upload),
    "VOC in lower case": ("voc", partial(voc, "annotations", "images", ".JPG")),
    "VOC in folders of other names": ("voc", partial(voc, "annots", "images", ".jpg")),
    "VOC of MPO images": ("voc", partial(voc, "Annotations", "JPEGImages", ".jpeg", form="MPO")),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts(layout, tmp_path):
    kind, write = LAYOUTS[layout]
    path = write(tmp_path / "set")
    assert detect_kind(path) == kind
    assert read(path) == EXPECTED


def in_shares(file):
    return write_json(file.parent / "instances.json", coco(file.parent, unit=1 / SIDE))


def on_a_grid(file):
    content = coco(file.parent, unit=100 / SIDE)
    for number in range(16):
        natural_picture(number).resize((140, 120)).save(file.parent / f"{number}.png")
    content["annotations"][0]["bbox"] = [90, 90, 10, 10]
    return write_json(file.parent / "instances.json", content)


def coco_with(text="", **changes):
    def made(file):
        path = write_json(file.parent / "instances.json", coco(file.parent) | changes)
        path.write_text(text or path.read_text())
        return path

    return made


def keypoints(file):
    edit(file, kpt_shape=[5, 2])
    with (file.parent / "labels/train/train_000.txt").open("a") as label:
        label.write("0 0.5 0.5 0.1 0.1 0 0\n")


def empty(split, file):
    for label in (file.parent / "labels" / split).iterdir():
        label.write_text("")


REFUSED = {
    "none of the 4 val samples has an object": partial(empty, "val"),
    "False names .*in quotes": lambda file: edit(file, names=[False, True]),
    "None names .*in quotes": lambda file: edit(file, names={0: "red", 1: "blue", 2: None}),
    "red names two classes": lambda file: edit(file, names=["red", "blue", "red"]),
    "no category 'blue', only red, pig": lambda file: edit(file, names=["red", "pig"]),
    "has no 'names'": lambda file: edit(file, names=None),
    r"kpt_shape \[5\] is not": lambda file: edit(file, kpt_shape=[5]),
    "or 10 of keypoints, got 6": keypoints,
    "is not valid YAML": lambda file: file.write_text("names: [") and None,
    "is no Ultralytics data set": lambda file: file.write_text("[1]") and None,
    "all boxes are shares of the image": in_shares,
    "all boxes are on a grid of 100": on_a_grid,
    r"\.json is not valid JSON .*export it again": coco_with('{"images": ['),
    r"\.json is not valid JSON .*surrogates not allowed": coco_with('["\\ud800"]'),
    "has no list 'images': expected COCO JSON": coco_with("[1, 2]"),
    "has no list 'categories'": coco_with(categories=None),
    "lists no images: the data set is empty": coco_with(images=[]),
    "category ids occur more than once": coco_with(categories=[{"id": 0, "name": "red"}] * 2),
    r"has no category 'red', 'blue', only cow": coco_with(categories=[{"id": 0, "name": "cow"}]),
}


@pytest.mark.parametrize("message", list(REFUSED))
def test_what_is_refused_before_training(message, tmp_path):
    file = plain(tmp_path / "set")
    path = REFUSED[message](file)
    source = Source("coco" if path else "yolo", Task.DETECTION, NAMES, path=str(path or file))
    with pytest.raises(DataError, match=message):
        prepare(open_source(source), NAMES, SHARES, tmp_path / "out")


def test_a_box_over_the_edge_by_rounding_is_clipped(tmp_path):
    content = coco(tmp_path)
    content["annotations"][0]["bbox"] = [-0.6, 1, 97.5, 94.9]
    found = read(write_json(tmp_path / "instances.json", content))
    assert found[0][0] == (NAMES[0], 0, 1, SIDE, 95.9)


def test_an_archive_is_refused(tmp_path):
    path = tmp_path / "set.zip"
    path.write_bytes(b"PK")
    for use in (detect_kind, lambda path: open_source(Source("yolo", Task.DETECTION, path=path))):
        with pytest.raises(DataError, match="is an archive: unpack it"):
            use(str(path))


def test_val_that_is_train_is_taken_from_it(tmp_path):
    file = plain(tmp_path / "set")
    edit(file, val="images/train", test="images/val")
    splits = open_source(Source("yolo", Task.DETECTION, NAMES, path=str(file)))
    counts = prepare(splits, NAMES, SHARES, tmp_path / "out")
    assert counts.pop(Split.TEST) == 4
    assert sum(counts.values()) == 12
    assert all(counts.values())


def test_names_that_are_no_utf8_are_faults(tmp_path):
    file = plain(tmp_path / "set")
    image = file.parent / "images" / "train" / "train_000.png"
    folder = os.fsencode(image.with_name("caf")) + b"\xe9"
    os.mkdir(folder)  # noqa: PTH102
    os.rename(image, folder + b"/1.png")  # noqa: PTH104
    reader = ImageReader("set", tolerance=9)
    source = Source("yolo", Task.DETECTION, NAMES, path=str(file), reader=reader)
    assert len(list(open_source(source)[None]())) == 11
    (fault,) = [one for one in reader.found if one.kind is FaultKind.IMAGE_UNREADABLE]
    assert "a name that is no UTF-8" in fault.text
    fault.text.encode()
    for labels in ((), ("val",)):  # also where its class is not asked for
        other = Source("imagefolder", Task.CLASSIFICATION, labels, path=str(image.parent))
        with pytest.raises(DataError, match=r"class folder caf\S* of train has a name that is no"):
            list(open_source(other)[None]())
