"""Ultralytics' data sets: a YAML file with the folders of images, a text file for each image."""

from __future__ import annotations

import logging
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from valora_data.contract.files import expanded
from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Split, Task
from valora_data.sources.base import take_missing_from_train
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, collected
from valora_data.sources.formats.files import IMAGES, Finder, files_below, is_file
from valora_data.sources.formats.labelled import Shape, check_labels, readable, shares
from valora_data.sources.formats.tables import read_text
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from valora_data.sources.base import Location, Source
    from valora_data.sources.formats.labelled import ImageReader

log = logging.getLogger(__name__)

OTHER_NAMES: Mapping[Split, tuple[str, ...]] = {
    Split.VAL: ("val", "validation", "valid"),
    Split.UNLABELLED: ("unlabelled", "unlabeled"),
}
"""Keys of splits, where there are several."""
TEXTS = frozenset({".txt"})


class YoloFormat(AnnotatedFormat):
    """A YAML file with the folders of the splits.

    Each image `…/images/….jpg` has its boxes in `…/labels/….txt`, one row per object; no file means
    no objects. Rows of a polygon count as the box around it; of a pose the box is taken.
    """

    files = "Ultralytics YAML"

    def supports(self, task: Task) -> bool:
        """Object detection."""
        return task.spec.detects

    def recognises(self, location: Location) -> bool:
        """YAML files, and folders that hold one with `names`, or `images/` beside label files."""
        file = location.file
        if file.is_dir():
            return (file / "images").is_dir() and bool(files_below(file / "labels", TEXTS))
        if file.suffix not in (".yaml", ".yml") or not file.is_file():
            return False
        return file == location.path or "names" in _parsed(file)

    def guess_task(self, path: str) -> Task:
        """Object detection."""
        return Task.DETECTION

    def parts(self, source: Source) -> dict[Split | None, Any]:
        """The splits that the file names."""
        data = YoloSet(source.file)
        places = {split: data.places(split) for split in data.splits}
        for split in (Split.VAL, Split.TEST):
            if split in places and places[split] == places.get(Split.TRAIN):
                del places[split]
                text = f"{split} of {data.name} names the images of train"
                log.warning("%s: a part of them is taken for it", text)
                if source.reader is not None:
                    source.reader.add(FaultKind.SPLIT_REPEATED, str(split), text)
        return dict(take_missing_from_train({split: split for split in places}))

    def name(self, source: Source, part: Split) -> str:
        """Name of the YAML file."""
        return source.file.name

    def lists(self, source: Source) -> Iterator[Path]:
        """The YAML file and its lists of images."""
        yield source.file
        data = YoloSet(source.file)
        yield from filter(is_file, (path for split in data.splits for path in data.places(split)))

    def records(self, source: Source, part: Split, reading: ImageReader) -> Iterator[Record]:
        """Images of a split in the order of paths; ids are paths below the data set's folder."""
        data = YoloSet(source.file)
        if source.labels:
            check_labels(data.name, data.names.values(), source.labels)
        images = data.images(part)
        reading.total += len(images)
        for path, count in images.items():
            if count > 1:
                text = f"{part} lists {path.name} twice"
                reading.add(FaultKind.IMAGE_TWICE, readable(path.name), text)
        files = _label_files(list(images), data.name, reading)
        for path, file in files.items():
            below = path.relative_to(data.root) if path.is_relative_to(data.root) else path
            shapes = data.shapes(file, readable(path.name), reading) if file.exists() else None
            yield Record(path, below.as_posix(), shapes, file=file)


