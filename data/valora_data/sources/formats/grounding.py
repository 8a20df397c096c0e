"""Objects named in conversations: the files of ms-swift and of Qwen-VL.

ms-swift's entries have `messages`, `images` and `objects`: `ref`, the names that stand for
`<ref-object>` in the messages, and `bbox`, the boxes (x0, y0, x1, y1) that stand for `<bbox>`: in
pixels, or in shares of the image where `bbox_type` is `norm1`.

Qwen's have `image` or `images`, and `conversations` (`from`, `value`) or `messages` (`role`,
`content`), whose answers are JSON with `bbox_2d` and `label`. Qwen2.5-VL writes boxes in pixels,
Qwen3-VL on a grid from 0 to 1000; the files do not say which, so that each has a kind of its own.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Task
from valora_data.sources.base import Location, Source
from valora_data.sources.formats.annotated import (
    AnnotatedFormat,
    Edges,
    Record,
    Shape,
    four_numbers,
    shares,
)
from valora_data.sources.formats.files import Finder
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.llava import GRID, PLACE, media_of, turns_of
from valora_data.sources.formats.tables import load_rows

BOX = "bbox_2d"
FENCE = re.compile(r"^\s*```(?:json)?\s*(.*?)\s*```\s*$", re.DOTALL)


class ObjectsFormat(AnnotatedFormat):
    """Grounding files: entries of an image with named objects."""

    answers = frozenset({"objects", "phrase"})
    task = Task.GROUNDING

    @abstractmethod
    def shapes(self, entry: dict[str, Any], where: str) -> list[Shape]:
        """The objects of an entry, or a `FaultError` if it has none."""

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        """A record for each image, with the objects of all its entries.

        Referring expressions have one for each name of an image's objects, which is its prompt.
        """
        entries = load_rows(part, "entries")
        reading.total += len(entries)
        finder = Finder(source.image_folder)
        for image, shapes in self.objects(entries, part.name, reading).items():
            media = (finder.find(image),)
            if source.task.spec.detects:
                yield Record(media, image, shapes)
                continue
            names = list(dict.fromkeys(shape.label for shape in shapes))
            for number, name in enumerate(names):
                mine = [shape for shape in shapes if shape.label == name]
                key = image if len(names) == 1 else f"{image}#{number}"
                yield Record(media, key, mine, prompt=name)

    def objects(
        self, entries: list[Any], name: str, reading: ImageReader
    ) -> dict[str, list[Shape]]:
        """Objects of all images, by the images' paths."""
        found: defaultdict[str, list[Shape]] = defaultdict(list)
        for number, entry in enumerate(entries, start=1):
            where = f"{name}, entry {number}"
            with reading.tolerate(where):
                if not isinstance(entry, dict):
                    raise FaultError(FaultKind.ROW_MALFORMED, f"{where} is no valid JSON object")
                shapes, media = self.shapes(entry, where), media_of(entry)
                if len(media) != 1:
                    text = f"{where} has {len(media)} images, expected one"
                    raise FaultError(FaultKind.ROW_MALFORMED, text)
                found[media[0]] += shapes
        return found


class SwiftFormat(ObjectsFormat):
    """One file of JSON Lines, or a JSON list."""

    files = "ms-swift JSONL"

    def recognises(self, location: Location) -> bool:
        """Entries with `messages` and `objects`."""
        return {"messages", "objects"} <= location.entry.keys()

    def shapes(self, entry: dict[str, Any], where: str) -> list[Shape]:
        """Its `objects`."""
        objects = entry.get("objects")
        if not isinstance(objects, dict):
            raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no objects")
        names, boxes = objects.get("ref") or [], objects.get("bbox") or []
        unit = objects.get("bbox_type") or "real"
        text = ""
        if not isinstance(names, list) or not isinstance(boxes, list):
            text = f"{where}: ref and bbox of objects are no lists"
        elif len(names) not in (1, len(boxes)):  # one name is that of all boxes
            text = f"{where} has {len(names)} names in objects.ref for {len(boxes)} boxes"
        elif unit not in ("real", "norm1"):
            text = f"{where}: bbox_type is {unit!r}, expected real or norm1"
        if text:
            raise FaultError(FaultKind.ROW_MALFORMED, text)
        names = names * len(boxes) if len(names) == 1 else names
        edges = [four_numbers(box, f"{where}: the box") for box in boxes]
        return [
            Shape(str(name), box if unit == "real" else shares(*box), where)
            for name, box in zip(names, edges, strict=True)
        ]


class PixelQwenFormat(ObjectsFormat):
    """Qwen2.5-VL: boxes in pixels of the image."""

    files = "Qwen2.5-VL JSON"

    def recognises(self, location: Location) -> bool:
        """Answers with `bbox_2d`, one of them beyond the grid of Qwen3-VL."""
        return _largest(location) > GRID

    def shapes(self, entry: dict[str, Any], where: str) -> list[Shape]:
        """The objects of its answers; what was asked names those without a label."""
        found, asked = [], ""
        for who, text in turns_of(entry):
            if who != "gpt":
                asked = PLACE.sub(" ", text).strip()
                continue
            for item in _listed(text, where):
                name = str(item.get("label") or item.get("ref") or asked)
                found.append(self.shape(name, four_numbers(item[BOX], f"{where}: {BOX}"), where))
        if not found:
            raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no answer with {BOX}")
        return found

    def shape(self, name: str, edges: Edges, where: str) -> Shape:
        """An object of which the box is in the unit of the file."""
        return Shape(name, edges, where)


class GridQwenFormat(PixelQwenFormat):
    """Qwen3-VL: boxes on a grid from 0 to 1000."""

    files = "Qwen3-VL JSON"

    def recognises(self, location: Location) -> bool:
        """Answers with `bbox_2d` within the grid."""
        return 0 < _largest(location) <= GRID

    def shape(self, name: str, edges: Edges, where: str) -> Shape:
        """An object of which the box is on the grid."""
        x0, y0, x1, y1 = (edge / GRID for edge in edges)
        return Shape(name, shares(x0, y0, x1, y1), where)


def _largest(location: Location) -> float:
    """The largest coordinate of a file; 0 if its first entry has none."""
    if not any(BOX in text for who, text in turns_of(location.entry) if who == "gpt"):
        return 0.0
    entries = load_rows(location.file, "entries")
    found = PixelQwenFormat().objects(entries, "", ImageReader.forgiving())
    edges = (shape.edges for shapes in found.values() for shape in shapes)
    return max((max(one) for one in edges if not callable(one)), default=0.0)


def _listed(text: str, where: str) -> list[dict[str, Any]]:
    """The objects of an answer: JSON, in a fence of Markdown or not."""
    if BOX not in text:
        return []
    fenced = FENCE.match(text)
    try:
        content = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError) as error:
        text = f"{where}: the answer {text[:60]!r} is no valid JSON"
        raise FaultError(FaultKind.ROW_MALFORMED, text) from error
    items = content if isinstance(content, list) else [content]
    return [item for item in items if isinstance(item, dict) and BOX in item]
