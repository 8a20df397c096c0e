"""Formats whose readers yield records, and the one validator that finds their faults."""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL.Image import Image

from valora_data.cpu import ahead
from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind, ImageReader, Media, load_image
from valora_data.images import EncodedFile, encoded_file
from valora_data.schema import Answer, Box, Sample, Split, no_image
from valora_data.sources.base import Source, SourceFormat, Splits
from valora_data.sources.formats.files import Finder, is_file, read_text, readable
from valora_data.sources.formats.videos import read_frames

log = logging.getLogger(__name__)
TOLERANCE = 1.0  # Pixels by which a box may reach over the edge: annotation tools round
GRIDS = (100, 1000)  # Sides of grids on which tools note boxes, instead of in pixels
GRID_BOXES = 20  # Fewest boxes by which a grid is recognised
Edges = tuple[float, float, float, float]  # (x0, y0, x1, y1) in pixels
Scaled = Callable[[float, float], Edges]  # What gives the edges for an image's width and height
Shape = tuple[Any, Edges | Scaled]
"""The label of an object, or the phrase that it answers, and where it is."""
Shapes = list[tuple[str, Shape]]  # Objects with their locations, for messages
Entries = Iterable[tuple[str, Any]]  # Entries of an annotation with their locations, for messages


@dataclass
class Record:
    """An image, several of one sample, or a video, and what the data set says of it."""

    media: tuple[Media, ...]  # files, or what was read of them; none for a question alone
    id: str  # of its sample
    entries: Entries | None = None  # its objects; None if the data set says nothing of them
    # what an entry is, or None if it does not count; errors that wrong values raise are faults
    shape: Callable[[Any], Shape | None] = lambda entry: entry
    answer: Answer | None = None  # any other answer; None if it has none that counts
    size: Any = None  # width and height that the annotation names
    file: Path | None = None  # the image's own file of labels, which need not exist
    prompt: str | None = None  # what is asked; an image may occur with several prompts
    item: str = ""  # what its faults are counted by; the name of the file by default
    video: bool = False  # whether the media are videos

    def __post_init__(self) -> None:
        self.files = [one for one in self.media if isinstance(one, Path)]
        self.file_name = readable(self.files[0].name) if self.files else ""
        self.item = self.item or self.file_name

    def open(self, frames: int) -> list[Image]:
        """The images, or so many frames of the videos."""
        if not (self.video and self.media):
            return [load_image(one, self.item) for one in self.media] or [no_image()]
        name = self.file_name or self.item
        return [image for one in self.media for image in read_frames(one, frames, name)]


class AnnotatedFormat(SourceFormat):
    """A format that says something of images; subclasses say only what their files hold."""

    @abstractmethod
    def records(self, source: Source, part: Any, reading: ImageReader) -> Iterable[Record]:
        """The records of a part; adds to `reading.total` first, collects faults in `tolerate`."""

    def parts(self, source: Source) -> Mapping[Split | None, Any]:
        """What `records` reads for each key of `Splits`: a file, a tuple with it, or other."""
        return {None: source.file}

    def lists(self, source: Source) -> Iterator[Path]:
        """Files that list images; by default the source's, and those of `parts`."""
        parts = (source.file, *self.parts(source).values())
        lists = (part[0] if isinstance(part, tuple) else part for part in parts)
        yield from (file for file in lists if isinstance(file, Path) and is_file(file))

    def open(self, source: Source) -> Splits:
        parts = self.parts(source).items()
        return {split: partial(self.read, source, part) for split, part in parts}

    def reads(self, source: Source) -> Iterator[Path]:
        found = dict.fromkeys(self.lists(source))
        for part in self.parts(source).values():
            for record in self.records(source, part, ImageReader(tolerance=math.inf)):
                found |= dict.fromkeys([*record.files, *([record.file] if record.file else [])])
        yield from found

    def read(self, source: Source, part: Any) -> Iterator[Sample]:
        """The samples of a part; a `DataError` for too many faults or boxes of a wrong unit."""
        name = source.file.name or source.location
        reading = source.reader or ImageReader(name)
        validator = _Validator(source, name, reading)
        for (record, shapes), future in ahead(
            validator.checked(self.records(source, part, reading)),
            lambda item: item[0].open(source.frames),
            lambda item: item[0].media,
            lambda item: max(len(item[0].media), 1) * (source.frames if item[0].video else 1),
        ):
            images: list[Image] = []
            with reading.tolerate(record.file_name or record.item):
                images = future.result()
            with reading.tolerate(record.item):
                if images and (answer := validator.answer(record, shapes, images[0])) is not None:
                    yield Sample(record.id, images[0], answer, record.prompt, tuple(images[1:]))
        validator.check_unit()
        if source.reader is None:
            reading.finish()


