"""Labelled data sets in Ultralytics' YAML format (normalised centre x, y, width, height)."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.images import encoded_file
from valora_data.schema import Answer, Box, Sample, Split, Task
from valora_data.sources.base import (
    Location,
    Source,
    SourceFormat,
    Splits,
    take_missing_from_train,
)
from valora_data.sources.formats.labelled import (
    IMAGES,
    ImageReader,
    Reading,
    check_labels,
    checked_box,
)
from valora_data.sources.formats.tables import read_text
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from PIL.Image import Image

OTHER_NAMES: Mapping[Split, tuple[str, ...]] = {
    Split.VAL: ("val", "validation", "valid"),
    Split.UNLABELLED: ("unlabelled", "unlabeled"),
}
"""Keys of splits, where there are several."""


class YoloFormat(SourceFormat):
    """A YAML file with the folders of the splits."""

    files = "Ultralytics YAML"

    def supports(self, task: Task) -> bool:
        """Object detection."""
        return task.spec.detects

    def recognises(self, location: Location) -> bool:
        """YAML files, and folders that hold one with `names`, or `images/` beside label files."""
        file = location.file
        if file.is_dir():
            return (file / "images").is_dir() and any((file / "labels").rglob("*.txt"))
        if file.suffix not in (".yaml", ".yml") or not file.is_file():
            return False
        return file == location.path or "names" in _parsed(file)

    def guess_task(self, path: str) -> Task:
        """Object detection."""
        return Task.DETECTION

    def open(self, source: Source) -> Splits:
        """The splits that the file names."""
        file = source.file
        names = take_missing_from_train({split: split for split in yolo_splits(file)})
        return {
            key: partial(read_yolo, file, name, source.labels or None, source.reader)
            for key, name in names.items()
        }

    def reads(self, source: Source) -> Iterator[Path]:
        """The YAML file, its lists of images, and the images and labels of all splits."""
        file = source.file
        yield file
        content = _parsed(file)
        root = _root(file, content)
        for split in yolo_splits(file):
            for place in _places(content, split):
                path = _resolved(root, place)
                if path.is_file():
                    yield path
            for image in _images(file.name, root, content, split)[0]:
                yield from (image, _label_file(image))


def read_yolo(
    yaml_path: Path,
    split: str,
    labels: Sequence[str] | None = None,
    reader: ImageReader | None = None,
) -> Iterator[Sample]:
    """Read one split of a data set that Ultralytics can train from.

    Each image `…/images/….jpg` has its boxes in `…/labels/….txt`, one row per object; no file
    means no objects. Rows of a polygon (segmentation) count as the box around it.

    Args:
        yaml_path: File with `path`, `names` and the splits' folders, lists of folders, or text
            files of image paths.
        split: Key of the split in that file, such as ``train`` or ``val``.
        labels: Class names that the domain asks for; others are left out. None for all.
        reader: Opens the images; by default a reader that tolerates few faults.

    Yields:
        One sample per image that decodes, in the order of paths; its id is the image's path below
        the data set's folder.

    Raises:
        DataError: If the file is missing, corrupt or without that split, the split is empty, a
            label is no class, or too many images have faults: they cannot be decoded, or a row of
            their labels is malformed, names an unknown class, or has a box outside the image.
    """
    source = yaml_path.name
    content = _parsed(yaml_path)
    names = _names(source, content)
    if labels is None:
        labels = tuple(names.values())
    check_labels(source, names.values(), labels)
    root = _root(yaml_path, content)
    images, repeated = _images(source, root, content, split)
    with Reading(reader, source, len(images)) as reading:
        for path in repeated:
            reading.add(FaultKind.IMAGE_TWICE, path.name, f"{split} lists {path.name} twice")
        if reading.thorough:
            _note_orphans(images, reading)
        for path, picture in zip(images, reading.open_all(images), strict=True):
            boxes = _boxes(_label_file(path), path, names, reading, picture)
            if picture is not None:
                asked = tuple(box for box in boxes if box.label in labels)
                yield Sample(_below(root, path), picture, Answer(asked))


def _below(root: Path, path: Path) -> str:
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def class_names(yaml_path: Path) -> list[str]:
    """Class names of a data set, in the order of their ids.

    Raises:
        DataError: If the file is missing, corrupt or without names.
    """
    return [name for _, name in sorted(_names(yaml_path.name, _parsed(yaml_path)).items())]


def yolo_splits(yaml_path: Path) -> frozenset[Split]:
    """The splits that a YAML file names.

    Raises:
        DataError: If the file is missing or corrupt.
    """
    content = _parsed(yaml_path)
    return frozenset(split for split in Split if _places(content, split))


def write_yolo(
    samples_by_split: Mapping[str, Sequence[Sample]], labels: Sequence[str], folder: Path
) -> Path:
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
            _write_image(sample.image, image_folder / stem)
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


def _row(box: Box, sample: Sample, index_of: Mapping[str, int]) -> str:
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


def _parsed(yaml_path: Path) -> dict[str, Any]:
    if yaml_path.is_dir():
        raise DataError(
            f"folder {yaml_path} has no data.yaml: write one with names, and with the images' "
            "folders as train, val and test"
        )
    text = read_text(yaml_path)
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise DataError(f"{yaml_path.name} is not valid YAML ({problem}): fix it") from error
    if not isinstance(content, dict):
        raise DataError(f"{yaml_path.name} is no Ultralytics data set: it needs names and paths")
    return content


def _names(source: str, content: dict[str, Any]) -> dict[int, str]:
    names = content.get("names")
    if isinstance(names, list):
        names = dict(enumerate(names))
    if isinstance(names, dict):
        names = {int(key) if str(key).isdecimal() else key: name for key, name in names.items()}
    if not isinstance(names, dict) or not all(isinstance(key, int) for key in names):
        raise DataError(f"{source} has no 'names': list the class names in the order of their ids")
    return {key: str(name) for key, name in names.items()}


def _root(yaml_path: Path, content: Mapping[str, Any]) -> Path:
    return yaml_path.parent / str(content.get("path") or "")


def _places(content: Mapping[str, Any], split: str) -> list[str]:
    keys = OTHER_NAMES[Split(split)] if split in OTHER_NAMES else (split,)
    places: Any = next((content[key] for key in keys if content.get(key)), [])
    return [str(place) for place in (places if isinstance(places, list) else [places])]


def _resolved(root: Path, place: str) -> Path:
    path = root / place
    if not path.exists() and place.startswith("../"):
        # Roboflow writes paths as seen from a folder inside; Ultralytics forgives it, too.
        return root / place.removeprefix("../")
    return path


def _images(
    source: str, root: Path, content: Mapping[str, Any], split: str
) -> tuple[list[Path], list[Path]]:
    """Images of a split in the order of paths, and those that are listed again."""
    places = _places(content, split)
    if not places:
        raise DataError(f"{source} has no split {split!r}: add its folder of images")
    found: list[Path] = []
    for place in places:
        path = _resolved(root, place)
        if path.is_dir():
            found += [
                file
                for file in path.rglob("*")
                if file.suffix.lower() in IMAGES and file.name[0] != "."
            ]
        elif path.is_file() and path.suffix == ".txt":
            lines = read_text(path).split("\n")
            # As Ultralytics has it: "./" is relative to the list itself.
            found += [
                path.parent / line[2:] if line.startswith("./") else root / line
                for line in map(str.strip, lines)
                if line
            ]
        else:
            raise DataError(f"{source}: split {split!r} names {path}, which does not exist")
    if not found:
        raise DataError(f"{source}: split {split!r} holds no images: the data set is empty")
    once = sorted(set(found))
    repeated = sorted(path for path, count in Counter(found).items() if count > 1)
    return once, repeated


def _note_orphans(images: Iterable[Path], reader: ImageReader) -> None:
    """Note label files beside those of the images that belong to none."""
    wanted = {_label_file(image) for image in images}
    for folder in sorted({path.parent for path in wanted}):
        for path in sorted(folder.glob("*.txt")):
            if path not in wanted and path.name != "classes.txt":
                reader.add(FaultKind.LABELS_ORPHANED, path.name, f"{path.name} belongs to no image")


def _label_file(image: Path) -> Path:
    """`…/images/a/b.jpg` → `…/labels/a/b.txt`: the last folder of that name counts."""
    parts = list(image.parts)
    for position in range(len(parts) - 2, -1, -1):
        if parts[position] == "images":
            parts[position] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _boxes(
    path: Path,
    image: Path,
    names: Mapping[int, str],
    reader: ImageReader,
    picture: Image | None,
) -> list[Box]:
    """Boxes of an image; on a unit square if it cannot be decoded, to find faults only."""
    size = (1, 1) if picture is None else picture.size
    if not path.exists():
        reader.add(
            FaultKind.IMAGE_UNLABELLED, image.name, f"{image.name} has no label file {path.name}"
        )
        return []
    try:
        lines = read_text(path).splitlines()
    except DataError as error:
        reader.add(FaultKind.FILE_MALFORMED, image.name, str(error))
        return []
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        reader.add(FaultKind.LABELS_EMPTY, image.name, f"{path.name} holds no rows")
    boxes: list[Box] = []
    seen: set[str] = set()
    for number, line in rows:
        where = f"{path.name}, row {number}"
        cells = line.split()
        if " ".join(cells) in seen:
            reader.add(FaultKind.ROW_REPEATED, image.name, f"{where} repeats an earlier row")
            continue
        seen.add(" ".join(cells))
        with reader.tolerate(image.name):
            boxes.append(_box(cells, names, size, where))
    return boxes


def _box(row: list[str], names: Mapping[int, str], size: tuple[int, int], where: str) -> Box:
    try:
        index, *numbers = (float(cell) for cell in row)
    except ValueError as error:
        raise FaultError(
            FaultKind.ROW_MALFORMED, f"{where}: {' '.join(row)!r} is not a row of numbers"
        ) from error
    if len(numbers) != 4 and (len(numbers) < 6 or len(numbers) % 2):
        raise FaultError(
            FaultKind.ROW_MALFORMED,
            f"{where}: expected a class and 4 numbers (centre x, y, width, height) or a polygon, "
            f"got {plural(len(numbers), 'number')}"
            + (", of which the last may be a confidence" if len(numbers) == 5 else ""),
        )
    if index not in names:
        raise FaultError(
            FaultKind.CLASS_UNKNOWN,
            f"{where}: class {index:g} is none of {', '.join(map(str, list(names)[:10]))}",
        )
    width, height = size
    if len(numbers) == 4:
        x, y, w, h = numbers
        edges = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
    else:
        xs, ys = numbers[0::2], numbers[1::2]
        edges = (min(xs), min(ys), max(xs), max(ys))
    x0, y0, x1, y1 = edges
    pixels = (x0 * width, y0 * height, x1 * width, y1 * height)
    return checked_box(pixels, names[int(index)], size, where)


def _write_image(image: Image, path: Path) -> None:
    """Write an image without a loss: the file that it came from, where others read it alike."""
    file = encoded_file(image)
    kinds = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png"}
    for magic, suffix in kinds.items():
        if file is not None and file.plain and file.content.startswith(magic):
            path.with_suffix(suffix).write_bytes(file.content)
            return
    image.save(path.with_suffix(".png"))
