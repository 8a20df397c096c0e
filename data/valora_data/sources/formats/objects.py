"""Objects named in conversations: what the readers of ms-swift's and Qwen's files share."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Task
from valora_data.sources.formats.annotated import AnnotatedFormat, Record
from valora_data.sources.formats.files import Finder
from valora_data.sources.formats.labelled import Shape
from valora_data.sources.formats.tables import load_json, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from valora_data.schema import Split
    from valora_data.sources.base import Source
    from valora_data.sources.formats.labelled import ImageReader


class ObjectsFormat(AnnotatedFormat):
    """Grounding files: entries of an image with named objects."""

    @abstractmethod
    def parsed(self, entry: dict[str, Any], where: str) -> tuple[str, list[Shape]]:
        """Path of an entry's image, and its objects.

        Raises:
            FaultError: It has none.
        """

    def supports(self, task: Task) -> bool:
        """Object detection and referring expressions."""
        return task.spec.answer == "boxes"

    def guess_task(self, path: str) -> Task:
        """Referring expressions."""
        return Task.GROUNDING

    def parts(self, source: Source) -> Mapping[Split | None, Path]:
        """All entries as one piece."""
        return {None: source.file}

    def name(self, source: Source, part: Path) -> str:
        """Name of the file."""
        return part.name

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        """A record for each image, with the objects of all its entries.

        Referring expressions have one for each name of an image's objects, which is its prompt.
        """
        entries = entries_of(part)
        if not entries:
            raise DataError(f"{part.name} has no entries: the data set is empty")
        reading.total += len(entries)
        found = self.objects(entries, part.name, reading)
        finder = Finder(source.image_folder)
        for image, shapes in found.items():
            path = finder.find(image)
            names = list(dict.fromkeys(shape.label for shape in shapes))
            if source.task.spec.detects:
                yield Record(path, image, shapes)
                continue
            for number, name in enumerate(names):
                mine = [shape for shape in shapes if shape.label == name]
                key = image if len(names) == 1 else f"{image}#{number}"
                yield Record(path, key, mine, prompt=name)

    def objects(
        self, entries: list[Any], name: str, reading: ImageReader
    ) -> Mapping[str, list[Shape]]:
        """Objects of all images, by the images' paths."""
        found: defaultdict[str, list[Shape]] = defaultdict(list)
        for number, entry in enumerate(entries, start=1):
            where = f"{name}, entry {number}"
            with reading.tolerate(where):
                if not isinstance(entry, dict):
                    raise FaultError(FaultKind.ROW_MALFORMED, f"{where} is no valid JSON object")
                image, shapes = self.parsed(entry, where)
                found[image] += shapes
        return found


def entries_of(path: Path) -> list[Any]:
    """Entries of a JSON list or of JSON Lines; rows that are no JSON are None.

    Raises:
        DataError: The file is missing, or holds no list.
    """
    if path.suffix == ".jsonl":
        return [entry for _, entry in read_lines(path)]
    content = load_json(path)
    if not isinstance(content, list):
        raise DataError(f"{path.name} is no list of entries: export it as a list, or as JSON Lines")
    return content


def single_image(images: Any, where: str) -> str:
    """The path of an entry's only image.

    Args:
        images: A path, an object with `path`, or a list of one of these.
        where: The entry, for messages.

    Raises:
        FaultError: It has none or several.
    """
    places: Sequence[Any] = images if isinstance(images, list) else [images]
    places = [place.get("path") if isinstance(place, dict) else place for place in places]
    if len(places) != 1 or not isinstance(places[0], str) or not places[0]:
        text = f"{where} has {len(places) if images else 0} images, expected one"
        raise FaultError(FaultKind.ROW_MALFORMED, text)
    return places[0]
