"""Ultralytics' data sets: a YAML file with the folders of images, a text file for each image."""

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from valora_data.contract.files import expanded
from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind, ImageReader
from valora_data.schema import Split, Task
from valora_data.sources.base import Location, Source
from valora_data.sources.formats import annotated, files
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, Shape, shares
from valora_data.wording import plural


class YoloFormat(AnnotatedFormat):
    """A YAML file with the folders of the splits; `…/images/….jpg` has rows in `…/labels/….txt`."""

    answers = frozenset({"objects"})
    task = Task.DETECTION

    def recognises(self, location: Location) -> bool:
        file = location.file
        if file.is_dir():
            labels = files.files_below(file / "labels", frozenset({".txt"}))
            return (file / "images").is_dir() and bool(labels)
        if file.suffix not in (".yaml", ".yml") or not file.is_file():
            return False
        return file == location.path or "names" in YoloSet(file).content

    def parts(self, source: Source) -> Mapping[Split | None, Any]:
        """The splits that the file names; one with the images of train is taken from it."""
        data = YoloSet(source.file)
        splits = {split: split for split in data.splits}
        for split in (Split.VAL, Split.TEST):
            if split in splits and data.locations(split) == data.locations(Split.TRAIN):
                del splits[split]
                if source.reader is not None:
                    text = f"{split} of {data.name} names the images of train"
                    source.reader.add(FaultKind.SPLIT_REPEATED, str(split), text)
        return files.with_rest(splits, Split.TRAIN) if splits else {}

    def lists(self, source: Source) -> Iterator[Path]:
        data = YoloSet(source.file)
        locations = [path for split in data.splits for path in data.locations(split)]
        yield from [source.file, *filter(files.is_file, locations)]

    def records(self, source: Source, part: Split, reading: ImageReader) -> Iterator[Record]:
        data = YoloSet(source.file)
        if source.labels:
            annotated.check_labels(data.name, data.names.values(), source.labels)
        images = data.images(part)
        reading.total += len({*images})
        everything = [*images]  # splits may be lists of one folder
        for split in data.splits:
            with contextlib.suppress(DataError):
                everything += data.images(split)
        labels = annotated.label_files({one: _label_file(one) for one in everything}, reading)
        for path in images:
            key, file = path.as_posix().removeprefix(f"{data.root.as_posix()}/"), labels[path]
            yield Record((path,), key, annotated.rows_of(file), data.shape, file=file)


