"""The base of formats whose readers yield records, and the one validator that finds their faults.

Readers of libraries (`supervision`, `labelformat`) are not used: they stop at the first fault, know
neither EXIF nor the sizes that annotations declare, and match files by their exact names.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from PIL.Image import Image

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.images import EncodedFile, encoded_file
from valora_data.schema import Answer, Box, Sample, Split
from valora_data.sources.base import Source, SourceFormat, Splits
from valora_data.sources.formats.files import Finder, is_file, read_text, readable
from valora_data.sources.formats.labelled import ImageReader, Media, ahead, load_image
from valora_data.sources.formats.videos import read_frames
from valora_data.wording import plural

log = logging.getLogger(__name__)
T = TypeVar("T")
TOLERANCE = 1.0
"""Pixels by which a box may reach over the edge: annotation tools round."""
GRIDS = (100, 1000)
"""Sides of grids on which tools note boxes, instead of in pixels."""
GRID_BOXES = 20
"""Fewest boxes by which a grid is recognised."""
Edges = tuple[float, float, float, float]
"""(x0, y0, x1, y1) in pixels."""
Scaled = Callable[[float, float], Edges]
"""What gives the edges for an image's width and height."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A labelled box, as a file describes it."""

    label: str  # name of its class, or the phrase that it answers
    edges: Edges | Scaled
    where: str  # what it is, for messages


@dataclass(slots=True)
class Record:
    """An image, several of one sample, or a video, and what the data set says of it."""

    media: tuple[Media, ...]  # files, or what was read of them
    id: str  # of its sample
    shapes: Sequence[Shape] | None = None  # its objects; None if the data set says nothing of them
    answer: Answer | None = None  # any other answer; None if it has none that counts
    size: Any = None  # width and height that the annotation names
    file: Path | None = None  # the image's own file of labels, which need not exist
    prompt: str | None = None  # what is asked; an image may occur with several prompts
    item: str = ""  # what its faults are counted by; the name of the file by default
    video: bool = False  # whether the media are videos

    def __post_init__(self) -> None:
        self.item = self.item or self.file_name

    @property
    def files(self) -> list[Path]:
        """The media that are files."""
        return [one for one in self.media if isinstance(one, Path)]

    @property
    def file_name(self) -> str:
        """Name of the first file, for messages."""
        return next((readable(file.name) for file in self.files), "")

    def open(self, frames: int) -> list[Image]:
        """The images, or so many frames of the videos."""
        if not self.video:
            return [load_image(one, self.item) for one in self.media]
        name = self.file_name or self.item
        videos = [one for one in self.media if isinstance(one, Path | bytes)]
        return [image for one in videos for image in read_frames(one, frames, name)]


class AnnotatedFormat(SourceFormat):
    """A format that says something of images; subclasses say only what their files hold."""

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

    def parts(self, source: Source) -> Mapping[Split | None, Any]:
        """What `records` reads for each key of `Splits`; by default the file, in one piece.

        A file, or a tuple that begins with it, or anything else.

        Raises:
            DataError: A file is missing or corrupt.
        """
        return {None: source.file}

    def lists(self, source: Source) -> Iterator[Path]:
        """Files that list images; by default the source's, and those of `parts`."""
        for part in (source.file, *self.parts(source).values()):
            place = part[0] if isinstance(part, tuple) else part
            if isinstance(place, Path) and is_file(place):
                yield place

    def open(self, source: Source) -> Splits:
        """The splits of `parts`."""
        parts = self.parts(source)
        return {split: partial(self.read, source, part) for split, part in parts.items()}

    def reads(self, source: Source) -> Iterator[Path]:
        """The files that list images, the images, and their own files of labels."""
        found = dict.fromkeys(self.lists(source))
        for part in self.parts(source).values():
            for record in self.records(source, part, ImageReader("", tolerance=math.inf)):
                found |= dict.fromkeys([*record.files, *([record.file] if record.file else [])])
        yield from found

    def read(self, source: Source, part: Any) -> Iterator[Sample]:
        """The samples of a part: one for each record whose images decode.

        Raises:
            DataError: As `records` does, or boxes are in another unit than the format has.
        """
        name = source.file.name or source.location
        reading = source.reader or ImageReader(name)
        validator = _Validator(source, name, reading)
        for record, future in ahead(
            validator.once(self.records(source, part, reading)),
            lambda record: record.open(source.frames),
            lambda record: record.media,
            lambda record: len(record.media) * (source.frames if record.video else 1),
        ):
            images: list[Image] = []
            with reading.tolerate(record.file_name or record.item):
                images = future.result()
            with reading.tolerate(record.item):
                answer = validator.answer(record, images[0]) if images else None
                if answer is not None:
                    yield Sample(record.id, images[0], answer, record.prompt, tuple(images[1:]))
        validator.check_unit()
        if source.reader is None:
            reading.finish()


