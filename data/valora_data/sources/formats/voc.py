"""Pascal VOC: one XML file for each image, with boxes in pixels that are counted from 1.

In folders of their own, such as `Annotations/` and `JPEGImages/` with lists of names in
`ImageSets/Main/`; or beside their images, as labelImg writes them, in folders that may be named
like splits. An XML file belongs to the image of the same name that lies nearest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import parse

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Split, Task
from valora_data.sources.base import Location, Source
from valora_data.sources.formats.annotated import (
    AnnotatedFormat,
    Record,
    Shape,
    check_labels,
    collected,
    label_files,
    number,
)
from valora_data.sources.formats.files import (
    SPLIT_NAMES,
    files_below,
    images_below,
    spelling,
    split_in,
    with_rest,
)
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.tables import read_text

XML = frozenset({".xml"})
SETS = "ImageSets/Main/*.txt"


class VocFormat(AnnotatedFormat):
    """A folder of images and XML files."""

    answers = frozenset({"objects"})
    task = Task.DETECTION

    def recognises(self, location: Location) -> bool:
        """Folders with XML files of annotations."""
        if not location.path.is_dir() or ".xml" not in location.suffixes:
            return False
        try:
            return parse_xml(files_below(location.path, XML)[0]).tag == "annotation"
        except FaultError:
            return True

    def parts(self, source: Source) -> Mapping[Split | None, list[Path]]:
        """Images by the splits that lists or folders are named after, or all as one piece."""
        whole = Path(source.location)
        images = images_below(_images(source))
        lists = {SPLIT_NAMES.get(file.stem): file for file in sorted(whole.glob(SETS))}
        trainval = whole / SETS.replace("*", "trainval")
        if trainval.is_file():
            lists.setdefault(Split.TRAIN, trainval)
        parts: dict[Split, list[Path]] = {}
        named = {spelling(path.stem): path for path in images}
        for split, file in lists.items():
            if split is not None:
                names = {line.split()[0] for line in read_text(file).splitlines() if line.strip()}
                missing = images[0].parent
                parts[split] = [
                    named.get(spelling(name), missing / f"{name}.jpg") for name in sorted(names)
                ]
        for path in () if parts else images:
            split = split_in(path.relative_to(_images(source)).parts[:-1])
            if split is None:
                return {None: images}
            parts.setdefault(split, []).append(path)
        return with_rest(parts, images)

    def lists(self, source: Source) -> Iterator[Path]:
        """The lists of names."""
        yield from sorted(Path(source.location).glob(SETS))

    def records(self, source: Source, part: list[Path], reading: ImageReader) -> Iterator[Record]:
        """Images with the boxes of their XML files; ids are paths below the folder."""
        whole, below = Path(source.location), _images(source)
        if not files_below(whole, XML):
            raise DataError(
                f"{whole} holds no XML files: name the folder that holds both the images and the "
                "XML files, or the folder of the images as source.images"
            )
        reading.total += len(part)
        images = dict.fromkeys([*part, *images_below(below)])
        files = label_files(
            images, lambda image: image.with_suffix(".xml"), whole, whole.name, reading
        )
        names: set[str] = set()
        found = []
        for path in part:
            file = files[path]
            record = Record((path,), path.relative_to(below).as_posix(), file=file)
            with reading.tolerate(record.item):
                if file.exists():
                    root = parse_xml(file)
                    record.size = [root.findtext(f"size/{side}") for side in ("width", "height")]
                    names |= {child_text(entry, "name") for entry in root.iter("object")}
                    objects = [(file.name, entry) for entry in root.iter("object")]
                    record.shapes = collected(objects, _shape, record.item, reading)
                found.append(record)
        if source.labels and names and not names & set(source.labels):
            check_labels(whole.name, sorted(names), source.labels)
        yield from found


def _images(source: Source) -> Path:
    return Path(source.images or source.location)


def _shape(entry: tuple[str, Element], position: int) -> Shape:
    """A box of xmin, ymin, xmax and ymax, which covers these pixels and all between them.

    The first pixel is number 1, as the devkit defines it; so it reaches from xmin − 1 to xmax here.
    """
    file, element = entry
    where = f"{file}, object {position}"
    label = child_text(element, "name")
    if not label:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no name")
    x0, y0, x1, y1 = (
        number(child_text(element, f"bndbox/{edge}"), f"{where}: {edge}")
        for edge in ("xmin", "ymin", "xmax", "ymax")
    )
    # labelImg counts from 0 at the very edge.
    return Shape(label, (max(x0 - 1, min(x0, 0)), max(y0 - 1, min(y0, 0)), x1, y1), where)


def parse_xml(path: Path) -> Element:
    """Root of an XML file, parsed by defusedxml, which expands no entities.

    Raises:
        FaultError: If the file cannot be read or is no XML.
    """
    try:
        root: Element | None = parse(str(path)).getroot()
    except (OSError, ParseError, DefusedXmlException, ValueError, LookupError) as error:
        text = f"{path.name} is not valid XML ({error})"
        raise FaultError(FaultKind.FILE_MALFORMED, text) from error
    if root is None:
        raise FaultError(FaultKind.FILE_MALFORMED, f"{path.name} is empty")
    return root


def child_text(element: Element, path: str) -> str:
    """Text of an element below another one; empty if there is none."""
    return (element.findtext(path) or "").strip()