class YoloSet:
    """A data set's YAML file: `names`, and for each split folders, or a text file of paths."""

    def __init__(self, file: Path) -> None:
        self.file, self.name = file, file.name
        if file.is_dir():
            splits = [path.name for path in sorted((file / "images").glob("*")) if path.is_dir()]
            lines = [f"{name}: images/{name}" for name in splits] or ["train: images"]
            text = f"folder {file} has no data.yaml: write one with the lines {', '.join(lines)},"
            raise DataError(f"{text} and names: [the class names in the order of their ids]")
        try:
            self.content = yaml.safe_load(files.read_text(file))
        except yaml.YAMLError as error:
            problem = " ".join(str(error).split())
            raise DataError(f"{file.name} is not valid YAML ({problem}): fix it") from error
        if not isinstance(self.content, dict):
            raise DataError(f"{file.name} is no Ultralytics data set: it needs names and paths")

    @property
    def splits(self) -> list[Split]:
        return [split for split in Split if self._named(split)]

    @cached_property
    def names(self) -> dict[int, str]:
        names = self.content.get("names")
        given = dict(enumerate(names)) if isinstance(names, list) else names
        try:
            found = {int(key): name for key, name in given.items()}
        except (AttributeError, TypeError, ValueError) as error:
            text = f"{self.name} has no 'names': list the class names in the order of their ids"
            raise DataError(text) from error
        names = {key: str(name) for key, name in found.items()}
        for name in found.values():
            if isinstance(name, bool | None) or [*names.values()].count(str(name)) > 1:
                text = f"{self.name}: {name} names two classes, or is how YAML reads no, on or null"
                raise DataError(f"{text}: rename one of them, or put the name in quotes")
        return names

    @cached_property
    def root(self) -> Path:
        """The folder that `path` names, as Ultralytics finds it; that of the file if it moved."""
        beside = self.file.parent
        given = expanded(str(self.content.get("path") or "").replace("\\", "/"))
        tried = [beside / given, Path.cwd() / given, Path.cwd() / "datasets" / given, beside]
        locations = [location for split in Split for location in self._named(split)]
        for root in tried if locations else ():
            if files.exists(_resolved(root, locations[0])):
                return root
        return tried[0] if files.exists(tried[0]) else beside

    def locations(self, split: Split) -> list[Path]:
        return [_resolved(self.root, location) for location in self._named(split)]

    def images(self, split: Split) -> list[Path]:
        """Images of a split in the order of paths, as often as they are listed."""
        found: list[Path] = []
        for location in self.locations(split):
            if files.exists(location) and location.is_dir():
                found += files.files_below(location, files.IMAGES)
            elif files.is_file(location) and location.suffix == ".txt":
                finder = files.Finder(self.root)
                for line in map(str.strip, files.read_text(location).split("\n")):
                    if line.startswith("./"):  # as Ultralytics has it, beside the list
                        found.append(location.parent / line[2:])
                    elif line:
                        found.append(finder.find(line))
            else:
                text = f"{self.name}: split '{split}' names {location}, which does not exist"
                raise DataError(f"{text}: correct it, or the `path` that it is relative to")
        if not found:
            raise DataError(f"{self.name}: split '{split}' holds no images: the data set is empty")
        return sorted(found)

    def shape(self, row: str) -> Shape | None:
        """The label and the edges of a row; None for an empty one."""
        if not row.strip():
            return None
        try:
            index, *numbers = map(float, row.split())
        except ValueError as error:
            text = f"{row.strip()!r} is not a row of numbers"
            raise FaultError(FaultKind.ROW_MALFORMED, text) from error
        if index not in self.names:
            known = ", ".join(map(str, [*self.names][:10]))
            raise FaultError(FaultKind.CLASS_UNKNOWN, f"class {index:g} is none of {known}")
        label, count = self.names[int(index)], len(numbers)
        if count in (4, 4 + self._keypoints):
            x, y, width, height = numbers[:4]
            return label, shares(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        if count >= 6 and count % 2 == 0 and not self._keypoints:
            xs, ys = numbers[0::2], numbers[1::2]
            return label, shares(min(xs), min(ys), max(xs), max(ys))
        more = f"{self._keypoints} of keypoints" if self._keypoints else "a polygon (no kpt_shape)"
        text = f"expected a class and 4 numbers (centre x, y, width, height) or {more}, got "
        text += plural(count, "number") + ", of which the last may be a confidence" * (count == 5)
        raise FaultError(FaultKind.ROW_MALFORMED, text)

    @cached_property
    def _keypoints(self) -> int:
        match shape := self.content.get("kpt_shape"):
            case None:
                return 0
            case [int(count), 2 | 3 as numbers]:
                return count * int(numbers)
        raise DataError(f"{self.name}: kpt_shape {shape} is not [keypoints, 2 or 3]: correct it")

    def _named(self, split: Split) -> list[str]:
        keys = (key for key, named in files.SPLIT_NAMES.items() if named is split)
        locations: Any = next(filter(None, map(self.content.get, keys)), [])
        found = locations if isinstance(locations, list) else [locations]
        return [str(location).replace("\\", "/") for location in found]


def _resolved(root: Path, location: str) -> Path:
    path = root / location
    if not files.exists(path) and location.startswith("../"):
        # Roboflow writes paths as seen from a folder inside; Ultralytics forgives it, too.
        return root / location.removeprefix("../")
    return path


def _label_file(image: Path) -> Path:
    """`…/images/a/b.jpg` → `…/labels/a/b.txt`: the last folder of that name counts."""
    before, found, after = f"/{image}".rpartition("/images/")
    return Path(f"{before}/labels/{after}"[1:] if found else image).with_suffix(".txt")


class KittiFormat(AnnotatedFormat):
    """`image_2/` and `label_2/`, or `training/` with both: type, …, edges in pixels, … in a row."""

    answers = frozenset({"objects"})
    task = Task.DETECTION

    def recognises(self, location: Location) -> bool:
        return (_root(location.path) / "label_2").is_dir()

    def parts(self, source: Source) -> Mapping[Split | None, Path]:
        return {None: Path(source.images or _root(Path(source.location)) / "image_2")}

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        images, folder = files.images_below(part), _root(Path(source.location)) / "label_2"
        reading.total += len(images)
        expected = {image: folder / f"{image.stem}.txt" for image in images}
        for image, file in annotated.label_files(expected, reading, folder).items():
            yield Record((image,), image.name, annotated.rows_of(file), _kitti_shape, file=file)


def _root(folder: Path) -> Path:
    return folder / "training" if (folder / "training" / "label_2").is_dir() else folder


def _kitti_shape(row: str) -> Shape | None:
    cells = row.split()
    if not cells or cells[0] == "DontCare":
        return None
    if len(cells) not in (15, 16):
        text = f"expected a type and 14 numbers, got {len(cells)} cells"
        raise FaultError(FaultKind.ROW_MALFORMED, text)
    return cells[0], annotated.four_numbers(cells[4:8])
