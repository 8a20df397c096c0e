"""Pascal VOC: one XML file for each image, with boxes in pixels that are counted from 1.

Either `Annotations/`, `JPEGImages/` and lists of names in `ImageSets/Main/`, as in the original; or
XML files beside their images, as labelImg writes them, in folders that may be named like splits.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Box, Sample, Split, Task
from valora_data.sources.base import (
    Location,
    Source,
    SourceFormat,
    Splits,
    take_missing_from_train,
)
from valora_data.sources.formats.folders import SPLIT_NAMES, folder_splits
from valora_data.sources.formats.labelled import (
    IMAGES,
    Frame,
    ImageReader,
    Reading,
    check_labels,
)
from valora_data.sources.formats.tables import read_text
from valora_data.sources.formats.xml import child_text, number, parse_xml

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from xml.etree.ElementTree import Element

    from PIL.Image import Image

ANNOTATIONS, PICTURES, SETS = "Annotations", "JPEGImages", "ImageSets/Main"


class VocFormat(SourceFormat):
    """A folder of images and XML files."""

    def supports(self, task: Task) -> bool:
        """Object detection."""
        return task.spec.detects

    def recognises(self, location: Location) -> bool:
        """Folders with `Annotations/`, or with XML files beside images."""
        if not location.path.is_dir():
            return False
        return next((location.path / ANNOTATIONS).glob("*.xml"), None) is not None or any(
            _image_of(file, file.parent) is not None
            for pattern in ("*.xml", "*/*.xml")
            for file in list(location.path.glob(pattern))[:1]
        )

    def guess_task(self, path: str) -> Task:
        """Object detection."""
        return Task.DETECTION

    def open(self, source: Source) -> Splits:
        """The splits that lists or folders are named after, or all images as one piece."""
        whole = Path(source.location)
        images = Path(source.images) if source.images else None
        return {
            split: partial(
                read_voc, files, whole, source.labels or None, source.reader, images=images
            )
            for split, files in _splits(whole, images).items()
        }

    def reads(self, source: Source) -> Iterator[Path]:
        """The lists of names, and the images and XML files of all splits."""
        whole = Path(source.location)
        yield from sorted((whole / SETS).glob("*.txt"))
        for files in _splits(whole, Path(source.images) if source.images else None).values():
            for image in files:
                yield from (image, _annotation_of(image, whole))


def read_voc(
    files: Sequence[Path],
    folder: Path,
    labels: Sequence[str] | None = None,
    reader: ImageReader | None = None,
    *,
    images: Path | None = None,
) -> Iterator[Sample]:
    """Read images with the boxes of their XML files.

    A box of xmin, ymin, xmax and ymax covers these pixels and all between them, and the first pixel
    is number 1, as the devkit defines it; so it reaches from xmin − 1 to xmax here.

    Args:
        files: The images.
        folder: Folder of the data set.
        labels: Names of objects that the domain asks for; others are left out. None for all.
        reader: Opens the images; by default a reader that tolerates few faults.
        images: Folder that ids are relative to; None for `folder`.

    Yields:
        One sample per image that decodes; its id is the image's path below the folder.

    Raises:
        DataError: If a label is no object's name, or too many images have faults.
    """
    parsed = {path: _parsed(_annotation_of(path, folder)) for path in files}
    names = {
        child_text(entry, "name")
        for root in parsed.values()
        if not isinstance(root, FaultError) and root is not None
        for entry in root.iter("object")
    }
    if labels and names and not names & set(labels):
        check_labels(folder.name, sorted(names), labels)
    with Reading(reader, folder.name, len(files)) as reading:
        if reading.thorough:
            _note_orphans(folder, files, reading)
        for path, picture in zip(files, reading.open_all(files), strict=True):
            root = parsed[path]
            if root is None:
                text = f"{path.name} has no XML file"
                reading.add(FaultKind.IMAGE_UNLABELLED, path.name, text)
            elif isinstance(root, FaultError):
                reading.add(root.kind, path.name, root.text)
                continue
            if picture is None:
                continue
            with reading.tolerate(path.name):
                boxes = () if root is None else _boxes(root, path, picture, labels, reading)
                place = images if images and path.is_relative_to(images) else folder
                yield Sample(path.relative_to(place).as_posix(), picture, Answer(boxes))


def _splits(whole: Path, images: Path | None) -> dict[Split | None, list[Path]]:
    """Images by split."""
    if not whole.is_dir():
        raise DataError(f"folder {whole} does not exist: check the path")
    if (whole / ANNOTATIONS).is_dir():
        pictures = images or whole / PICTURES
        lists = {
            split: file
            for file in sorted((whole / SETS).glob("*.txt"))
            if (split := SPLIT_NAMES.get(file.stem)) is not None
        }
        if lists:
            return {
                split: [_listed(pictures, name) for name in _names(file)]
                for split, file in take_missing_from_train(lists).items()
            }
        return {None: _pictures(pictures)}
    folders = folder_splits(whole)
    if folders:
        return {
            split: _pictures(folder) for split, folder in take_missing_from_train(folders).items()
        }
    return {None: _pictures(whole)}


def _names(file: Path) -> list[str]:
    """Names of images; a list of a class has another column, of which −1 says that it is absent."""
    lines = read_text(file).splitlines()
    return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))


def _listed(folder: Path, name: str) -> Path:
    found = (folder / f"{name}{suffix}" for suffix in (".jpg", *sorted(IMAGES)))
    return next((path for path in found if path.is_file()), folder / f"{name}.jpg")


def _pictures(folder: Path) -> list[Path]:
    found = sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in IMAGES and path.name[0] != "."
    )
    if not found:
        raise DataError(f"{folder} holds no images: the data set is empty")
    return found


def _annotation_of(image: Path, whole: Path) -> Path:
    beside = image.with_suffix(".xml")
    return whole / ANNOTATIONS / beside.name if (whole / ANNOTATIONS).is_dir() else beside


def _image_of(annotation: Path, folder: Path) -> Path | None:
    found = (folder / f"{annotation.stem}{suffix}" for suffix in IMAGES)
    return next((path for path in found if path.is_file()), None)


def _parsed(path: Path) -> Element | FaultError | None:
    try:
        return parse_xml(path) if path.is_file() else None
    except FaultError as error:
        return error


def _boxes(
    root: Element,
    path: Path,
    picture: Image,
    labels: Sequence[str] | None,
    reading: ImageReader,
) -> tuple[Box, ...]:
    declared = [child_text(root, f"size/{side}") for side in ("width", "height")]
    frame = Frame(picture, declared, path.name)
    boxes: list[Box] = []
    entries = list(root.iter("object"))
    if not entries:
        reading.add(FaultKind.LABELS_EMPTY, path.name, f"the XML file of {path.name} has no object")
    for position, entry in enumerate(entries, start=1):
        where = f"{path.with_suffix('.xml').name}, object {position}"
        with reading.tolerate(path.name):
            label = child_text(entry, "name")
            if not label:
                raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no name")
            if labels is not None and label not in labels:
                continue
            x0, y0, x1, y1 = (
                number(child_text(entry, f"bndbox/{edge}"), f"{where}: {edge}")
                for edge in ("xmin", "ymin", "xmax", "ymax")
            )
            # labelImg counts from 0 at the very edge.
            box = frame.box(
                (max(x0 - 1, min(x0, 0)), max(y0 - 1, min(y0, 0)), x1, y1), label, where
            )
            if box in boxes:
                raise FaultError(FaultKind.ROW_REPEATED, f"{where} repeats an earlier object")
            boxes.append(box)
    return tuple(boxes)


def _note_orphans(folder: Path, files: Sequence[Path], reading: ImageReader) -> None:
    """Note XML files without an image."""
    annotations = {_annotation_of(path, folder) for path in files}
    if (folder / ANNOTATIONS).is_dir():
        wanted = {file.stem for file in annotations}
        others = [
            path
            for path in (folder / ANNOTATIONS).glob("*.xml")
            if path.stem not in wanted and _image_of(path, folder / PICTURES) is None
        ]
    else:
        beside = {path.parent for path in files}
        others = [
            path
            for place in beside
            for path in place.glob("*.xml")
            if _image_of(path, place) is None
        ]
    for path in sorted(others):
        text = f"{path.name} belongs to no image"
        reading.add(FaultKind.LABELS_ORPHANED, path.name, text)
