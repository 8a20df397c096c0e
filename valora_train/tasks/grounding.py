"""Referring expressions: the box that a phrase refers to, as text; accuracy at IoU 0.5.

Boxes are written in the two conventions of LMMs: on a grid of 0 to 1000, or in pixels of the
resized image that the vision encoder sees.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from valora_data.schema import Answer, Box, Sample
from valora_data.tasks import GROUNDING
from valora_train.metrics.measures import Scores, box_accuracy
from valora_train.tasks.language import LanguageTask, Size

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

    `size` is that of the original image, `seen` that of the image that the vision encoder sees, for
    `pixels`. Coordinates are rounded to multiples of `step`.
    """
    scales = (GRID,) * 4 if convention == "grid1000" else seen * 2
    x0, y0, x1, y1 = (
        round(min(max(edge / full, 0.0), 1.0) * scale / step) * step
        for edge, full, scale in zip(box.xyxy, size * 2, scales, strict=True)
    )
    return f"<ref>{box.label}</ref><box>({x0},{y0}),({x1},{y1})</box>"


def read_boxes(text: str, size: Size, seen: Size, convention: Convention) -> list[Box]:
    """Read the boxes in a text, in pixels of the original image; empty ones are dropped."""
    scales = (GRID,) * 4 if convention == "grid1000" else seen * 2
    found = []
    for match in BOX.finditer(text):
        x0, y0, x1, y1 = (
            min(max(float(number) / scale, 0.0), 1.0) * full
            for number, scale, full in zip(match.groups()[1:], scales, size * 2, strict=True)
        )
        if x0 < x1 and y0 < y1:
            found.append(Box(x0, y0, x1, y1, match["name"] or ""))
    return found


class GroundingTask(LanguageTask):
    """Finds what a phrase refers to, in the model's convention for boxes."""

    spec = GROUNDING

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """Share of first boxes that overlap a true one by IoU 0.5."""
        return box_accuracy(predicted, truth)

    def target_text(self, sample: Sample, seen: Size) -> str | None:
        """The true boxes as text."""
        size, lmm = sample.image.size, self.lmm
        boxes = sample.answer.boxes
        return "".join(
            write_box(b, size, seen, lmm.coordinates, lmm.coordinate_step) for b in boxes
        )

    def parse(self, text: str, sample: Sample, seen: Size) -> Answer:
        """The boxes in the text."""
        return Answer(tuple(read_boxes(text, sample.image.size, seen, self.lmm.coordinates)))

    def metadata(self, head: Any) -> dict[str, Any]:
        """Length of answers and the convention for boxes."""
        return super().metadata(head) | {"coordinates": self.lmm.coordinates}
