"""Objects named in conversations: what the readers of ms-swift's and Qwen's files share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Box, Sample, Task
from valora_data.sources.base import SourceFormat
from valora_data.sources.formats.labelled import Reading, checked_box
from valora_data.sources.formats.tables import load_json, read_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from valora_data.sources.base import Source

Edges = tuple[float, float, float, float]
Size = tuple[int, int]


class ObjectsFormat(SourceFormat):
    """What the formats of grounding files have in common."""

    def supports(self, task: Task) -> bool:
        """Object detection and referring expressions."""
        return task.spec.answer == "boxes"

    def guess_task(self, path: str) -> Task:
        """Referring expressions."""
        return Task.GROUNDING


@dataclass(frozen=True, slots=True)
class Objects:
    """What an entry says about its image.

    Attributes:
        image: Path of the image, as the entry has it.
        found: Names of the objects with their boxes (x0, y0, x1, y1), in the unit of the file.
    """

    image: str
    found: tuple[tuple[str, Edges], ...]


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


def read_objects(
    source: Source,
    parse: Callable[[Any, str], Objects],
    in_pixels: Callable[[Any, Edges, Size], Edges],
) -> Iterator[Sample]:
    """Read the entries of a file as samples of detection or of referring expressions.

    Args:
        source: Task, labels, file, folder of the images, and reader.
        parse: Reads an entry, given its place for messages; raises `FaultError`.
        in_pixels: A box of an entry in pixels, given its image's width and height.

    Yields:
        Detection: one sample per image, with the boxes of all its entries. Referring expressions:
        one per image and name, with the name as prompt and all boxes of that name.

    Raises:
        DataError: The file is missing or empty, or too many images have faults.
    """
    file = source.file
    entries = entries_of(file)
    if not entries:
        raise DataError(f"{file.name} has no entries: the data set is empty")
    with Reading(source.reader, file.name, len(entries)) as reading:
        parsed: dict[str, list[tuple[Any, Objects, str]]] = {}
        for number, entry in enumerate(entries, start=1):
            where = f"{file.name}, entry {number}"
            with reading.tolerate(where):
                objects = parse(entry, where)
                parsed.setdefault(objects.image, []).append((entry, objects, where))
        paths = [source.image_folder / place for place in parsed]
        for (place, found), picture in zip(parsed.items(), reading.open_all(paths), strict=True):
            if picture is None:
                continue
            boxes: dict[Box, None] = {}  # several entries may name the same object
            for entry, objects, where in found:
                for name, edges in objects.found:
                    with reading.tolerate(place):
                        pixels = in_pixels(entry, edges, picture.size)
                        boxes[checked_box(pixels, name, picture.size, where)] = None
            if source.task.spec.detects:
                wanted = source.labels or None
                kept = tuple(box for box in boxes if wanted is None or box.label in wanted)
                yield Sample(place, picture, Answer(kept))
                continue
            names = list(dict.fromkeys(box.label for box in boxes))
            for number, name in enumerate(names):
                mine = tuple(box for box in boxes if box.label == name)
                key = place if len(names) == 1 else f"{place}#{number}"
                yield Sample(key, picture, Answer(mine), name)


def edges_of(value: Any, where: str) -> Edges:
    """Four numbers as edges.

    Raises:
        FaultError: These are not four numbers.
    """
    try:
        x0, y0, x1, y1 = (float(number) for number in value)
    except (TypeError, ValueError) as error:
        raise FaultError(
            FaultKind.BOX_MALFORMED, f"{where}: {value!r:.80} is no list of four numbers"
        ) from error
    return x0, y0, x1, y1


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