class YoloSet:
    """A data set's YAML file.

    Args:
        file: The file, with `names` and the splits' folders, lists of folders, or text files of
            image paths, relative to `path`.

    Raises:
        DataError: It is missing or corrupt. Attributes and methods raise what they find missing.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.name = file.name
        self._content = _parsed(file)

    @property
    def splits(self) -> list[Split]:
        """The splits that it names."""
        return [split for split in Split if self._named(split)]

    @cached_property
    def names(self) -> dict[int, str]:
        """Class names by id."""
        names = self._content.get("names")
        if isinstance(names, list):
            names = dict(enumerate(names))
        if isinstance(names, dict):
            names = {int(key) if str(key).isdecimal() else key: name for key, name in names.items()}
        if not isinstance(names, dict) or not all(isinstance(key, int) for key in names):
            raise DataError(
                f"{self.name} has no 'names': list the class names in the order of their ids"
            )
        if any(isinstance(name, bool) for name in names.values()):
            raise DataError(
                f"{self.name}: YAML reads the class names yes, no, on and off as true and false: "
                "write them in quotes"
            )
        return {key: str(name) for key, name in names.items()}

    @cached_property
    def root(self) -> Path:
        """The folder that `path` names, as Ultralytics finds it; that of the file if it moved."""
        beside = self.file.parent
        given = expanded(str(self._content.get("path") or "").replace("\\", "/"))
        places = [name for split in Split for name in self._named(split)]
        tried = [beside / given, Path.cwd() / given, Path.cwd() / "datasets" / given, beside]
        for root in tried:
            if any(_resolved(root, place).exists() for place in places[:1]):
                return root
        return tried[0] if tried[0].exists() else beside

    def places(self, split: Split) -> list[Path]:
        """Folders and lists of a split."""
        return [_resolved(self.root, place) for place in self._named(split)]

    def images(self, split: Split) -> dict[Path, int]:
        """Images of a split in the order of paths, with how often they are listed."""
        found: list[Path] = []
        for place in self.places(split):
            if place.is_dir():
                found += files_below(place, IMAGES)
            elif is_file(place) and place.suffix == ".txt":
                found += _listed(place, self.root)
            else:
                raise DataError(
                    f"{self.name}: split '{split}' names {place}, which does not exist: correct "
                    "it, or the `path` that it is relative to"
                )
        if not found:
            raise DataError(f"{self.name}: split '{split}' holds no images: the data set is empty")
        return dict(sorted(Counter(found).items()))

    def shapes(self, file: Path, item: str, reading: ImageReader) -> list[Shape]:
        """Objects of an image's label file."""
        try:
            lines = read_text(file).splitlines()
        except DataError as error:
            reading.add(FaultKind.FILE_MALFORMED, item, str(error))
            return []
        rows = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        return collected(rows, lambda row, _: self._shape(row, file.name), item, reading)

    def _shape(self, row: tuple[int, str], file: str) -> Shape:
        where = f"{file}, row {row[0]}"
        try:
            index, *numbers = (float(cell) for cell in row[1].split())
        except ValueError as error:
            raise FaultError(
                FaultKind.ROW_MALFORMED, f"{where}: {row[1].strip()!r} is not a row of numbers"
            ) from error
        keypoints = self._keypoints
        if keypoints and len(numbers) == 4 + keypoints:
            numbers = numbers[:4]
        if len(numbers) != 4 and (keypoints or len(numbers) < 6 or len(numbers) % 2):
            more = f"{keypoints} of keypoints" if keypoints else "a polygon"
            raise FaultError(
                FaultKind.ROW_MALFORMED,
                f"{where}: expected a class and 4 numbers (centre x, y, width, height) or {more}, "
                f"got {plural(len(numbers), 'number')}"
                + (", of which the last may be a confidence" if len(numbers) == 5 else ""),
            )
        if index not in self.names:
            raise FaultError(
                FaultKind.CLASS_UNKNOWN,
                f"{where}: class {index:g} is none of {', '.join(map(str, list(self.names)[:10]))}",
            )
        if len(numbers) == 4:
            x, y, w, h = numbers
            edges = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
        else:
            xs, ys = numbers[0::2], numbers[1::2]
            edges = (min(xs), min(ys), max(xs), max(ys))
        return Shape(self.names[int(index)], shares(*edges), where)

    @cached_property
    def _keypoints(self) -> int:
        """Numbers of all keypoints of a row."""
        shape = self._content.get("kpt_shape")
        if shape is None:
            return 0
        match shape:
            case [int(count), 2 | 3 as numbers]:
                return count * int(numbers)
        raise DataError(f"{self.name}: kpt_shape {shape} is not [keypoints, 2 or 3]: correct it")

    def _named(self, split: Split) -> list[str]:
        keys = OTHER_NAMES.get(split, (split,))
        places: Any = next((self._content[key] for key in keys if self._content.get(key)), [])
        found = places if isinstance(places, list) else [places]
        return [str(place).replace("\\", "/") for place in found]


def _parsed(yaml_path: Path) -> dict[str, Any]:
    if yaml_path.is_dir():
        splits = [path.name for path in sorted((yaml_path / "images").glob("*")) if path.is_dir()]
        lines = [f"{name}: images/{name}" for name in splits] or ["train: images"]
        raise DataError(
            f"folder {yaml_path} has no data.yaml: write one with the lines {', '.join(lines)}, "
            "and names: [the class names in the order of their ids]"
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


def _resolved(root: Path, place: str) -> Path:
    path = root / place
    if not path.exists() and place.startswith("../"):
        # Roboflow writes paths as seen from a folder inside; Ultralytics forgives it, too.
        return root / place.removeprefix("../")
    return path


def _listed(file: Path, root: Path) -> list[Path]:
    """Images of a text file; as Ultralytics has it, "./" is relative to the file itself."""
    lines = [line.strip() for line in read_text(file).split("\n") if line.strip()]
    finder = Finder(root)
    return [
        file.parent / line[2:] if line.startswith("./") else finder.find(line) for line in lines
    ]


def _label_files(images: Sequence[Path], name: str, reading: ImageReader) -> dict[Path, Path]:
    """The label file of each image, which need not exist; in another spelling if no other fits."""
    files = {image: _label_file(image) for image in images}
    taken = {file for file in files.values() if file.exists()}
    finders: dict[Path, Finder] = {}
    lacking = [image for image, file in files.items() if file not in taken]
    for image in lacking:
        folder = files[image].parent
        finder = finders.setdefault(folder, Finder(folder, TEXTS))
        found = finder.of_stem(image.stem, files[image])
        if found is not None and found not in taken:
            taken.add(found)
            files[image] = found
    lacking = [image for image in lacking if files[image] not in taken]
    if lacking or reading.thorough:
        orphans = _orphans({file.parent for file in files.values()}, taken)
        for path in orphans:
            item = readable(path.name)
            reading.add(FaultKind.LABELS_ORPHANED, item, f"{item} belongs to no image")
        if lacking and orphans and reading.source:  # not at the first look
            log.warning(
                "%s: %s, such as %s, and %s, such as %s: give them the same names",
                name, plural(len(orphans), "label file|files belongs|belong to no image"),
                readable(orphans[0].name), plural(len(lacking), "image|images has|have no labels"),
                readable(lacking[0].name),
            )  # fmt: skip
    return files


def _orphans(folders: set[Path], taken: set[Path]) -> list[Path]:
    found = {
        path
        for folder in folders
        for path in sorted(folder.glob("*.txt"))
        if path not in taken and path.name != "classes.txt"
    }
    return sorted(found)


def _label_file(image: Path) -> Path:
    """`…/images/a/b.jpg` → `…/labels/a/b.txt`: the last folder of that name counts."""
    parts = list(image.parts)
    for position in range(len(parts) - 2, -1, -1):
        if parts[position] == "images":
            parts[position] = "labels"
            break
    return Path(*parts).with_suffix(".txt")