class _Validator:
    """Finds the faults of the records of one part of a data set, which messages name."""

    def __init__(self, source: Source, name: str, reading: ImageReader) -> None:
        self._source, self._name, self._reading = source, name, reading
        self._boxes, self._right, self._bottom, self._side = 0, 0.0, 0.0, math.inf  # in pixels

    def checked(self, records: Iterable[Record]) -> Iterator[tuple[Record, Shapes]]:
        seen: set[Path] = set()
        for record in records:
            item, file = record.item, record.file
            with self._reading.tolerate(item):
                shapes = Shapes()
                for where, entry in record.entries or ():
                    with self._reading.tolerate(item, where, FaultKind.BOX_MALFORMED):
                        if (shape := record.shape(entry)) is not None:
                            if shape[0] in (None, ""):
                                raise KeyError("label")
                            shapes.append((where, shape))
                if (key := readable(record.id)) != record.id:
                    text = f"{key} has a name that is no UTF-8; give it another"
                    raise FaultError(FaultKind.IMAGE_UNREADABLE, text)
                if record.prompt is None and seen.intersection(record.files):
                    text = f"{self._name} lists {record.file_name} twice"
                    raise FaultError(FaultKind.IMAGE_TWICE, text)
                seen.update(record.files)
                if self._source.task.spec.detects and record.answer is None and not shapes:
                    kind, text = FaultKind.LABELS_EMPTY, f"the labels of {item} name no object"
                    if record.entries is None:
                        kind, text = FaultKind.IMAGE_UNLABELLED, f"{item} has no label"
                        text += f" file {readable(file.name)}" if file else ""
                    self._reading.add(kind, item, text)
                yield record, shapes

    def answer(self, record: Record, shapes: Shapes, image: Image) -> Answer | None:
        """The answer of a record, one of the domain's labels; None if it has none that counts."""
        labels = self._source.labels
        if (given := record.answer) is not None:
            if labels and given.choice is not None and given.choice not in labels:
                stray = stray_label(given.choice, labels)
                raise FaultError(stray.kind, f"{self._name}, {record.item}: {stray.text}")
            return given
        if self._source.task.spec.answer != "boxes":
            return None
        file, boxes = _stored(image, record), dict[Box, None]()
        for where, (label, edges) in shapes:
            if not labels or str(label) in labels:
                with self._reading.tolerate(record.item, where):
                    box = Box(*self._on_image(edges, image, file), str(label))
                    if box in boxes:
                        text = f"{where} repeats an earlier object"
                        self._reading.add(FaultKind.ROW_REPEATED, record.item, text)
                    boxes[box] = None
        return None if record.prompt and not boxes else Answer(tuple(boxes))

    def _on_image(self, edges: Edges | Scaled, image: Image, file: EncodedFile | None) -> Edges:
        (width, height), pixels = image.size, not callable(edges)
        edges = edges(*(file.size if file else image.size)) if callable(edges) else edges
        x0, y0, x1, y1 = file.shown(edges) if file is not None else edges
        text = f"box ({x0:g}, {y0:g}, {x1:g}, {y1:g})"
        if not all(map(math.isfinite, edges)) or x1 <= x0 or y1 <= y0:
            raise FaultError(FaultKind.BOX_EMPTY, f"{text} has no area")
        if pixels:
            self._boxes += 1
            self._right, self._bottom = max(self._right, edges[2]), max(self._bottom, edges[3])
            self._side = min(self._side, width, height)
        inside = min(x0, y0) >= -TOLERANCE and x1 <= width + TOLERANCE and y1 <= height + TOLERANCE
        x0, y0, x1, y1 = max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1)
        if inside and x1 > x0 and y1 > y0:
            return x0, y0, x1, y1
        raise FaultError(FaultKind.BOX_OUTSIDE, f"{text} lies outside its {width} × {height} image")

    def check_unit(self) -> None:
        """Refuse boxes that are shares of the image, or on a grid, where pixels are meant."""
        edges = self._right, self._bottom
        found = "shares of the image, between 0 and 1" if self._boxes and max(edges) <= 1 else ""
        for grid in GRIDS if self._boxes >= GRID_BOXES else ():
            if self._side > 1.1 * grid and all(0.98 * grid < edge <= grid for edge in edges):
                found = f"on a grid of {grid}"
        if found:
            text = f"{self._name}: all boxes are {found}, where the format has pixels"
            raise DataError(f"{text}: export them in pixels of the image")


