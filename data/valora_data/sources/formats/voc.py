"""Pascal VOC: an XML file per image, of its name, beside it or in another folder."""

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
from valora_data.sources.formats import annotated, files
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, Shape
from valora_data.sources.formats.labelled import ImageReader

XML = frozenset({".xml"})


class VocFormat(AnnotatedFormat):
    """A folder of images and XML files."""

    answers = frozenset({"objects"})
    task = Task.DETECTION

    def recognises(self, location: Location) -> bool:
        if not location.path.is_dir() or ".xml" not in location.suffixes:
            return False
        try:
            return parse_xml(files.files_below(location.path, XML)[0]).tag == "annotation"
        except FaultError:
            return True

    def parts(self, source: Source) -> Mapping[Split | None, list[Path]]:
        folder = Path(source.images or source.location)
        images = files.images_below(folder)
        named = {files.spelling(path.stem): path for path in images}
        parts: dict[Split, list[Path]] = {}
        for file in self.lists(source):  # in the order of names: train before trainval
            split = files.SPLIT_NAMES.get(file.stem.replace("trainval", "train"))
            if split is not None and split not in parts:
                lines = filter(str.strip, files.read_text(file).splitlines())
                parts[split] = [
                    named.get(files.spelling(name), images[0].parent / f"{name}.jpg")
                    for name in sorted({line.split()[0] for line in lines})
                ]
        for path in () if parts else images:
            split = files.split_in(path.relative_to(folder).parts[:-1])
            if split is None:
                return {None: images}
            parts.setdefault(split, []).append(path)
        return files.with_rest(parts, images)

    def lists(self, source: Source) -> Iterator[Path]:
        yield from sorted(Path(source.location).glob("ImageSets/Main/*.txt"))

    def records(self, source: Source, part: list[Path], reading: ImageReader) -> Iterator[Record]:
        whole, below = Path(source.location), Path(source.images or source.location)
        if not files.files_below(whole, XML):
            raise DataError(
                f"{whole} holds no XML files: name the folder that holds both the images and the "
                "XML files, or the folder of the images as source.images"
            )
        reading.total += len(part)
        images = dict.fromkeys([*part, *files.images_below(below)])
        labels = annotated.label_files(
            images, lambda image: image.with_suffix(".xml"), reading, whole
        )
        for path in part:
            file = labels[path]
            record = Record((path,), path.relative_to(below).as_posix(), shape=_shape, file=file)
            with reading.tolerate(record.item):
                if file.exists():
                    root = parse_xml(file)
                    record.size = [root.findtext(f"size/{side}") for side in ("width", "height")]
                    record.entries = annotated.numbered(f"{file.name}, object", root.iter("object"))
                yield record


def _shape(element: Element) -> Shape:
    """A box of pixels counted from 1, as the devkit has it: from xmin − 1 to xmax."""
    sides = [child_text(element, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
    x0, y0, x1, y1 = annotated.four_numbers(sides)
    # labelImg counts from 0 at the very edge.
    edges = max(x0 - 1, min(x0, 0)), max(y0 - 1, min(y0, 0)), x1, y1
    return child_text(element, "name"), edges


def parse_xml(path: Path) -> Element:
    """Root of an XML file, parsed by defusedxml, which expands no entities; or a `FaultError`."""
    try:
        root: Element | None = parse(str(path)).getroot()
    except (OSError, ParseError, DefusedXmlException, ValueError, LookupError) as error:
        text = f"{path.name} is not valid XML ({error})"
        raise FaultError(FaultKind.FILE_MALFORMED, text) from error
    assert root is not None, "an XML file without a root is a ParseError"
    return root


def child_text(element: Element, path: str) -> str:
    """Text of an element below another one; empty if there is none."""
    return (element.findtext(path) or "").strip()
