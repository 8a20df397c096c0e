"""Grounding conversations of Qwen-VL, whose answers are JSON with `bbox_2d` and `label`.

Entries have `image` or `images`, and `conversations` (`from`, `value`) or `messages` (`role`,
`content`). Qwen2.5-VL writes boxes in pixels, Qwen3-VL on a grid from 0 to 1000; the files do not
say which, so that each has a kind of its own.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from valora_data.faults import FaultError, FaultKind
from valora_data.sources.formats.annotated import four_numbers
from valora_data.sources.formats.labelled import Edges, ImageReader, Shape, shares
from valora_data.sources.formats.objects import (
    ObjectsFormat,
    entries_of,
    single_image,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from valora_data.sources.base import Location

BOX = "bbox_2d"
GRID = 1000
FENCE = re.compile(r"^\s*```(?:json)?\s*(.*?)\s*```\s*$", re.DOTALL)
PLACE = re.compile(r"<(image|video)>")
ASSISTANTS = frozenset({"gpt", "assistant"})


class PixelQwenFormat(ObjectsFormat):
    """Qwen2.5-VL: boxes in pixels of the image."""

    files = "Qwen2.5-VL JSON"

    def recognises(self, location: Location) -> bool:
        """Answers with `bbox_2d`, one of them beyond the grid of Qwen3-VL."""
        return _largest(location) > GRID

    def parsed(self, entry: dict[str, Any], where: str) -> tuple[str, list[Shape]]:
        """The image of an entry, and the objects of its answers."""
        found = [self.shape(name, edges, where) for name, edges in _boxes(entry, where)]
        if not found:
            raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no answer with {BOX}")
        return single_image(entry.get("image") or entry.get("images"), where), found

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
    if not any(BOX in text for who, text in _turns(location.entry) if who in ASSISTANTS):
        return 0.0
    found = PixelQwenFormat().objects(entries_of(location.file), "", ImageReader.forgiving())
    edges = (shape.edges for shapes in found.values() for shape in shapes)
    return max((max(one) for one in edges if not callable(one)), default=0.0)


def _turns(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """Speakers and texts of a conversation, in either form."""
    turns = entry.get("conversations") or entry.get("messages") or []
    found = []
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict):
            text = turn.get("value", turn.get("content", ""))
            if isinstance(text, list):
                parts = (part.get("text", "") for part in text if isinstance(part, dict))
                text = " ".join(str(part) for part in parts)
            found.append((str(turn.get("from", turn.get("role", ""))), str(text)))
    return found


def _boxes(entry: dict[str, Any], where: str) -> Iterator[tuple[str, Edges]]:
    """Names and boxes of the objects of all answers; what was asked names those without a label."""
    asked = ""
    for who, text in _turns(entry):
        if who not in ASSISTANTS:
            asked = PLACE.sub(" ", text).strip()
            continue
        for item in _listed(text, where):
            name = item.get("label") or item.get("ref") or asked
            yield str(name), four_numbers(item.get(BOX), f"{where}: {BOX}")


def _listed(text: str, where: str) -> list[dict[str, Any]]:
    """The objects of an answer: JSON, in a fence of Markdown or not."""
    if BOX not in text:
        return []
    fenced = FENCE.match(text)
    try:
        content = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError) as error:
        raise FaultError(
            FaultKind.ROW_MALFORMED, f"{where}: the answer {text[:60]!r} is no valid JSON"
        ) from error
    items = content if isinstance(content, list) else [content]
    return [item for item in items if isinstance(item, dict) and BOX in item]
