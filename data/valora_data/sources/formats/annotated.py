"""The base of formats whose readers yield records, and what the readers share.

`supervision`'s loaders are not used: they stop at the first fault, know neither EXIF nor the sizes
that annotations declare, and match files by their exact names.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from PIL.Image import Image

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Sample, Split
from valora_data.sources.base import Source, SourceFormat, Splits
from valora_data.sources.formats.files import Finder, is_file, readable
from valora_data.sources.formats.labelled import ImageReader, ahead, load_image, one_pass
from valora_data.sources.formats.validator import Edges, Record, Shape, Validator, stray_label
from valora_data.sources.formats.videos import read_frames
from valora_data.wording import plural

__all__ = ["AnnotatedFormat", "Edges", "Record", "Shape", "stray_label"]
log = logging.getLogger(__name__)
T = TypeVar("T")
Found = TypeVar("Found")


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
            for record in self.records(source, part, ImageReader.forgiving()):
                found |= dict.fromkeys([*record.files, *([record.file] if record.file else [])])
        yield from found

    def read(self, source: Source, part: Any) -> Iterator[Sample]:
        """The samples of a part: one for each record whose images decode.

        Raises:
            DataError: As `records` does, or boxes are in another unit than the format has.
        """
        name = source.file.name or source.location
        with one_pass(source.reader, name) as reading:
            validator = Validator(source, name, reading)
            records = validator.once(self.records(source, part, reading))
            for record, future in ahead(
                records,
                lambda record: _opened(record, source.frames),
                lambda record: record.media,
                lambda record: len(record.media) * (source.frames if record.video else 1),
            ):
                images: list[Image] = []
                with reading.tolerate(record.file_name or record.item):
                    images = future.result()
                with reading.tolerate(record.item):
                    answer = validator.answer(record, images[0]) if images else None
                    if answer is not None:
                        rest = tuple(images[1:])
                        yield Sample(record.id, images[0], answer, record.prompt, rest)
            validator.check_unit()


def _opened(record: Record, frames: int) -> list[Image]:
    if not record.video:
        return [load_image(one, record.item) for one in record.media]
    name = record.file_name or record.item
    videos = [one for one in record.media if isinstance(one, Path | bytes)]
    return [image for one in videos for image in read_frames(one, frames, name)]


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
