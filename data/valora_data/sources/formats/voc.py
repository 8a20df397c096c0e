"""Pascal VOC: one XML file for each image, with boxes in pixels that are counted from 1.

In folders of their own, such as `Annotations/` and `JPEGImages/` with lists of names in
`ImageSets/Main/`; or beside their images, as labelImg writes them, in folders that may be named
like splits. An XML file belongs to the image of the same name that lies nearest.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Split, Task
from valora_data.sources.base import take_missing_from_train
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, collected
from valora_data.sources.formats.files import (
    SPLIT_NAMES,
    Finder,
    files_below,
    images_below,
    spelling,
)
from valora_data.sources.formats.labelled import Shape, check_labels, readable
from valora_data.sources.formats.tables import read_text
from valora_data.sources.formats.xml import child_text, number, parse_xml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from xml.etree.ElementTree import Element

    from valora_data.sources.base import Location, Source
    from valora_data.sources.formats.labelled import ImageReader

XML = frozenset({".xml"})
SETS = "ImageSets/Main/*.txt"


class VocFormat(AnnotatedFormat):
    """A folder of images and XML files."""

    def supports(self, task: Task) -> bool:
        """Object detection."""
        return task.spec.detects

    def recognises(self, location: Location) -> bool:
        """Folders with XML files of annotations."""
        if not location.path.is_dir() or ".xml" not in location.suffixes:
            return False
        try:
            return parse_xml(files_below(location.path, XML)[0]).tag == "annotation"
        except FaultError:
            return True

    def guess_task(self, path: str) -> Task:
        """Object detection."""
        return Task.DETECTION

    def parts(self, source: Source) -> Mapping[Split | None, list[Path]]:
        """Images by the splits that lists or folders are named after, or all as one piece."""
        whole = Path(source.location)
        images = images_below(Path(source.images) if source.images else whole)
        lists = {
            split: file
            for file in sorted(whole.glob(SETS))
            if (split := SPLIT_NAMES.get(file.stem)) is not None
        }
        trainval = whole / SETS.replace("*", "trainval")
        if trainval.is_file():
            lists.setdefault(Split.TRAIN, trainval)
        parts: dict[Split, list[Path]] = {}
        if lists:
            named = {spelling(path.stem): path for path in images}
            for split, file in lists.items():
                names = {line.split()[0] for line in read_text(file).splitlines() if line.strip()}
                other = images[0].parent
                parts[split] = [
                    named.get(spelling(name), other / f"{name}.jpg") for name in sorted(names)
                ]
        else:
            for path in images:
                words = path.relative_to(whole).parts[:-1] if path.is_relative_to(whole) else ()
                found = next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)
                if found is None:
                    return {None: images}
                parts.setdefault(found, []).append(path)
        return take_missing_from_train(parts)

    def name(self, source: Source, part: list[Path]) -> str:
        """Name of the folder."""
        return Path(source.location).name

    def lists(self, source: Source) -> Iterator[Path]:
        """The lists of names."""
        yield from sorted(Path(source.location).glob(SETS))

    def records(self, source: Source, part: list[Path], reading: ImageReader) -> Iterator[Record]:
        """Images with the boxes of their XML files; ids are paths below the folder.

        A box of xmin, ymin, xmax and ymax covers these pixels and all between them, and the first
        pixel is number 1, as the devkit defines it; so it reaches from xmin − 1 to xmax here.
        """
        whole = Path(source.location)
        finder = Finder(whole, XML)
        reading.total += len(part)
        if not finder.files:
            raise DataError(
                f"{whole} holds no XML files: name the folder that holds both the images and the "
                "XML files, or the folder of the images as source.images"
            )
        files = {path: finder.of_stem(path.stem, path) for path in part}
        parsed = {path: _parsed(file) for path, file in files.items()}
        if source.labels:
            _check_names(parsed, whole.name, source.labels)
        if reading.thorough:
            _note_orphans(finder, part, source, reading)
        for path, root in parsed.items():
            item = readable(path.name)
            below = Path(source.images) if source.images else whole
            file = files[path] or path.with_suffix(".xml")
            record = Record(path, path.relative_to(below).as_posix(), file=file)
            if isinstance(root, FaultError):
                reading.add(root.kind, item, root.text)
                continue
            if root is not None:
                record.size = [child_text(root, f"size/{side}") for side in ("width", "height")]
                read = partial(_shape, file=file.name)
                record.shapes = collected(root.iter("object"), read, item, reading)
            yield record


def _parsed(path: Path | None) -> Element | FaultError | None:
    try:
        return None if path is None else parse_xml(path)
    except FaultError as error:
        return error


def _shape(entry: Element, position: int, file: str) -> Shape:
    where = f"{file}, object {position}"
    label = child_text(entry, "name")
    if not label:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no name")
    x0, y0, x1, y1 = (
        number(child_text(entry, f"bndbox/{edge}"), f"{where}: {edge}")
        for edge in ("xmin", "ymin", "xmax", "ymax")
    )
    # labelImg counts from 0 at the very edge.
    return Shape(label, (max(x0 - 1, min(x0, 0)), max(y0 - 1, min(y0, 0)), x1, y1), where)


def _check_names(
    parsed: Mapping[Path, Element | FaultError | None], name: str, labels: Sequence[str]
) -> None:
    """Check that any object has a name that the domain asks for."""
    names = {
        child_text(entry, "name")
        for root in parsed.values()
        if root is not None and not isinstance(root, FaultError)
        for entry in root.iter("object")
    }
    if names and not names & set(labels):
        check_labels(name, sorted(names), labels)


def _note_orphans(
    finder: Finder, part: Sequence[Path], source: Source, reading: ImageReader
) -> None:
    """Note XML files that belong to no image of any split."""
    folder = Path(source.images) if source.images else Path(source.location)
    stems = {spelling(path.stem) for path in (*part, *images_below(folder))}
    for path in finder.files:
        if spelling(path.stem) not in stems:
            text = f"{readable(path.name)} belongs to no image"
            reading.add(FaultKind.LABELS_ORPHANED, readable(path.name), text)
