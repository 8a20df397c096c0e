"""Grounding conversations of Qwen-VL, whose answers are JSON with `bbox_2d` and `label`.

Entries have `image` or `images`, and `conversations` (`from`, `value`) or `messages` (`role`,
`content`). Qwen2.5-VL writes boxes in pixels, Qwen3-VL on a grid from 0 to 1000; the files do not
say which, so that each has a kind of its own.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from valora_data.faults import FaultError, FaultKind
from valora_data.sources.base import Location, Source, Splits
from valora_data.sources.formats.llava import GRID
from valora_data.sources.formats.objects import (
    Edges,
    Objects,
    ObjectsFormat,
    edges_of,
    entries_of,
    read_objects,
    single_image,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOX = "bbox_2d"
FENCE = re.compile(r"^\s*```(?:json)?\s*(.*?)\s*```\s*$", re.DOTALL)
PLACE = re.compile(r"<(image|video)>")
ASSISTANTS = frozenset({"gpt", "assistant"})


class PixelQwenFormat(ObjectsFormat):
    """Qwen2.5-VL: boxes in pixels of the image."""

    files = "Qwen2.5-VL JSON"

    def recognises(self, location: Location) -> bool:
        """Answers with `bbox_2d`, one of them beyond the grid of Qwen3-VL."""
        return _has_boxes(location) and _largest(location.file) > GRID

    def open(self, source: Source) -> Splits:
        """All entries as one piece."""
        return {None: partial(read_objects, source, _parsed, self.in_pixels)}

    def reads(self, source: Source) -> Iterator[Path]:
        """The file and the images of its entries."""
        yield source.file
        for entry in entries_of(source.file):
            try:
                yield source.image_folder / _parsed(entry, "").image
            except FaultError:
                continue

    @staticmethod
    def in_pixels(entry: Any, edges: Edges, size: tuple[int, int]) -> Edges:
        """A box in pixels of its image."""
        return edges


class GridQwenFormat(PixelQwenFormat):
    """Qwen3-VL: boxes on a grid from 0 to 1000."""

    files = "Qwen3-VL JSON"

    def recognises(self, location: Location) -> bool:
        """Answers with `bbox_2d` within the grid."""
        return _has_boxes(location) and _largest(location.file) <= GRID

    @staticmethod
    def in_pixels(entry: Any, edges: Edges, size: tuple[int, int]) -> Edges:
        """A box in pixels of its image."""
        width, height = size
        x0, y0, x1, y1 = (edge / GRID for edge in edges)
        return x0 * width, y0 * height, x1 * width, y1 * height


def _has_boxes(location: Location) -> bool:
    return any(BOX in text for text in _answers(location.entry))


def _largest(path: Path) -> float:
    """The largest coordinate of a file; 0 without any."""
    largest = 0.0
    for entry in entries_of(path):
        try:
            found = _parsed(entry, "").found
        except FaultError:
            continue
        largest = max([largest, *(max(edges) for _, edges in found)])
    return largest


def _turns(entry: Any) -> list[tuple[str, str]]:
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


def _answers(entry: Any) -> list[str]:
    return [text for who, text in _turns(entry) if who in ASSISTANTS]


def _parsed(entry: Any, where: str) -> Objects:
    if not isinstance(entry, dict):
        raise FaultError(FaultKind.ROW_MALFORMED, f"{where} is no valid JSON object")
    image = single_image(entry.get("image") or entry.get("images"), where)
    found: list[tuple[str, Edges]] = []
    asked = ""
    for who, text in _turns(entry):
        if who not in ASSISTANTS:
            asked = PLACE.sub(" ", text).strip()
            continue
        for item in _listed(text, where):
            name = item.get("label") or item.get("ref") or asked
            found.append((str(name), edges_of(item.get(BOX), where)))
    if not found:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no answer with {BOX}")
    return Objects(image, tuple(found))


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
