"""Boxes as text, in the two conventions of LMMs: on a grid of 0 to 1000, or in pixels.

The pixels are those of the resized image that the vision encoder sees.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from valora_data.schema import Box

if TYPE_CHECKING:
    from valora_train.model.prompts import Size

    Convention = Literal["grid1000", "pixels"]

GRID = 1000
NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
BOX = re.compile(
    rf"(?:<ref>(?P<name>.*?)</ref>\s*)?<box>\s*\({NUMBER},{NUMBER}\)\s*,\s*\({NUMBER},{NUMBER}\)\s*"
    r"</box>",
    re.DOTALL,
)


def write_box(box: Box, size: Size, seen: Size, convention: Convention, step: int = 1) -> str:
    """Write a box in the format of Qwen-VL: ``<ref>name</ref><box>(x0,y0),(x1,y1)</box>``.

    Args:
        box: The box, in pixels of the original image.
        size: Width and height of the original image in pixels.
        seen: Width and height of the image that the vision encoder sees, for `pixels`.
        convention: `grid1000` or `pixels`.
        step: Coordinates are rounded to multiples of this number.
    """
    width, height = (GRID, GRID) if convention == "grid1000" else seen
    edges = [
        round(min(max(edge / full, 0.0), 1.0) * scale / step) * step
        for edge, full, scale in zip(box.xyxy, (*size, *size), (width, height) * 2, strict=True)
    ]
    x0, y0, x1, y1 = edges
    return f"<ref>{box.label}</ref><box>({x0},{y0}),({x1},{y1})</box>"


def read_boxes(text: str, size: Size, seen: Size, convention: Convention) -> list[Box]:
    """Read the boxes in a text, in pixels of the original image; empty ones are dropped.

    Args:
        text: Text with boxes in the format of `write_box`.
        size: Width and height of the original image in pixels.
        seen: Width and height of the image that the vision encoder sees, for `pixels`.
        convention: `grid1000` or `pixels`.
    """
    width, height = (GRID, GRID) if convention == "grid1000" else seen
    found = []
    for match in BOX.finditer(text):
        shares = [
            min(max(float(number) / scale, 0.0), 1.0)
            for number, scale in zip(match.groups()[1:], (width, height) * 2, strict=True)
        ]
        x0, y0, x1, y1 = (share * full for share, full in zip(shares, (*size, *size), strict=True))
        if x0 < x1 and y0 < y1:
            found.append(Box(x0, y0, x1, y1, match["name"] or ""))
    return found
