"""Small detection data sets, written in the formats that annotation tools export.

A set maps names of files to a picture and its objects: labels and edges (x0, y0, x1, y1).
"""

import yaml

from tests.support.data_sets import natural_picture, write_json
from tests.support.helpers import coloured_squares
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
SUBSETS = {"a.jpg": "Train", "b.jpg": "Validation", "c.jpg": "Train", "d.jpg": "Test"}


def picture_of(name):
    """The picture of a pet, which is no other's."""
    return natural_picture(ord(name)).resize(SIZES[name])


def pets(names=SIZES):
    """A set of few images, of other sizes, with none or several objects."""
    return {f"{name}.jpg": (picture_of(name), BOXES[name]) for name in names}


def marked(*labels, count=40, first=0):
    """A set of many images with one object each, whose labels take turns."""
    objects = [(label, (8, 9, 60, 50)) for label in labels]
    return {
        f"{first + n}.png": (natural_picture(first + n), [objects[n % len(objects)]])
        for n in range(count)
    }


def labels_of(*sets):
    """Labels in the order in which they occur."""
    objects = [one for some in sets for _, found in some.values() for one in found]
    return list(dict.fromkeys(label for label, _ in objects))


def write_pictures(folder, some, form=None):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (picture, _) in some.items():
        picture.save(folder / name, form, quality=95)