def _stored(image: Image, record: Record) -> EncodedFile | None:
    """The file whose stored pixels boxes refer to, by the declared size; None: as it is shown."""
    try:
        width, height = (int(float(side)) for side in record.size or ())
    except (TypeError, ValueError, OverflowError):
        return None
    if min(width, height) <= 0 or (width, height) == image.size:
        return None
    file = encoded_file(image)
    if file is not None and file.size == (width, height):  # so it is turned when it is shown
        return file
    text = f"{record.item}: the image has {image.width} × {image.height} pixels, its annotation"
    raise FaultError(FaultKind.SIZE_DIFFERS, f"{text} says {width} × {height}")


def stray_label(label: str, labels: Sequence[str]) -> FaultError:
    """What is wrong with a label that is none of a domain's."""
    return FaultError(FaultKind.LABEL_STRAY, f"label {label!r} is not one of {', '.join(labels)}")


def numbered(location: str, entries: Iterable[Any]) -> Entries:
    """Entries with their locations, which are numbered from 1."""
    return ((f"{location} {number}", entry) for number, entry in enumerate(entries, start=1))


def rows_of(file: Path) -> Entries | None:
    """Rows of a label file, which is read when they are asked for; None if there is none."""

    def rows() -> Iterator[tuple[str, str]]:
        try:
            yield from numbered(f"{file.name}, row", read_text(file).splitlines())
        except DataError as error:
            raise FaultError(FaultKind.FILE_MALFORMED, str(error)) from error

    return rows() if file.exists() else None


def four_numbers(values: Any) -> Edges:
    """Four numbers of an annotation, or a `ValueError`."""
    try:
        a, b, c, d = map(float, values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"box {values!r:.80} is not four numbers") from error
    return a, b, c, d


def corners(bbox: Any) -> Edges:
    """Edges from x, y, width and height, as COCO has them, or a `ValueError`."""
    x, y, width, height = four_numbers(bbox)
    return x, y, x + width, y + height


def shares(x0: float, y0: float, x1: float, y1: float) -> Scaled:
    """Edges in shares of an image's sides."""
    return lambda width, height: (x0 * width, y0 * height, x1 * width, y1 * height)


def label_files(
    files: dict[Path, Path], reading: ImageReader, below: Path | None = None
) -> dict[Path, Path]:
    """The label files of images, where expected or by name `below`; those of no image are noted."""
    taken = {file for file in files.values() if file.exists()}
    lacking = [image for image, file in files.items() if file not in taken]
    suffixes = frozenset(file.suffix for file in files.values())
    folders = sorted({below or file.parent for file in files.values()})
    finders = {folder: Finder(folder, suffixes) for folder in folders}
    for image in lacking:
        found = finders[below or files[image].parent].of_stem(image.stem, files[image])
        if found is not None and found not in taken:
            files[image] = found
    used = {*files.values()}
    for folder, finder in finders.items():
        for path in finder.files:
            known, name = path in used or path.name == "classes.txt", readable(path.name)
            if not known and (below or path.parent == folder):
                reading.add(FaultKind.LABELS_ORPHANED, name, f"{name} belongs to no image")
    return files


def check_labels(source: str, known: Iterable[str], labels: Sequence[str]) -> None:
    """Check that a data set which declares its categories has all that a domain asks for."""
    names = list(known)
    missing = [label for label in labels if label not in names]
    if missing:
        shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        text = f"{source} has no category {', '.join(map(repr, missing))}, only {shown}"
        raise DataError(f"{text}: make the domain's labels and the data set's names match")
    if unused := len(set(names) - set(labels)):
        log.info("%s: %d categories that the domain does not ask for are left out", source, unused)


def note_unlisted(finder: Finder, reading: ImageReader) -> None:
    """Note image files that were not looked for."""
    for path in finder.not_found():
        name = readable(path.as_posix())
        reading.add(FaultKind.IMAGE_UNLISTED, name, f"{name} is not listed")
