"""Answers of vision task heads, and how they are compared with golden ones.

Nothing here imports torch, so that code which only handles answers does not load it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    Size = tuple[int, int]
    """Width and height of an image in pixels."""

PIXEL_TOLERANCE = 0.5
"""Pixels by which an edge of a golden box may differ when it is computed again."""
EDGE_TOLERANCE = 0.01
"""The same as a share of the box's longer side, where that is more: in bf16, another order of sums
moved edges by up to 0.8 % of it (a 7B shape)."""
CONFIDENCE_TOLERANCE = 0.01
"""Difference that is allowed between a golden confidence and the one computed again."""
BOX_GRID = 1000
"""Boxes in text have coordinates from 0 to this number, as Qwen-VL writes them."""


@dataclass(frozen=True, slots=True)
class Detection:
    """A detected object.

    Attributes:
        label: Name of its class.
        confidence: Calibrated confidence, in [0, 1].
        box: (x0, y0, x1, y1) in pixels of the image as it was sent.
    """

    label: str
    confidence: float
    box: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResult(ABC):
    """The answer of a head to one prompt. Every form of answer is a subclass.

    Attributes:
        kind: Kind of the head, a name in `HEAD_KINDS`.
        logits: (rows, outputs) float32, the raw outputs of the head.
    """

    kind: str
    logits: NDArray[np.float32] | None = None

    @abstractmethod
    def image_fields(self, number: int) -> dict[str, Any]:
        """The answer to one image, as fields of a JSON object.

        Args:
            number: Index of the image in the prompt.
        """

    def prompt_fields(self, sizes: Sequence[Size]) -> dict[str, Any]:
        """The answer to the whole prompt, as fields of a JSON object.

        Args:
            sizes: Width and height in pixels of each image, as it was sent.
        """
        return self.image_fields(0)

    @abstractmethod
    def text(self, sizes: Sequence[Size]) -> str:
        """The answer in words, for clients that read only the text of a message.

        Args:
            sizes: Width and height in pixels of each image, as it was sent.
        """

    @abstractmethod
    def golden(self) -> Any:
        """The answer as golden examples hold it, in JSON types."""

    @classmethod
    def matches(cls, found: Any, expected: Any, threshold: float) -> bool:
        """Whether an answer reproduces a golden one.

        Args:
            found: The answer, as `golden` returns it.
            expected: The answer in the golden example.
            threshold: Confidence from which an answer counts; 0 where all count.
        """
        return bool(found == expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelResult(HeadResult):
    """One label out of a closed set.

    Attributes:
        label: The most probable label.
        confidences: The probability of each label, in the head's order.
    """

    label: str
    confidences: dict[str, float] = field(default_factory=dict)

    @property
    def confidence(self) -> float | None:
        """The probability of `label`."""
        return self.confidences.get(self.label)

    def image_fields(self, number: int) -> dict[str, Any]:
        """The label, its confidence and those of all labels."""
        return {
            "label": self.label,
            "confidence": self.confidence,
            "confidences": dict(self.confidences),
        }

    def text(self, sizes: Sequence[Size]) -> str:
        """The label."""
        return self.label

    def golden(self) -> dict[str, Any]:
        """The label and its confidence."""
        return {"label": self.label, "confidence": self.confidence}

    @classmethod
    def matches(cls, found: Any, expected: Any, threshold: float) -> bool:
        """Whether the labels are equal and the confidences within `CONFIDENCE_TOLERANCE`.

        A golden example may hold the label alone.
        """
        if not isinstance(expected, dict):
            return bool(found["label"] == expected)
        confidence = expected.get("confidence")
        close = confidence is None or (
            abs((found["confidence"] or 0.0) - float(confidence)) <= CONFIDENCE_TOLERANCE
        )
        return bool(found["label"] == expected.get("label") and close)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxesResult(HeadResult):
    """Objects in each image.

    Attributes:
        detections: The objects of each image, by falling confidence.
    """

    detections: tuple[tuple[Detection, ...], ...] = ()

    def image_fields(self, number: int) -> dict[str, Any]:
        """The boxes of one image; an image that the head did not read has none."""
        rows = self._rows(self.detections[number]) if number < len(self.detections) else []
        return {"detections": rows}

    def prompt_fields(self, sizes: Sequence[Size]) -> dict[str, Any]:
        """Every image with its size, which the boxes refer to, and its boxes."""
        images = [
            {"width": width, "height": height, "detections": self._rows(found)}
            for found, (width, height) in zip(self.detections, sizes, strict=False)
        ]
        return {"images": images}

    def text(self, sizes: Sequence[Size]) -> str:
        """One box a line, as Qwen-VL writes them, in a grid of `BOX_GRID` by `BOX_GRID`."""
        lines = []
        for found, (width, height) in zip(self.detections, sizes, strict=False):
            for item in found:
                x0, y0, x1, y1 = (
                    round(BOX_GRID * min(max(value / size, 0.0), 1.0))
                    for value, size in zip(item.box, (width, height, width, height), strict=True)
                )
                lines.append(f"<ref>{item.label}</ref><box>({x0},{y0}),({x1},{y1})</box>")
        return "\n".join(lines)

    def golden(self) -> list[dict[str, Any]]:
        """The boxes of the first image; golden examples of this kind have one image."""
        return self._rows(self.detections[0])

    @classmethod
    def matches(cls, found: Any, expected: Any, threshold: float) -> bool:
        """Whether both hold the same boxes, within the tolerances.

        Boxes whose confidence is within `CONFIDENCE_TOLERANCE` of the threshold may be missing
        from either.
        """
        left = list(found)
        for wanted in expected:
            twin = next((row for row in left if cls._close(row, wanted)), None)
            if twin is not None:
                left.remove(twin)
            elif wanted["confidence"] > threshold + CONFIDENCE_TOLERANCE:
                return False
        return all(row["confidence"] <= threshold + CONFIDENCE_TOLERANCE for row in left)

    @staticmethod
    def _close(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
        pairs = zip(row["box"], wanted["box"], strict=True)
        x0, y0, x1, y1 = wanted["box"]
        most = max(PIXEL_TOLERANCE, EDGE_TOLERANCE * max(x1 - x0, y1 - y0))
        return bool(
            row["label"] == wanted["label"]
            and abs(row["confidence"] - wanted["confidence"]) <= CONFIDENCE_TOLERANCE
            and all(abs(a - b) <= most for a, b in pairs)
        )

    @staticmethod
    def _rows(detections: Sequence[Detection]) -> list[dict[str, Any]]:
        return [
            {"label": item.label, "box": list(item.box), "confidence": item.confidence}
            for item in detections
        ]


def golden_text(text: str) -> dict[str, Any]:
    """A written answer as golden examples hold it."""
    return {"text": text}


def text_matches(found: str, expected: Any) -> bool:
    """Whether a written answer reproduces a golden one; outer white space does not count.

    Args:
        found: The text.
        expected: The answer in the golden example: ``{"text": …}``, or the text alone.
    """
    text = expected.get("text") if isinstance(expected, dict) else expected
    return isinstance(text, str) and found.strip() == text.strip()
