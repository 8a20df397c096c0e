"""Readers yield records of images; here all faults of all formats are found.

`supervision`'s loaders are not used: they stop at the first fault, know neither EXIF nor the sizes
that annotations declare, and match files by their exact names.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.images import TRANSPOSED, encoded_file
from valora_data.schema import Answer, Box, Sample, Split
from valora_data.sources.base import Source, SourceFormat, Splits
from valora_data.sources.formats.files import Finder, is_file, readable
from valora_data.sources.formats.labelled import ImageReader, Media, ahead, load_image, one_pass
from valora_data.sources.formats.videos import read_frames
from valora_data.wording import plural

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)
T = TypeVar("T")
Found = TypeVar("Found")

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
        parts = self.parts(source).values()
        for place in (
            source.file,
            *(part[0] if isinstance(part, tuple) else part for part in parts),
        ):
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
            for record in self.records(source, part, ImageReader.forgiving()):
                found |= dict.fromkeys([*record.files, *([record.file] if record.file else [])])
        yield from found

    def read(self, source: Source, part: Any) -> Iterator[Sample]:
        """The samples of a part: one for each record whose images decode.

        Raises:
            DataError: As `records` does, or boxes are in another unit than the format has.
        """
        name = Path(source.location).name or source.location
        with one_pass(source.reader, name) as reading:
            unit = _Unit(name)
            records = _once(self.records(source, part, reading), name, reading)
            work = partial(_opened, frames=source.frames)
            for record, future in ahead(records, work, lambda record: record.media):
                if source.task.spec.detects and record.answer is None and not record.shapes:
                    _note_empty(record, reading)
                images: list[Image] = []
                with reading.tolerate(record.file_name or record.item):
                    images = future.result()
                with reading.tolerate(record.item):
                    answer = _checked(record, images, source, name, unit, reading)
                    if answer is not None:
                        rest = tuple(images[1:])
                        yield Sample(record.id, images[0], answer, record.prompt, rest)
            unit.check()


def _opened(record: Record, frames: int) -> list[Image]:
    if not record.video:
        return [load_image(one, record.item) for one in record.media]
    videos = [one for one in record.media if isinstance(one, Path | bytes)]
    return [image for one in videos for image in read_frames(one, frames, record.file_name)]


def _once(records: Iterable[Record], name: str, reading: ImageReader) -> Iterator[Record]:
    """Records without those that repeat an image, unless it is asked several things."""
    seen: set[Path] = set()
    for record in records:
        with reading.tolerate(record.item):
            if record.prompt is None and seen.intersection(record.files):
                text = f"{name} lists {record.file_name} twice"
                raise FaultError(FaultKind.IMAGE_TWICE, text)
            seen.update(record.files)
            yield record


def _note_empty(record: Record, reading: ImageReader) -> None:
    if record.shapes is None:
        file = f" file {readable(record.file.name)}" if record.file else "s"
        reading.add(FaultKind.IMAGE_UNLABELLED, record.item, f"{record.item} has no label{file}")
    else:
        text = f"the labels of {record.item} name no object"
        reading.add(FaultKind.LABELS_EMPTY, record.item, text)


def _checked(
    record: Record,
    images: Sequence[Image],
    source: Source,
    name: str,
    unit: _Unit,
    reading: ImageReader,
) -> Answer | None:
    """The answer of a record, which is one of the domain's; None if it has none that counts."""
    labels = source.labels
    if not images:
        return None
    if record.answer is not None:
        choice = record.answer.choice
        if labels and choice is not None and choice not in labels:
            raise stray_label(f"{name}, {record.item}", choice, labels)
        return record.answer
    if source.task.spec.answer != "boxes":
        return None
    image = images[0]
    frame = _Frame(image, record.size, record.item)
    boxes: dict[Box, None] = {}
    for shape in record.shapes or ():
        if labels and shape.label not in labels:
            continue
        unit.add(shape, image)
        with reading.tolerate(record.item):
            box = frame.box(shape)
            if box in boxes:
                text = f"{shape.where} repeats an earlier object"
                reading.add(FaultKind.ROW_REPEATED, record.item, text)
            boxes[box] = None
    return None if record.prompt and not boxes else Answer(tuple(boxes))


