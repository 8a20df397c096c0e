"""One small detection data set, written in the formats that annotation tools export."""

import json
from xml.etree import ElementTree

import yaml

from tests.support.data_sets import natural_picture
from valora_data.errors import DataError
from valora_data.schema import Task
from valora_data.sources.base import Source
from valora_data.sources.registry import open_source

SIZES = {"a": (80, 60), "b": (50, 90), "c": (64, 64), "d": (100, 40)}
BOXES = {
    "a": [("cat", (2, 3, 22, 33)), ("dog", (40, 10, 80, 60))],
    "b": [("dog", (0, 0, 50, 90))],
    "c": [],
    "d": [("cat", (10, 5, 30, 25)), ("cat", (50, 5, 70, 25)), ("dog", (71, 6, 99, 39))],
}
"""Label and edges (x0, y0, x1, y1) of every image's objects."""


def picture_of(name):
    """The picture of an image, which is no other's."""
    return natural_picture(ord(name)).resize(SIZES[name])


def write_pictures(folder, names=SIZES):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        picture_of(name).save(folder / f"{name}.jpg", quality=95)


def write_roboflow(folder):
    """An export as Roboflow writes it: category 0 is the group of the others."""
    for split, names in (("train", "ac"), ("valid", "b"), ("test", "d")):
        write_pictures(folder / split, names)
        annotations = [
            {"image_id": number, "category_id": ("cat", "dog").index(label) + 1,
             "bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0), "iscrowd": 0,
             "segmentation": []}
            for number, name in enumerate(names)
            for label, (x0, y0, x1, y1) in BOXES[name]
        ]  # fmt: skip
        for number, annotation in enumerate(annotations):
            annotation["id"] = number
        content = {
            "info": {"description": "Exported from roboflow.com"},
            "categories": [
                {"id": 0, "name": "pets", "supercategory": "none"},
                {"id": 1, "name": "cat", "supercategory": "pets"},
                {"id": 2, "name": "dog", "supercategory": "pets"},
            ],
            "images": [
                {"id": number, "file_name": f"{name}.jpg", "width": SIZES[name][0],
                 "height": SIZES[name][1]}
                for number, name in enumerate(names)
            ],
            "annotations": annotations,
        }  # fmt: skip
        text = json.dumps(content)
        (folder / split / "_annotations.coco.json").write_text(text, encoding="utf-8")
    return folder


def voc_xml(name):
    """Annotation of one image, whose pixels are counted from 1."""
    root = ElementTree.Element("annotation")
    ElementTree.SubElement(root, "filename").text = f"{name}.jpg"
    size = ElementTree.SubElement(root, "size")
    for side, value in zip(("width", "height", "depth"), (*SIZES[name], 3), strict=True):
        ElementTree.SubElement(size, side).text = str(value)
    for label, (x0, y0, x1, y1) in BOXES[name]:
        entry = ElementTree.SubElement(root, "object")
        ElementTree.SubElement(entry, "name").text = label
        box = ElementTree.SubElement(entry, "bndbox")
        edges = {"xmin": x0 + 1, "ymin": y0 + 1, "xmax": x1, "ymax": y1}
        for edge, value in edges.items():
            ElementTree.SubElement(box, edge).text = str(value)
    return root


