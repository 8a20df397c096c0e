"""Grounding data of ms-swift: JSON Lines of `messages`, `images` and `objects`.

`objects` has `ref`, the names that stand for `<ref-object>` in the messages, and `bbox`, the boxes
(x0, y0, x1, y1) that stand for `<bbox>`: in pixels, or in shares of the image where `bbox_type` is
`norm1`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_data.faults import FaultError, FaultKind
from valora_data.sources.formats.annotated import four_numbers
from valora_data.sources.formats.labelled import Shape, shares
from valora_data.sources.formats.objects import ObjectsFormat, single_image

if TYPE_CHECKING:
    from valora_data.sources.base import Location

UNITS = ("real", "norm1")
"""Values of `bbox_type`: pixels of the image, or shares of its sides."""


class SwiftFormat(ObjectsFormat):
    """One file of JSON Lines, or a JSON list."""

    files = "ms-swift JSONL"

    def recognises(self, location: Location) -> bool:
        """Entries with `messages` and `objects`."""
        return {"messages", "objects"} <= location.entry.keys()

    def parsed(self, entry: dict[str, Any], where: str) -> tuple[str, list[Shape]]:
        """The image of an entry, and its `objects`."""
        objects = entry.get("objects")
        if not isinstance(objects, dict):
            raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no objects")
        names, boxes = objects.get("ref") or [], objects.get("bbox") or []
        if not isinstance(names, list) or not isinstance(boxes, list):
            raise FaultError(
                FaultKind.ROW_MALFORMED, f"{where}: ref and bbox of objects are no lists"
            )
        names = names * len(boxes) if len(names) == 1 else names  # one name for all boxes
        if len(names) != len(boxes):
            raise FaultError(
                FaultKind.ROW_MALFORMED,
                f"{where} has {len(names)} names in objects.ref for {len(boxes)} boxes in "
                "objects.bbox",
            )
        if (unit := objects.get("bbox_type") or UNITS[0]) not in UNITS:
            raise FaultError(
                FaultKind.ROW_MALFORMED, f"{where}: bbox_type is {unit!r}, expected real or norm1"
            )
        shapes = []
        for name, box in zip(names, boxes, strict=True):
            edges = four_numbers(box, f"{where}: the box")
            shapes.append(Shape(str(name), edges if unit == UNITS[0] else shares(*edges), where))
        return single_image(entry.get("images") or entry.get("image"), where), shapes
