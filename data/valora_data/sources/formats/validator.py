"""Records of images, and the one validator that finds all faults of all formats' records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL.Image import Image

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.images import EncodedFile, encoded_file
from valora_data.schema import Answer, Box
from valora_data.sources.base import Source
from valora_data.sources.formats.files import readable
from valora_data.sources.formats.labelled import ImageReader, Media

TOLERANCE = 1.0
"""Pixels by which a box may reach over the edge: annotation tools round."""
GRIDS = (100, 1000)
"""Sides of grids on which tools note boxes, instead of in pixels."""
GRID_BOXES = 20
"""Fewest boxes by which a grid is recognised."""
Edges = tuple[float, float, float, float]
"""(x0, y0, x1, y1) in pixels."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A labelled box, as a file describes it.

    Attributes:
        label: Name of its class, or the phrase that it answers.
        edges: Its edges; or what gives them for an image's width and height.
        where: What it is, for messages.
    """

    label: str
    edges: Edges | Callable[[float, float], Edges]
    where: str


@dataclass(slots=True)
class Record:
    """An image, several of one sample, or a video, and what the data set says of it.

    Attributes:
        media: Files, or what was read of them.
        id: Id of its sample.
        shapes: Its objects; None if the data set says nothing of them.
        answer: Any other answer; None if it has none that counts.
        size: Width and height that the annotation names; None for none.
        file: The image's own file of labels, which need not exist; None where there is no such.
        prompt: What is asked; an image may occur with several prompts.
        item: What its faults are counted by; the name of the file by default.
        video: Whether the media are videos.
    """

    media: tuple[Media, ...]
    id: str
    shapes: Sequence[Shape] | None = None
    answer: Answer | None = None
    size: Any = None
    file: Path | None = None
    prompt: str | None = None
    item: str = ""
    video: bool = False
    files: list[Path] = field(init=False)
    file_name: str = field(init=False)

    def __post_init__(self) -> None:
        self.files = [one for one in self.media if isinstance(one, Path)]
        self.file_name = readable(self.files[0].name) if self.files else ""
        self.item = self.item or self.file_name


class Validator:
    """Finds the faults of the records of one part of a data set, which messages name."""

    def __init__(self, source: Source, name: str, reading: ImageReader) -> None:
        self._source, self._name, self._reading = source, name, reading
        self._boxes, self._right, self._bottom, self._side = 0, 0.0, 0.0, math.inf

    def once(self, records: Iterable[Record]) -> Iterator[Record]:
        """Records without those that repeat an image, unless it is asked several things."""
        seen: set[Path] = set()
        for record in records:
            with self._reading.tolerate(record.item):
                if record.prompt is None and seen.intersection(record.files):
                    text = f"{self._name} lists {record.file_name} twice"
                    raise FaultError(FaultKind.IMAGE_TWICE, text)
                seen.update(record.files)
                self._note_empty(record)
                yield record

    def _note_empty(self, record: Record) -> None:
        item, spec = record.item, self._source.task.spec
        if record.answer is not None or record.shapes or not spec.detects:
            return
        if record.shapes is None:
            file = f" file {readable(record.file.name)}" if record.file else "s"
            self._reading.add(FaultKind.IMAGE_UNLABELLED, item, f"{item} has no label{file}")
        else:
            text = f"the labels of {item} name no object"
            self._reading.add(FaultKind.LABELS_EMPTY, item, text)

    def answer(self, record: Record, image: Image) -> Answer | None:
        """The answer of a record, one of the domain's labels; None if it has none that counts."""
        labels = self._source.labels
        if record.answer is not None:
            choice = record.answer.choice
            if labels and choice is not None and choice not in labels:
                raise stray_label(f"{self._name}, {record.item}", choice, labels)
            return record.answer
        if self._source.task.spec.answer != "boxes":
            return None
        file = _stored(image, record)
        boxes: dict[Box, None] = {}
        for shape in record.shapes or ():
            if labels and shape.label not in labels:
                continue
            with self._reading.tolerate(record.item):
                box = self._box(shape, image, file)
                if box in boxes:
                    text = f"{shape.where} repeats an earlier object"
                    self._reading.add(FaultKind.ROW_REPEATED, record.item, text)
                boxes[box] = None
        return None if record.prompt and not boxes else Answer(tuple(boxes))

    def _box(self, shape: Shape, image: Image, file: EncodedFile | None) -> Box:
        """A box on the image as it is shown; one over the edge is clipped."""
        width, height = image.size
        edges = shape.edges
        if callable(edges):
            edges = edges(*(file.size if file else image.size))
        elif all(map(math.isfinite, edges)):
            self._boxes += 1
            self._right, self._bottom = max(self._right, edges[2]), max(self._bottom, edges[3])
            self._side = min(self._side, width, height)
        if file is not None and all(map(math.isfinite, edges)):
            edges = file.shown(edges)
        x0, y0, x1, y1 = edges
        text = f"{shape.where}: box ({', '.join(f'{edge:g}' for edge in edges)})"
        if not all(map(math.isfinite, edges)):
            raise FaultError(FaultKind.BOX_NOT_FINITE, f"{text} has no area")
        if x1 <= x0 or y1 <= y0:
            inverted = x1 < x0 or y1 < y0
            kind = FaultKind.BOX_INVERTED if inverted else FaultKind.BOX_EMPTY
            raise FaultError(kind, f"{text} has no area")
        inside = min(x0, y0) >= -TOLERANCE and x1 <= width + TOLERANCE and y1 <= height + TOLERANCE
        x0, y0, x1, y1 = max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1)
        if not inside or x1 <= x0 or y1 <= y0:
            text = f"{text} lies outside its {width} × {height} image"
            raise FaultError(FaultKind.BOX_OUTSIDE, text)
        return Box(x0, y0, x1, y1, shape.label)

    def check_unit(self) -> None:
        """Refuse boxes that are shares of the image, or on a grid, where pixels are meant."""
        edges = self._right, self._bottom
        found = "shares of the image, between 0 and 1" if self._boxes and max(edges) <= 1 else ""
        divided = ""
        for grid in GRIDS if self._boxes >= GRID_BOXES else ():
            if self._side > 1.1 * grid and all(0.98 * grid < edge <= grid for edge in edges):
                found, divided = f"on a grid of {grid}", f" / {grid}"
        if found:
            raise DataError(
                f"{self._name}: all boxes are {found}, where the format has pixels: multiply them "
                f"by the image's width and height{divided}"
            )


def _stored(image: Image, record: Record) -> EncodedFile | None:
    """The file whose stored pixels the boxes refer to; None for the image as it is shown.

    Some tools annotate the image as it is shown, some as it is stored, before EXIF's orientation
    is applied. The width and height that the annotation declares tell which.
    """
    try:
        width, height = (int(float(side)) for side in record.size or ())
    except (TypeError, ValueError, OverflowError):
        return None
    if min(width, height) <= 0 or (width, height) == image.size:
        return None
    file = encoded_file(image)
    if file is not None and file.size == (width, height):  # so it is turned when it is shown
        return file
    text = (
        f"{record.item}: the image has {image.width} × {image.height} pixels, its annotation says "
        f"{width} × {height}"
    )
    raise FaultError(FaultKind.SIZE_DIFFERS, text)


def stray_label(where: str, label: str, labels: Sequence[str]) -> FaultError:
    """What is wrong with a label that is none of a domain's."""
    text = f"{where}: label {label!r} is not one of {', '.join(labels)}"
    return FaultError(FaultKind.LABEL_STRAY, text)
