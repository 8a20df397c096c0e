"""Answers of vision task heads, and how they are compared with golden ones, without torch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Size = tuple[int, int]  # width and height of an image in pixels, as it was sent
PIXEL_TOLERANCE = 0.5  # pixels by which an edge of a golden box may differ when computed again
EDGE_TOLERANCE = 0.01  # the same as a share of the box's longer side, where that is more
CONFIDENCE_TOLERANCE = 0.01  # of a golden confidence
# By which all three grow where the base model computes in 16 bits: other sizes of batches moved
# edges by up to 2.1 % of the longer side (139 M parameters, bfloat16).
ROUNDED = 3.0
BOX_GRID = 1000  # boxes in text have coordinates from 0 to this, as Qwen-VL writes them


@dataclass(frozen=True)
class Detection:
    """An object, with its calibrated confidence and (x0, y0, x1, y1) in pixels as it was sent."""

    label: str
    confidence: float
    box: tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class HeadResult(ABC):
    """The answer of a head to one prompt. Every form of answer is a subclass."""

    kind: str  # of the head, a name in `HEAD_KINDS`
    logits: NDArray[np.float32] | None = None  # (rows, outputs), the raw outputs of the head

    @abstractmethod
    def image_fields(self, number: int) -> dict[str, Any]:
        """The answer to the image of this index, as fields of a JSON object."""

    def prompt_fields(self, sizes: Sequence[Size]) -> dict[str, Any]:
        """The answer to the whole prompt with images of these sizes, as fields of a JSON object."""
        return self.image_fields(0)

    @abstractmethod
    def text(self, sizes: Sequence[Size]) -> str:
        """The answer in words, for clients that read only the text of a message."""

    @abstractmethod
    def golden(self) -> Any:
        """The answer as golden examples hold it, in JSON types."""

    @classmethod
    def matches(cls, found: Any, expected: Any, threshold: float) -> bool:
        """Whether an answer reproduces a golden one; `threshold` is that of confidences, or 0."""
        return bool(found == expected)


@dataclass(frozen=True, kw_only=True)
class LabelResult(HeadResult):
    """One label out of a closed set, the most probable one, with the probability of each."""

    label: str
    confidences: dict[str, float] = field(default_factory=dict)

    def image_fields(self, number: int) -> dict[str, Any]:
        return {**self.golden(), "confidences": dict(self.confidences)}

    def text(self, sizes: Sequence[Size]) -> str:
        return self.label

    def golden(self) -> dict[str, Any]:
        return {"label": self.label, "confidence": self.confidences.get(self.label)}

    @classmethod
    def matches(cls, found: Any, expected: Any, threshold: float) -> bool:
        wanted = expected if isinstance(expected, dict) else {"label": expected}
        close = wanted.get("confidence") is None or _close(found, wanted)
        return bool(found["label"] == wanted.get("label") and close)


@dataclass(frozen=True, kw_only=True)
class BoxesResult(HeadResult):
    """The objects of each image, by falling confidence."""

    detections: tuple[tuple[Detection, ...], ...] = ()

    def image_fields(self, number: int) -> dict[str, Any]:
        found = self.detections[number] if number < len(self.detections) else ()
        keys = ("label", "box", "confidence")
        rows = [dict(zip(keys, (d.label, [*d.box], d.confidence), strict=True)) for d in found]
        return {"detections": rows}

    def prompt_fields(self, sizes: Sequence[Size]) -> dict[str, Any]:
        images = [
            {"width": width, "height": height, **self.image_fields(number)}
            for number, (width, height) in enumerate(sizes[: len(self.detections)])
        ]
        return {"images": images}

    def text(self, sizes: Sequence[Size]) -> str:
        lines = []
        for found, size in zip(self.detections, sizes, strict=False):
            for item in found:
                x0, y0, x1, y1 = (
                    round(BOX_GRID * min(max(value / side, 0.0), 1.0))
                    for value, side in zip(item.box, (*size, *size), strict=True)
                )
                lines.append(f"<ref>{item.label}</ref><box>({x0},{y0}),({x1},{y1})</box>")
        return "\n".join(lines)

    def golden(self) -> Any:
        return self.image_fields(0)["detections"]

    @classmethod
    def matches(cls, found: Any, expected: Any, threshold: float) -> bool:
        """Whether both hold the same boxes; those near the threshold may be missing from either."""
        left, sure = list(found), threshold + _slack.get() * CONFIDENCE_TOLERANCE
        for wanted in expected:
            twin = next((row for row in left if _same_box(row, wanted)), None)
            if twin is not None:
                left.remove(twin)
            elif wanted["confidence"] > sure:
                return False
        return all(row["confidence"] <= sure for row in left)


_slack: ContextVar[float] = ContextVar("slack", default=1.0)


@contextmanager
def computed_in(dtype: str) -> Iterator[None]:
    """Compare answers of a base model of this type, which may differ by what it rounds."""
    before = _slack.set(1.0 if dtype == "float32" else ROUNDED)
    try:
        yield
    finally:
        _slack.reset(before)


def _same_box(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    x0, y0, x1, y1 = wanted["box"]
    limit = _slack.get() * max(PIXEL_TOLERANCE, EDGE_TOLERANCE * max(x1 - x0, y1 - y0))
    near = all(abs(a - b) <= limit for a, b in zip(row["box"], wanted["box"], strict=True))
    return bool(row["label"] == wanted["label"] and near and _close(row, wanted))


def _close(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    difference = float(found["confidence"] or 0.0) - float(expected["confidence"])
    return abs(difference) <= _slack.get() * CONFIDENCE_TOLERANCE


def text_matches(found: str, expected: Any) -> bool:
    """Whether a text reproduces a golden one, ``{"text": …}`` or the text, but for white space."""
    text = expected.get("text") if isinstance(expected, dict) else expected
    return isinstance(text, str) and found.strip() == text.strip()