class _Frame:
    """The pixels that boxes refer to.

    Some tools annotate the image as it is shown, some as it is stored, before EXIF's orientation
    is applied. The width and height that the annotation declares tell which.
    """

    def __init__(self, image: Image, declared: Any, where: str) -> None:
        self.size, self._file = image.size, None
        wanted = _size(declared)
        if wanted is None or wanted == image.size:
            return
        file = encoded_file(image)
        if file is None or file.orientation not in TRANSPOSED or file.size != wanted:
            raise FaultError(
                FaultKind.SIZE_DIFFERS,
                f"{where}: the image has {image.width} × {image.height} pixels, its annotation "
                f"says {wanted[0]} × {wanted[1]}",
            )
        self._file = file

    def box(self, shape: Shape) -> Box:
        """The box of a shape on the image as it is shown; one over the edge is clipped."""
        width, height = self.size
        edges = shape.edges
        if callable(edges):
            edges = edges(*(self._file.size if self._file else self.size))
        if self._file is not None and all(map(math.isfinite, edges)):
            edges = self._file.shown(edges)
        x0, y0, x1, y1 = edges
        text = f"{shape.where}: box ({', '.join(f'{edge:g}' for edge in edges)})"
        if not all(map(math.isfinite, edges)):
            raise FaultError(FaultKind.BOX_NOT_FINITE, f"{text} has no area")
        if not (x1 > x0 and y1 > y0):
            inverted = x1 < x0 or y1 < y0
            kind = FaultKind.BOX_INVERTED if inverted else FaultKind.BOX_EMPTY
            raise FaultError(kind, f"{text} has no area")
        inside = min(x0, y0) >= -TOLERANCE and x1 <= width + TOLERANCE and y1 <= height + TOLERANCE
        clipped = (max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1))
        if not inside or clipped[2] <= clipped[0] or clipped[3] <= clipped[1]:
            text = f"{text} lies outside its {width} × {height} image"
            raise FaultError(FaultKind.BOX_OUTSIDE, text)
        return Box(*clipped, shape.label)


def _size(declared: Any) -> tuple[int, int] | None:
    try:
        width, height = (int(float(side)) for side in declared)
    except (TypeError, ValueError, OverflowError):
        return None
    return (width, height) if width > 0 and height > 0 else None


class _Unit:
    """Notices boxes that are shares of the image, or on a grid, where pixels are meant."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._boxes, self._right, self._bottom, self._side = 0, 0.0, 0.0, math.inf

    def add(self, shape: Shape, picture: Image) -> None:
        if not callable(shape.edges) and all(map(math.isfinite, shape.edges)):
            self._boxes += 1
            self._right = max(self._right, shape.edges[2])
            self._bottom = max(self._bottom, shape.edges[3])
            self._side = min(self._side, *picture.size)

    def check(self) -> None:
        if self._boxes and max(self._right, self._bottom) <= 1:
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


def collected(
    entries: Iterable[T], read: Callable[[T, int], Found | None], item: str, reading: ImageReader
) -> list[Found]:
    """What is read of the entries of an image, which are numbered from 1; None does not count.

    Faults of single ones are collected for the image.
    """
    found = []
    for place, entry in enumerate(entries, start=1):
        with reading.tolerate(item):
            one = read(entry, place)
            if one is not None:
                found.append(one)
    return found


def number(value: Any, where: str) -> float:
    """A number of an annotation, or a `FaultError`."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        text = f"{where} {value!r:.80} is no number"
        raise FaultError(FaultKind.BOX_MALFORMED, text) from error


def four_numbers(values: Any, where: str) -> Edges:
    """Four numbers of an annotation, or a `FaultError`."""
    try:
        a, b, c, d = (float(value) for value in values)
    except (TypeError, ValueError) as error:
        text = f"{where} {values!r:.80} is not four numbers"
        raise FaultError(FaultKind.BOX_MALFORMED, text) from error
    return a, b, c, d


def corner_edges(bbox: Any, where: str) -> Edges:
    """Edges from x, y, width and height, as COCO has them, or a `FaultError`."""
    x, y, width, height = four_numbers(bbox, f"{where}: bbox")
    return (x, y, x + width, y + height)


def shares(x0: float, y0: float, x1: float, y1: float) -> Callable[[float, float], Edges]:
    """Edges in shares of an image's sides, as `Shape.edges`."""
    return lambda width, height: (x0 * width, y0 * height, x1 * width, y1 * height)


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
    exact = {file for file in files.values() if file.exists()}
    folders = {below or file.parent for file in files.values()}
    suffixes = frozenset(file.suffix for file in files.values())
    finders = {folder: Finder(folder, suffixes) for folder in folders}
    lacking = []
    for image, file in files.items():
        if file not in exact:
            found = finders[below or file.parent].of_stem(image.stem, file)
            if found is not None and found not in exact:
                files[image] = found
            else:
                lacking.append(image)
    if not lacking and not reading.thorough:
        return files
    before, used = len(reading.faults.found), {*files.values()}
    orphans = [
        path
        for folder in sorted(folders)
        for path in finders[folder].files
        if path not in used and path.name != "classes.txt" and (below or path.parent == folder)
    ]
    for path in orphans:
        text = f"{readable(path.name)} belongs to no image"
        reading.add(FaultKind.LABELS_ORPHANED, readable(path.name), text)
    new = len(reading.faults.found) > before
    if lacking and new and reading.source:  # not at the first look
        log.warning(
            "%s: %s, such as %s, and %s, such as %s: give them the same names",
            name, plural(len(orphans), "label file|files belongs|belong to no image"),
            readable(orphans[0].name), plural(len(lacking), "image|images has|have no labels"),
            readable(lacking[0].name),
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


def stray_label(where: str, label: str, labels: Sequence[str]) -> FaultError:
    """What is wrong with a label that is none of a domain's."""
    text = f"{where}: label {label!r} is not one of {', '.join(labels)}"
    return FaultError(FaultKind.LABEL_STRAY, text)