def coco(some, labels):
    """What a COCO file says of a set; categories are counted from 1."""
    annotations = [
        {"image_id": number, "category_id": labels.index(label) + 1, "iscrowd": 0,
         "bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0), "segmentation": []}
        for number, (_, objects) in enumerate(some.values())
        for label, (x0, y0, x1, y1) in objects
    ]  # fmt: skip
    return {
        "images": [
            {"id": number, "file_name": name, "width": picture.width, "height": picture.height}
            for number, (name, (picture, _)) in enumerate(some.items())
        ],
        "annotations": [{"id": number} | one for number, one in enumerate(annotations, 1)],
        "categories": [{"id": number, "name": label} for number, label in enumerate(labels, 1)],
    }


def write_coco(folder, some):
    """`instances.json` beside `images/`."""
    write_pictures(folder / "images", some)
    return write_json(folder / "instances.json", coco(some, labels_of(some)))


def write_roboflow(folder, splits=None):
    """An export as Roboflow writes it: category 0 is the group of the others."""
    splits = splits or {"train": pets("ac"), "valid": pets("b"), "test": pets("d")}
    group = {"id": 0, "name": "all", "supercategory": "none"}
    for split, some in splits.items():
        write_pictures(folder / split, some)
        content = coco(some, labels_of(*splits.values()))
        ours = [one | {"supercategory": "all"} for one in content["categories"]]
        content |= {"info": {"description": "Exported from roboflow.com"}}
        write_json(
            folder / split / "_annotations.coco.json", content | {"categories": [group, *ours]}
        )
    return folder


def voc_xml(name, picture, objects):
    """Annotation of one image, whose pixels are counted from 1."""
    shapes = "".join(
        f"<object><name>{label}</name><bndbox><xmin>{x0 + 1}</xmin><ymin>{y0 + 1}</ymin>"
        f"<xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
        for label, (x0, y0, x1, y1) in objects
    )
    size = f"<width>{picture.width}</width><height>{picture.height}</height><depth>3</depth>"
    return f"<annotation><filename>{name}</filename><size>{size}</size>{shapes}</annotation>"


def write_voc(folder, some=None, annotations="Annotations", images="JPEGImages", form=None):
    """The layout of the original; pets with lists of the splits."""
    write_pictures(folder / images, some or pets(), form)
    (folder / annotations).mkdir(exist_ok=True)
    for name, entry in (some or pets()).items():
        file = (folder / annotations / name).with_suffix(".xml")
        file.write_text(voc_xml(name, *entry), encoding="utf-8")
    if some is None:
        lists = folder / "ImageSets" / "Main"
        lists.mkdir(parents=True)
        for split, names in (("train", "ac"), ("val", "b"), ("test", "d"), ("trainval", "acb")):
            (lists / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
        (lists / "cat_train.txt").write_text("a  1\nc -1\n")
    return folder


def write_cvat(folder, some=None):
    """`CVAT for images 1.1`, with subsets."""
    some = some or pets()
    write_pictures(folder / "images", some)
    labels = "".join(f"<label><name>{label}</name></label>" for label in labels_of(some))
    text = f"<version>1.1</version><meta><labels>{labels}</labels></meta>"
    for number, (name, (picture, objects)) in enumerate(some.items()):
        boxes = "".join(
            f'<box label="{label}" occluded="0" xtl="{x0}" ytl="{y0}" xbr="{x1}" ybr="{y1}"/>'
            for label, (x0, y0, x1, y1) in objects
        )
        size = f'width="{picture.width}" height="{picture.height}"'
        subset = SUBSETS.get(name, "default")
        text += f'<image id="{number}" name="{name}" subset="{subset}" {size}>{boxes}</image>'
    (folder / "annotations.xml").write_text(f"<annotations>{text}</annotations>", encoding="utf-8")
    return folder


def write_kitti(folder, some=None):
    """`training/` with images and rows, among them a region that does not count."""
    some = some or pets()
    write_pictures(folder / "training" / "image_2", some)
    (folder / "training" / "label_2").mkdir()
    for name, (_, objects) in some.items():
        rows = [("DontCare", (1, 1, 5, 5)), *objects]
        text = (f"{label} 0 0 -1.5 {' '.join(map(str, e))} 1 2 4 0 2 20 -2\n" for label, e in rows)
        file = (folder / "training" / "label_2" / name).with_suffix(".txt")
        file.write_text("".join(text))
    return folder


def write_labelstudio(folder, some=None):
    """An export of Label Studio as `JSON`; images have the names of uploads."""
    some = some or pets()
    write_pictures(folder / "images", some)
    tasks = []
    for number, (name, (picture, objects)) in enumerate(some.items(), start=1):
        width, height = picture.size
        shapes = [
            {"x": 100 * x0 / width, "y": 100 * y0 / height, "width": 100 * (x1 - x0) / width,
             "height": 100 * (y1 - y0) / height, "rotation": 0, "rectanglelabels": [label]}
            for label, (x0, y0, x1, y1) in objects
        ]  # fmt: skip
        size = {"original_width": width, "original_height": height}
        result = [
            {"id": f"r{i}", "type": "rectanglelabels", "from_name": "label", "to_name": "image",
             "image_rotation": 0, "value": shape, **size}
            for i, shape in enumerate(shapes)
        ]  # fmt: skip
        annotation = {"id": number, "was_cancelled": False, "result": result}
        data = {"image": f"/data/upload/3/0123abcd-{name}"}
        tasks.append({"id": number, "data": data, "annotations": [annotation]})
    return write_json(folder / "export.json", tasks)


def write_yolo(folder, splits):
    """As Ultralytics trains on it: a YAML file beside the images and labels of each split."""
    labels = labels_of(*splits.values())
    for split, some in splits.items():
        write_pictures(folder / "images" / split, some)
        (folder / "labels" / split).mkdir(parents=True)
        for name, (picture, objects) in some.items():
            width, height = picture.size
            rows = "".join(
                f"{labels.index(label)} {(x0 + x1) / 2 / width:.8f} {(y0 + y1) / 2 / height:.8f} "
                f"{(x1 - x0) / width:.8f} {(y1 - y0) / height:.8f}\n"
                for label, (x0, y0, x1, y1) in objects
            )
            (folder / "labels" / split / name).with_suffix(".txt").write_text(rows)
    content = {split: f"images/{split}" for split in splits} | {"names": labels}
    (folder / "data.yaml").write_text(yaml.safe_dump(content))
    return folder / "data.yaml"


def coco_domain(folder, change=lambda _: None, count=40, colour="red", name="cat"):
    """Settings of a domain of squares in a folder, whose COCO file `change` may spoil."""
    some = {
        f"{number}.png": (one.image, [(name, box.xyxy) for box in one.answer.boxes])
        for number, one in enumerate(coloured_squares(count, 1, name, colour))
    }
    write_pictures(folder, some)
    content = coco(some, [name])
    change(content)
    write_json(folder / "cats.json", content)
    place = f"domains.{name}"
    return ["task=own", f"+domain@{place}=coco", f"{place}.name={name}", f"{place}.labels=[{name}]",
            f"{place}.source.path={folder}/cats.json"]  # fmt: skip


def read_split(kind, path, split=None, labels=None, task=Task.DETECTION, **more):
    """The samples of one split of a data set; None for one that comes in one piece."""
    splits = open_source(Source(kind, task, tuple(labels or ()), path=str(path), **more))
    return splits.get(split, splits.get(None))()
