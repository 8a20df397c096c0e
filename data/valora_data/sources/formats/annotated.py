"""Formats whose files list images with boxes or labels: readers yield records, checked here."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Box, Sample
from valora_data.sources.base import Source, SourceFormat, Splits
from valora_data.sources.formats.files import IMAGES, files_below
from valora_data.sources.formats.labelled import (
    Frame,
    ImageReader,
    Reading,
    Shape,
    readable,
    stray_label,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from PIL.Image import Image

    from valora_data.schema import Split

GRIDS = (100, 1000)
"""Sides of grids on which tools note boxes, instead of in pixels."""
GRID_BOXES = 20
"""Fewest boxes by which a grid is recognised."""


@dataclass(slots=True)
class Record:
    """An image of a data set, and what its file says of it.

    Attributes:
        path: File of the image.
        id: Id of its sample.
        shapes: Its objects; None if the data set says nothing of the image.
        answer: Its answer, for tasks other than detection; None if it has none that counts.
        size: Width and height that the annotation names; None for none.
        file: The image's own file of labels, which need not exist; None where there is no such.
        prompt: What is asked; an image may occur with several prompts.
    """

    path: Path
    id: str
    shapes: Sequence[Shape] | None = None
    answer: Answer | None = None
    size: Any = None
    file: Path | None = None
    prompt: str | None = None


class AnnotatedFormat(SourceFormat):
    """A format of images with boxes or labels; subclasses say only what their files hold."""

    @abstractmethod
    def parts(self, source: Source) -> Mapping[Split | None, Any]:
        """What `records` reads for each key of `Splits`.

        Raises:
            DataError: A file is missing or corrupt.
        """

    @abstractmethod
    def records(self, source: Source, part: Any, reading: ImageReader) -> Iterable[Record]:
        """The records of a part, after their number was added to `reading.total`.

        Args:
            source: What to read.
            part: One value of `parts`.
            reading: Collects the faults of entries, in `reading.tolerate`.

        Raises:
            DataError: The part is empty or corrupt, or too many images have faults.
        """

    @abstractmethod
    def name(self, source: Source, part: Any) -> str:
        """What messages call a part."""

    def folder(self, source: Source, part: Any) -> Path | None:
        """Folder of which all images should be listed; None if its content is what is listed."""
        return None

    def lists(self, source: Source) -> Iterable[Path]:
        """Files that list images."""
        return (source.file,)

    def open(self, source: Source) -> Splits:
        """The splits of `parts`."""
        parts = self.parts(source)
        return {split: partial(self.read, source, part) for split, part in parts.items()}

    def reads(self, source: Source) -> Iterator[Path]:
        """The files that list images, the images, and their own files of labels."""
        found = dict.fromkeys(self.lists(source))
        for part in self.parts(source).values():
            for record in self.records(source, part, ImageReader.forgiving()):
                found |= dict.fromkeys(filter(None, (record.path, record.file)))
        yield from found

    def read(self, source: Source, part: Any) -> Iterator[Sample]:
        """The samples of a part.

        Yields:
            One sample for each record whose image decodes.

        Raises:
            DataError: As `records` does, or boxes are in another unit than the format has.
        """
        name = self.name(source, part)
        with Reading(source.reader, name, 0) as reading:
            records = _once(self.records(source, part, reading), name, reading)
            folder = self.folder(source, part)
            if folder is not None and reading.thorough:
                note_unlisted((record.path for record in records), folder, reading)
            unit = _Unit(name)
            paths = [record.path for record in records]
            for record, picture in zip(records, reading.open_all(paths), strict=True):
                item = readable(record.path.name)
                if source.task.spec.detects and not record.shapes:
                    _note_empty(record, item, reading)
                if picture is None:
                    continue
                with reading.tolerate(item):
                    answer = record.answer
                    if source.task.spec.answer == "boxes":
                        answer = Answer(_boxes(record, picture, source, unit, item, reading))
                        if record.prompt and not answer.boxes:
                            continue
                    elif answer is None:
                        continue
                    elif source.labels and answer.label not in (None, *source.labels):
                        raise stray_label(f"{name}, {item}", str(answer.label), source.labels)
                    yield Sample(record.id, picture, answer, record.prompt)
            unit.check()


def collected(
    items: Iterable[Any], read: Callable[[Any, int], Shape | None], item: str, reading: ImageReader
) -> list[Shape]:
    """Shapes of an image; the faults of single ones are collected.

    Args:
        items: What the file lists for the image.
        read: Reads one, given its number from 1; None if it does not count.
        item: The image, which is what faults are counted by.
        reading: Collects the faults.
    """
    shapes = []
    for number, one in enumerate(items, start=1):
        with reading.tolerate(item):
            shape = read(one, number)
            if shape is not None:
                shapes.append(shape)
    return shapes


def four_numbers(values: Any, where: str) -> tuple[float, float, float, float]:
    """Four numbers of an annotation.

    Raises:
        FaultError: These are not four numbers.
    """
    try:
        a, b, c, d = (float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise FaultError(
            FaultKind.BOX_MALFORMED, f"{where} {values!r:.80} is not four numbers"
        ) from error
    return a, b, c, d


def note_unlisted(paths: Iterable[Path], folder: Path, reading: ImageReader) -> None:
    """Note image files below a folder that are not listed."""
    listed = {path.resolve() for path in paths}
    for path in files_below(folder, IMAGES):
        if path.resolve() not in listed:
            name = readable(path.relative_to(folder).as_posix())
            reading.add(FaultKind.IMAGE_UNLISTED, name, f"{name} is not listed")


def _once(records: Iterable[Record], name: str, reading: ImageReader) -> list[Record]:
    """Records without those that repeat an image, unless it is asked several things."""
    found, seen = [], set()
    for record in records:
        item = readable(record.path.name)
        with reading.tolerate(item):
            if record.prompt is None and record.path in seen:
                raise FaultError(FaultKind.IMAGE_TWICE, f"{name} lists {item} twice")
            seen.add(record.path)
            found.append(record)
    return found


def _note_empty(record: Record, item: str, reading: ImageReader) -> None:
    if record.shapes is None:
        file = f" file {record.file.name}" if record.file else "s"
        reading.add(FaultKind.IMAGE_UNLABELLED, item, f"{item} has no label{file}")
    else:
        reading.add(FaultKind.LABELS_EMPTY, item, f"the labels of {item} name no object")


def _boxes(
    record: Record,
    picture: Image,
    source: Source,
    unit: _Unit,
    item: str,
    reading: ImageReader,
) -> tuple[Box, ...]:
    frame = Frame(picture, record.size, item)
    boxes: dict[Box, None] = {}
    for shape in record.shapes or ():
        if source.labels and shape.label not in source.labels:
            continue
        unit.add(shape, picture)
        with reading.tolerate(item):
            box = frame.box(shape)
            if box in boxes:
                reading.add(
                    FaultKind.ROW_REPEATED, item, f"{shape.where} repeats an earlier object"
                )
            boxes[box] = None
    return tuple(boxes)


class _Unit:
    """Notices boxes that are shares of the image, or on a grid, where pixels are meant."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._boxes = 0
        self._right = self._bottom = 0.0
        self._side = math.inf

    def add(self, shape: Shape, picture: Image) -> None:
        if not callable(shape.edges) and all(map(math.isfinite, shape.edges)):
            self._boxes += 1
            self._right = max(self._right, shape.edges[2])
            self._bottom = max(self._bottom, shape.edges[3])
            self._side = min(self._side, *picture.size)

    def check(self) -> None:
        if not self._boxes:
            return
        if max(self._right, self._bottom) <= 1:
            self._refuse("shares of the image, between 0 and 1", "the image's width and height")
        for grid in GRIDS:
            reached = all(0.98 * grid < edge <= grid for edge in (self._right, self._bottom))
            if reached and self._side > 1.1 * grid and self._boxes >= GRID_BOXES:
                self._refuse(f"on a grid of {grid}", f"width and height of the image / {grid}")

    def _refuse(self, found: str, factor: str) -> None:
        raise DataError(
            f"{self._name}: all boxes are {found}, where the format has pixels: multiply them by "
            f"{factor}"
        )
