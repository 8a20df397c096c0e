"""Grounding data of ms-swift: JSON Lines of `messages`, `images` and `objects`.

`objects` has `ref`, the names that stand for `<ref-object>` in the messages, and `bbox`, the boxes
(x0, y0, x1, y1) that stand for `<bbox>`: in pixels, or in shares of the image where `bbox_type` is
`norm1`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from valora_data.faults import FaultError, FaultKind
from valora_data.sources.base import Location, Source, Splits
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

UNITS = ("real", "norm1")
"""Values of `bbox_type`: pixels of the image, or shares of its sides."""


class SwiftFormat(ObjectsFormat):
    """One file of JSON Lines, or a JSON list."""

    files = "ms-swift JSONL"

    def recognises(self, location: Location) -> bool:
        """Entries with `messages` and `objects`."""
        return {"messages", "objects"} <= location.entry.keys()

    def open(self, source: Source) -> Splits:
        """All entries as one piece."""
        return {None: partial(read_objects, source, _parsed, _in_pixels)}

    def reads(self, source: Source) -> Iterator[Path]:
        """The file and the images of its entries."""
        yield source.file
        for entry in entries_of(source.file):
            try:
                yield source.image_folder / _parsed(entry, "").image
            except FaultError:
                continue


def _parsed(entry: Any, where: str) -> Objects:
    if not isinstance(entry, dict):
        raise FaultError(FaultKind.ROW_MALFORMED, f"{where} is no valid JSON object")
    objects = entry.get("objects")
    if not isinstance(objects, dict):
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no objects")
    names, boxes = objects.get("ref") or [], objects.get("bbox") or []
    if not isinstance(names, list) or not isinstance(boxes, list):
        raise FaultError(FaultKind.ROW_MALFORMED, f"{where}: ref and bbox of objects are no lists")
    if len(names) == 1:
        names = names * len(boxes)  # one name for all boxes
    if len(names) != len(boxes):
        raise FaultError(
            FaultKind.ROW_MALFORMED,
            f"{where} has {len(names)} names in objects.ref for {len(boxes)} boxes in objects.bbox",
        )
    if (unit := objects.get("bbox_type") or UNITS[0]) not in UNITS:
        raise FaultError(
            FaultKind.ROW_MALFORMED, f"{where}: bbox_type is {unit!r}, expected real or norm1"
        )
    image = single_image(entry.get("images") or entry.get("image"), where)
    pairs = zip(names, boxes, strict=True)
    return Objects(image, tuple((str(name), edges_of(box, where)) for name, box in pairs))


def _in_pixels(entry: Any, edges: Edges, size: tuple[int, int]) -> Edges:
    if (entry["objects"].get("bbox_type") or UNITS[0]) == UNITS[0]:
        return edges
    width, height = size
    x0, y0, x1, y1 = edges
    return x0 * width, y0 * height, x1 * width, y1 * height