def write_voc(folder):
    """The layout of the original, with lists of the splits."""
    write_pictures(folder / "JPEGImages")
    (folder / "Annotations").mkdir()
    for name in SIZES:
        text = ElementTree.tostring(voc_xml(name), encoding="unicode")
        (folder / "Annotations" / f"{name}.xml").write_text(text, encoding="utf-8")
    lists = folder / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    for split, names in (("train", "ac"), ("val", "b"), ("test", "d"), ("trainval", "acb")):
        (lists / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
    (lists / "cat_train.txt").write_text("a  1\nc -1\n")
    return folder


def write_cvat(folder):
    """`CVAT for images 1.1`, with subsets."""
    write_pictures(folder / "images")
    root = ElementTree.Element("annotations")
    ElementTree.SubElement(root, "version").text = "1.1"
    labels = ElementTree.SubElement(ElementTree.SubElement(root, "meta"), "labels")
    for label in ("cat", "dog"):
        entry = ElementTree.SubElement(labels, "label")
        ElementTree.SubElement(entry, "name").text = label
    subsets = {"a": "Train", "b": "Validation", "c": "Train", "d": "Test"}
    for number, name in enumerate(SIZES):
        width, height = map(str, SIZES[name])
        image = ElementTree.SubElement(
            root, "image", id=str(number), name=f"{name}.jpg", subset=subsets[name],
            width=width, height=height,
        )  # fmt: skip
        for label, edges in BOXES[name]:
            keys = zip(("xtl", "ytl", "xbr", "ybr"), map(str, edges), strict=True)
            ElementTree.SubElement(image, "box", {"label": label, "occluded": "0", **dict(keys)})
    ElementTree.ElementTree(root).write(folder / "annotations.xml", encoding="utf-8")
    return folder


def write_kitti(folder):
    """`training/` with images and rows, among them a region that does not count."""
    write_pictures(folder / "training" / "image_2")
    (folder / "training" / "label_2").mkdir()
    for name, boxes in BOXES.items():
        rows = [("DontCare", (1, 1, 5, 5)), *boxes]
        text = (f"{label} 0 0 -1.5 {' '.join(map(str, e))} 1 2 4 0 2 20 -2\n" for label, e in rows)
        (folder / "training" / "label_2" / f"{name}.txt").write_text("".join(text))
    return folder


def write_labelstudio(folder):
    """An export of Label Studio as `JSON`; images have the names of uploads."""
    write_pictures(folder / "images")
    tasks = []
    for number, name in enumerate(SIZES, start=1):
        width, height = SIZES[name]
        shapes = [
            {"x": 100 * x0 / width, "y": 100 * y0 / height, "width": 100 * (x1 - x0) / width,
             "height": 100 * (y1 - y0) / height, "rotation": 0, "rectanglelabels": [label]}
            for label, (x0, y0, x1, y1) in BOXES[name]
        ]  # fmt: skip
        size = {"original_width": width, "original_height": height}
        place = f"/data/upload/3/0123abcd-{name}.jpg"
        result = [
            {"id": f"r{i}", "type": "rectanglelabels", "from_name": "label", "to_name": "image",
             "image_rotation": 0, "value": shape, **size}
            for i, shape in enumerate(shapes)
        ]  # fmt: skip
        annotation = {"id": number, "was_cancelled": False, "result": result}
        tasks.append({"id": number, "data": {"image": place}, "annotations": [annotation]})
    path = folder / "export.json"
    path.write_text(json.dumps(tasks), encoding="utf-8")
    return path


def read_split(kind, path, split=None, labels=None, task=Task.DETECTION, **more):
    """The samples of one split of a data set; None for one that comes in one piece."""
    splits = open_source(Source(kind, task, tuple(labels or ()), path=str(path), **more))
    return splits.get(split, splits.get(None))()


def write_yolo(samples_by_split, labels, folder):
    """Write samples so that Ultralytics can train from them.

    Args:
        samples_by_split: Samples per key of the YAML file, such as ``train`` and ``val``.
        labels: Labels in the order of the class indices.
        folder: Where to write; created if missing.

    Returns:
        The YAML file, `folder`/data.yaml.

    Raises:
        DataError: If a split is empty or a box has a label outside `labels`.
    """
    index_of = {label: index for index, label in enumerate(labels)}
    for split, samples in samples_by_split.items():
        if not samples:
            raise DataError(f"no samples to write to split {split} of {folder.name}")
        image_folder, label_folder = folder / "images" / split, folder / "labels" / split
        image_folder.mkdir(parents=True, exist_ok=True)
        label_folder.mkdir(parents=True, exist_ok=True)
        for position, sample in enumerate(samples):
            stem = f"{position:06d}"
            sample.image.save(image_folder / f"{stem}.png")
            rows = [_row(box, sample, index_of) for box in sample.answer.boxes]
            (label_folder / f"{stem}.txt").write_text("".join(rows), encoding="utf-8")
    content = {
        "path": str(folder.resolve()),
        **{str(split): f"images/{split}" for split in samples_by_split},
        "names": dict(enumerate(labels)),
    }
    yaml_path = folder / "data.yaml"
    yaml_path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return yaml_path


def _row(box, sample, index_of):
    if box.label not in index_of:
        raise DataError(
            f"sample {sample.id}: label {box.label!r} is not one of {', '.join(index_of)}"
        )
    width, height = sample.image.size
    numbers = (
        (box.x0 + box.x1) / 2 / width,
        (box.y0 + box.y1) / 2 / height,
        (box.x1 - box.x0) / width,
        (box.y1 - box.y0) / height,
    )
    return f"{index_of[box.label]} " + " ".join(f"{number:.8f}" for number in numbers) + "\n"