class _Validator:
    """Finds the faults of the records of one part of a data set, which messages name."""

    def __init__(self, source: Source, name: str, reading: ImageReader) -> None:
        self._source, self._name, self._reading = source, name, reading
        self._boxes, self._right, self._bottom, self._side = 0, 0.0, 0.0, math.inf

    def once(self, records: Iterable[Record]) -> Iterator[Record]:
        """Records without those that repeat an image, unless it is asked several things."""
        seen: set[Path] = set()
        for record in records:
            item, file = record.item, record.file
            with self._reading.tolerate(item):
                if record.prompt is None and seen.intersection(record.files):
                    text = f"{self._name} lists {record.file_name} twice"
                    raise FaultError(FaultKind.IMAGE_TWICE, text)
                seen.update(record.files)
                if self._source.task.spec.detects and record.answer is None and not record.shapes:
                    kind, text = FaultKind.LABELS_EMPTY, f"the labels of {item} name no object"
                    if record.shapes is None:
                        kind, text = FaultKind.IMAGE_UNLABELLED, f"{item} has no label"
                        text += f" file {readable(file.name)}" if file else ""
                    self._reading.add(kind, item, text)
                yield record

    def answer(self, record: Record, image: Image) -> Answer | None:
        """The answer of a record, one of the domain's labels; None if it has none that counts."""
        labels = self._source.labels
        if record.answer is not None:
            choice = record.answer.choice
            if labels and choice is not None and choice not in labels:
                stray = stray_label(choice, labels)
                raise FaultError(stray.kind, f"{self._name}, {record.item}: {stray.text}")
            return record.answer
        if self._source.task.spec.answer != "boxes":
            return None
        file = _stored(image, record)
        boxes: dict[Box, None] = {}
        for shape in record.shapes or ():
            if not labels or shape.label in labels:
                with self._reading.tolerate(record.item, shape.where):
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
        finite = all(map(math.isfinite, edges))
        x0, y0, x1, y1 = file.shown(edges) if file is not None and finite else edges
        text = f"box ({x0:g}, {y0:g}, {x1:g}, {y1:g})"
        if not finite or x1 <= x0 or y1 <= y0:
            inverted = x1 < x0 or y1 < y0
            kind = FaultKind.BOX_INVERTED if inverted else FaultKind.BOX_EMPTY
            raise FaultError(kind if finite else FaultKind.BOX_NOT_FINITE, f"{text} has no area")
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
        for grid in GRIDS if self._boxes >= GRID_BOXES else ():
            if self._side > 1.1 * grid and all(0.98 * grid < edge <= grid for edge in edges):
                found = f"on a grid of {grid}"
        if found:
            raise DataError(
                f"{self._name}: all boxes are {found}, where the format has pixels: export them "
                "in pixels of the image"
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


def stray_label(label: str, labels: Sequence[str]) -> FaultError:
    """What is wrong with a label that is none of a domain's."""
    return FaultError(FaultKind.LABEL_STRAY, f"label {label!r} is not one of {', '.join(labels)}")


def read_shapes(
    reading: ImageReader,
    item: str,
    entries: Iterable[tuple[str, T]],
    read: Callable[[T], tuple[Any, Edges | Scaled] | None],
) -> list[Shape]:
    """Objects of an image.

    Args:
        reading: Collects the faults of single entries.
        item: What they are counted by.
        entries: Entries with their places, for messages.
        read: Gives the label and the edges of an entry, or None if it does not count. What it
            raises of wrong values is a fault.
    """
    found = []
    for where, entry in entries:
        with reading.tolerate(item, where, FaultKind.BOX_MALFORMED):
            one = read(entry)
            if one is not None:
                if one[0] in (None, ""):
                    raise KeyError("label")
                found.append(Shape(str(one[0]), one[1], where))
    return found


def numbered(place: str, entries: Iterable[T]) -> Iterator[tuple[str, T]]:
    """Entries with their places, which are numbered from 1."""
    return ((f"{place} {number}", entry) for number, entry in enumerate(entries, start=1))


def four_numbers(values: Any, what: str = "box") -> Edges:
    """Four numbers of an annotation, or a `ValueError`."""
    try:
        a, b, c, d = map(float, values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} {values!r:.80} is not four numbers") from error
    return a, b, c, d


def corners(bbox: Any) -> Edges:
    """Edges from x, y, width and height, as COCO has them, or a `ValueError`."""
    x, y, width, height = four_numbers(bbox, "bbox")
    return x, y, x + width, y + height


def shares(x0: float, y0: float, x1: float, y1: float) -> Scaled:
    """Edges in shares of an image's sides."""
    return lambda width, height: (x0 * width, y0 * height, x1 * width, y1 * height)


def with_rows(
    records: Iterable[Record],
    reading: ImageReader,
    shape: Callable[[str], tuple[str, Edges | Scaled] | None],
) -> Iterator[Record]:
    """Records with the objects of their label files, which have a row for each."""
    for record in records:
        with reading.tolerate(record.item):
            if record.file is not None and record.file.exists():
                try:
                    rows = read_text(record.file).splitlines()
                except DataError as error:
                    raise FaultError(FaultKind.FILE_MALFORMED, str(error)) from error
                places = numbered(f"{record.file.name}, row", rows)
                record.shapes = read_shapes(reading, record.item, places, shape)
            yield record


def label_files(
    images: Iterable[Path],
    expected: Callable[[Path], Path],
    below: Path | None,
    name: str,
    reading: ImageReader,
) -> dict[Path, Path]:
    """The label file of each image, which need not exist; in another spelling if no other fits.

    It is looked for where it is expected, or `below` a folder, by default that one. Label files
    that belong to none of the images are noted, and warned of where images lack labels.
    """
    files = {image: expected(image) for image in images}
    taken = {file for file in files.values() if file.exists()}
    lacking = [image for image, file in files.items() if file not in taken]
    if not lacking and not reading.thorough:
        return files
    suffixes = frozenset(file.suffix for file in files.values())
    folders = sorted({below or file.parent for file in files.values()})
    finders = {folder: Finder(folder, suffixes) for folder in folders}
    for image in lacking:
        found = finders[below or files[image].parent].of_stem(image.stem, files[image])
        if found is not None and found not in taken:
            files[image] = found
    lacking = [image for image in lacking if not files[image].exists()]
    used, before = {*files.values()}, len(reading.found)
    orphans = [
        readable(path.name)
        for folder in folders
        for path in finders[folder].files
        if path not in used and path.name != "classes.txt" and (below or path.parent == folder)
    ]
    for orphan in orphans:
        reading.add(FaultKind.LABELS_ORPHANED, orphan, f"{orphan} belongs to no image")
    new = len(reading.found) > before
    if lacking and new and reading.source:  # not at the first look
        log.warning(
            "%s: %s, such as %s, and %s, such as %s: give them the same names",
            name, plural(len(orphans), "label file|files belongs|belong to no image"), orphans[0],
            plural(len(lacking), "image|images has|have no labels"), readable(lacking[0].name),
        )  # fmt: skip
    return files


def check_labels(source: str, known: Iterable[str], labels: Sequence[str]) -> None:
    """Check that a data set which declares its categories has all that a domain asks for."""
    names = list(known)
    missing = [label for label in labels if label not in names]
    if missing:
        shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        raise DataError(
            f"{source} has no category {', '.join(map(repr, missing))}, only {shown}: "
            "make the domain's labels and the data set's names match"
        )
    unused = len(set(names) - set(labels))
    if unused:
        log.info("%s: %d categories that the domain does not ask for are left out", source, unused)


def note_unlisted(finder: Finder, reading: ImageReader) -> None:
    """Note image files that were not looked for, in a thorough reading."""
    for path in finder.not_found() if reading.thorough else ():
        name = readable(path.as_posix())
        reading.add(FaultKind.IMAGE_UNLISTED, name, f"{name} is not listed")
