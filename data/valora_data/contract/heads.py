"""Vision task heads (VaLoRA §4.2.2): their kinds, arithmetic, file format and answers.

Training writes heads with this module and the server reads and runs them with it. docs/bundle.md
describes the files. torch is imported where tensors are computed, so that code which only handles
answers does not load it.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from valora_data.contract.files import UnreadableError, parse_json, read_safetensors, shown
from valora_data.errors import BundleError
from valora_data.registry import Registry
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    Size = tuple[int, int]
    """Width and height of an image in pixels."""

DETECTION = "detection"
"""The kind of head that finds objects."""
PIXEL_TOLERANCE = 0.5
"""Pixels by which an edge of a golden box may differ when it is computed again."""
CONFIDENCE_TOLERANCE = 0.01
"""Difference that is allowed between a golden confidence and the one computed again."""
BOX_GRID = 1000
"""Boxes in text have coordinates from 0 to this number, as Qwen-VL writes them."""
FILE_BYTES = 1 << 30
"""Most bytes of a head's file."""
LARGEST = 1e6
"""Largest value in a head's file, in absolute terms. Trained ones lie below 1e3; up to here every
logit and confidence stays finite in float32."""
SMALLEST_TEMPERATURE = 1e-6
"""Smallest temperature of a label head, for the same reason."""
MOST_BOXES = 10_000
"""Most boxes of an image that a box head may be set to return."""


# Answers


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
        """Whether both hold the same boxes, within the two tolerances.

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
        return bool(
            row["label"] == wanted["label"]
            and abs(row["confidence"] - wanted["confidence"]) <= CONFIDENCE_TOLERANCE
            and all(abs(a - b) <= PIXEL_TOLERANCE for a, b in pairs)
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


# Heads


class Pooling(StrEnum):
    """Which hidden states the linear layer of a label head acts on."""

    LAST = "last"
    VISUAL_MEAN = "visual_mean"
    ATTENTION = "attention"
    GRID = "grid"


def pooled_width(pooling: str, width: int) -> int:
    """Number of inputs of a linear layer behind a pooling.

    Args:
        pooling: One of `Pooling`.
        width: Size of the hidden states.
    """
    from valora_data.contract.grid_pooling import PLACES

    return width * (PLACES if pooling == Pooling.GRID else 1)


def pool(
    pooling: str,
    last: Tensor,
    visual: Tensor,
    real: Tensor,
    places: Tensor | None,
    query: Tensor | None,
) -> Tensor:
    """Pool the hidden states of n prompts, in float32.

    Args:
        pooling: One of `Pooling`; the arguments that it does not need are not read.
        last: (n, width), hidden state of the last token of each prompt.
        visual: (n, tokens, width), hidden states of the visual tokens, padded.
        real: (n, tokens) bool, False for padding.
        places: (n, tokens) int64, see `grid_pooling.places_of`.
        query: (width,) float32, the learnt weighting of `Pooling.ATTENTION`.

    Returns:
        (n, `pooled_width`) float32.
    """
    from valora_data.contract.grid_pooling import pool_places

    if pooling == Pooling.LAST:
        return last.float()
    seen = visual.float()
    if pooling == Pooling.GRID:
        assert places is not None, "grid pooling needs the places of the visual tokens"
        return pool_places(seen, places, real)
    if pooling == Pooling.VISUAL_MEAN:
        return (seen * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    assert query is not None, "attention pooling needs a query"
    scores = seen @ query / math.sqrt(seen.shape[-1])
    weights = scores.masked_fill(~real, -math.inf).softmax(-1)
    return (weights[:, None] @ seen)[:, 0]


def confidences(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """Calibrated probabilities of labels.

    Args:
        logits: (..., labels) float32.
        temperature: Logits are divided by it before the softmax (Guo et al. 2017).

    Returns:
        (..., labels) float32.
    """
    return (logits / temperature).softmax(-1)


def detections(
    raw: Tensor,
    size: Size,
    labels: Sequence[str],
    grid: tuple[int, int],
    calibration: Tensor,
    *,
    nms_iou: float,
    min_score: float,
    most: int,
) -> tuple[Detection, ...]:
    """Objects in one image, from the raw outputs of a box head.

    Args:
        raw: (tokens, 5 + classes), see `boxes.read_detections`.
        size: Width and height of the image in pixels.
        labels: Labels in the order of the class indices.
        grid: Rows and columns of visual tokens.
        calibration: (2,) float32, Platt scaling of the confidence.
        nms_iou: Overlap above which the less confident of two boxes of a class is dropped.
        min_score: Calibrated confidence below which boxes are dropped.
        most: Maximum number of boxes.

    Returns:
        The objects, by falling confidence.
    """
    from valora_data.contract.boxes import read_detections

    boxes, scores, classes = read_detections(
        raw, grid, calibration, nms_iou=nms_iou, min_score=min_score, most=most
    )
    width, height = size
    return tuple(
        Detection(labels[index], score, (x0 * width, y0 * height, x1 * width, y1 * height))
        for (x0, y0, x1, y1), score, index in zip(
            boxes.tolist(), scores.tolist(), classes.tolist(), strict=True
        )
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Head(ABC):
    """A trained head: a linear layer on last hidden states. Every kind of head is a subclass.

    A kind is registered by its name in `HEAD_KINDS`. One class may stand for several kinds.

    Attributes:
        kind: Name of the kind.
        labels: Label set in the order of the outputs; empty where answers are no labels.
        weight: (outputs, inputs) float32.
        bias: (outputs,) float32.
        finds_boxes: Whether the results are boxes, which `min_score` can filter.
    """

    finds_boxes: ClassVar[bool] = False
    kind: str
    labels: tuple[str, ...] = ()
    weight: Tensor
    bias: Tensor

    @property
    def reads_visual(self) -> bool:
        """Whether it reads the hidden states of the visual tokens, not only the last token's."""
        return True

    @property
    def last_tokens(self) -> int:
        """Number of tokens at the end of the prompt that it reads, unless it reads visual ones."""
        return 1

    @property
    def reads_places(self) -> bool:
        """Whether it needs to know where in its image each visual token lies."""
        return False

    # --- file format

    @classmethod
    @abstractmethod
    def parse(
        cls, kind: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], width: int
    ) -> Self:
        """Build the head from the contents of its file.

        Args:
            kind: Kind of the head.
            metadata: Metadata of the file.
            tensors: Tensors of the file, float32 on the CPU.
            width: Size of the base model's hidden states.

        Raises:
            KeyError: A tensor or an entry of the metadata is missing.
            ValueError: Something does not fit; the message says what was expected.
        """

    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """Metadata of the file, without `kind`."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the file."""
        return {"weight": self.weight, "bias": self.bias}

    def check(self, shapes: Mapping[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
        """Compare the shapes of tensors with what they must be.

        Args:
            shapes: Each tensor and its expected shape, by name; None is not compared.

        Raises:
            ValueError: A shape is another one.
        """
        for name, (tensor, shape) in shapes.items():
            if tensor is not None and tuple(tensor.shape) != shape:
                got = tuple(tensor.shape)
                raise ValueError(f"tensor {name}: expected shape {shape}, got {got}")

    # --- serving

    def configured(self, promise: Mapping[str, Any]) -> Self:
        """The head with what the bundle's manifest says of its domain.

        Args:
            promise: The domain's entry in the manifest.
        """
        return self

    def to(self, device: torch.device | str) -> Self:
        """The head with its weights on a device."""
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    def misfit(self, visual: int, images: int) -> str | None:
        """Why the head cannot read a prompt, in one sentence; None if it can.

        Args:
            visual: Number of visual tokens in the prompt.
            images: Number of images in it.
        """
        if self.reads_visual and not visual:
            return f"a {self.kind} head reads visual tokens: send an image"
        return None

    @abstractmethod
    def inputs(self, last: Tensor, visual: Tensor, places: Tensor | None) -> Tensor:
        """What the linear layer acts on, for one prompt.

        Args:
            last: (1, width), hidden state of the last token that was kept.
            visual: (tokens, width), hidden states of the visual tokens; none unless
                `reads_visual`.
            places: (tokens,) int64, see `grid_pooling.places_of`; None unless `reads_places`.

        Returns:
            (rows, inputs) float32.
        """

    @abstractmethod
    def interpret(
        self, logits: Tensor, sizes: Sequence[Size], min_score: float | None = None
    ) -> HeadResult:
        """The answer that raw outputs stand for.

        Args:
            logits: (rows, outputs) float32 on the CPU: weight · inputs + bias.
            sizes: Width and height in pixels of each image.
            min_score: Confidence below which answers are dropped; the head's own threshold if
                None. Heads without a threshold ignore it.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelHead(Head):
    """Chooses one label for a whole prompt.

    Attributes:
        pooling: Which hidden states it reads.
        query: (width,) float32, the weighting of `Pooling.ATTENTION`; None otherwise.
        temperature: Logits are divided by it before the softmax.
    """

    pooling: Pooling
    query: Tensor | None = None
    temperature: float = 1.0

    @property
    def reads_visual(self) -> bool:
        """Whether it reads the hidden states of the visual tokens, not only the last token's."""
        return self.pooling is not Pooling.LAST

    @property
    def reads_places(self) -> bool:
        """Whether it needs to know where in its image each visual token lies."""
        return self.pooling is Pooling.GRID

    @classmethod
    def parse(
        cls, kind: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], width: int
    ) -> Self:
        """Build the head from the contents of its file."""
        labels = parse_labels(metadata)
        outputs = tensors["weight"].shape[0]
        if outputs != len(labels) or len(labels) < 2:
            raise ValueError(
                f"tensor weight: expected an output for each of at least 2 labels, got "
                f"{plural(outputs, 'output')}, {plural(len(labels), 'label')}"
            )
        temperature = 1.0
        if "temperature" in tensors:
            temperature = float(tensors["temperature"].reshape(1)[0])
            if temperature < SMALLEST_TEMPERATURE:
                raise ValueError(
                    f"temperature: expected at least {SMALLEST_TEMPERATURE}, got {temperature}"
                )
        pooling = Pooling(metadata["pooling"])
        head = cls(
            kind=kind,
            labels=labels,
            weight=tensors["weight"].contiguous(),
            bias=tensors["bias"],
            pooling=pooling,
            query=tensors["query"] if pooling is Pooling.ATTENTION else None,
            temperature=temperature,
        )
        head.check(
            {
                "weight": (head.weight, (outputs, pooled_width(pooling, width))),
                "bias": (head.bias, (outputs,)),
                "query": (head.query, (width,)),
            }
        )
        return head

    @property
    def width(self) -> int:
        """Size of the hidden states that it reads."""
        return self.weight.shape[1] // pooled_width(self.pooling, 1)

    def metadata(self) -> dict[str, str]:
        """Labels and pooling."""
        return {"labels": json.dumps(self.labels), "pooling": str(self.pooling)}

    def tensors(self) -> dict[str, Tensor]:
        """The linear layer, the temperature and, if there is one, the query."""
        import torch

        tensors = {**super().tensors(), "temperature": torch.tensor([self.temperature])}
        return tensors if self.query is None else {**tensors, "query": self.query}

    def to(self, device: torch.device | str) -> Self:
        """The head with its weights on a device."""
        query = None if self.query is None else self.query.to(device)
        return replace(super().to(device), query=query)

    def inputs(self, last: Tensor, visual: Tensor, places: Tensor | None) -> Tensor:
        """(1, inputs) float32, the pooled hidden states."""
        import torch

        real = torch.ones(1, len(visual), dtype=torch.bool, device=visual.device)
        where = None if places is None else places[None]
        return pool(self.pooling, last, visual[None], real, where, self.query)

    def interpret(
        self, logits: Tensor, sizes: Sequence[Size], min_score: float | None = None
    ) -> LabelResult:
        """The most probable label and the probability of each."""
        shares = confidences(logits[0], self.temperature).tolist()
        best = max(range(len(shares)), key=shares.__getitem__)
        return LabelResult(
            kind=self.kind,
            label=self.labels[best],
            confidences=dict(zip(self.labels, shares, strict=True)),
            logits=logits.numpy().copy(),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class BoxHead(Head):
    """Finds objects: every visual token says objectness, box and class (see `contract.boxes`).

    Attributes:
        grid: Rows and columns of visual tokens of an image.
        calibration: (2,) float32 on the CPU, Platt scaling of the confidence.
        threshold: Confidence from which a box counts.
        nms_iou: Overlap above which the less confident of two boxes of a class is dropped.
        most: Maximum number of boxes of an image.
    """

    finds_boxes: ClassVar[bool] = True
    grid: tuple[int, int]
    calibration: Tensor
    threshold: float
    nms_iou: float
    most: int

    @classmethod
    def parse(
        cls, kind: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], width: int
    ) -> Self:
        """Build the head from the contents of its file."""
        labels = parse_labels(metadata)
        grid = parse_json(metadata["grid"])
        if not isinstance(grid, list) or [type(side) for side in grid] != [int, int]:
            raise ValueError(f"grid: expected rows and columns, got {shown(grid)}")
        rows, columns = grid
        outputs, expected = tensors["weight"].shape[0], cls.outputs(labels)
        if outputs != expected:
            raise ValueError(
                f"tensor weight: expected {expected} outputs for {plural(len(labels), 'label')}, "
                f"got {outputs}"
            )
        if tuple(tensors["calibration"].shape) != (2,) or min(rows, columns) < 1:
            raise ValueError("expected a calibration of 2 numbers and a grid of rows and columns")
        head = cls(
            kind=kind,
            labels=labels,
            weight=tensors["weight"].contiguous(),
            bias=tensors["bias"],
            grid=(rows, columns),
            calibration=tensors["calibration"],
            threshold=float(tensors["threshold"].reshape(1)[0]),
            nms_iou=float(metadata["nms_iou"]),
            most=int(metadata["most"]),
        )
        if not 0 <= head.nms_iou <= 1 or not 1 <= head.most <= MOST_BOXES:
            raise ValueError(
                f"expected nms_iou from 0 to 1 and most from 1 to {MOST_BOXES}, got "
                f"{shown(metadata['nms_iou'])} and {shown(metadata['most'])}"
            )
        head.check({"weight": (head.weight, (outputs, width)), "bias": (head.bias, (outputs,))})
        return head

    @staticmethod
    def outputs(labels: Sequence[str]) -> int:
        """Outputs for each visual token; a single class needs no class logits."""
        return 5 + (len(labels) if len(labels) > 1 else 0)

    def metadata(self) -> dict[str, str]:
        """Labels, grid and settings of non-maximum suppression."""
        return {
            "labels": json.dumps(self.labels),
            "grid": json.dumps(self.grid),
            "nms_iou": str(self.nms_iou),
            "most": str(self.most),
        }

    def tensors(self) -> dict[str, Tensor]:
        """The linear layer, the calibration and the threshold."""
        import torch

        threshold = torch.tensor([self.threshold])
        return {**super().tensors(), "calibration": self.calibration, "threshold": threshold}

    def configured(self, promise: Mapping[str, Any]) -> Self:
        """The head with the domain's threshold in the manifest, if there is one."""
        if promise.get("threshold") is None:
            return self
        return replace(self, threshold=float(promise["threshold"]))

    def misfit(self, visual: int, images: int) -> str | None:
        """Why the head cannot read a prompt, in one sentence; None if it can."""
        rows, columns = self.grid
        if visual and visual != images * rows * columns:
            return (
                f"a {self.kind} head of {rows} × {columns} cells cannot read "
                f"{plural(images, 'image')} of {visual} visual tokens in all: send images as "
                "the bundle's card says"
            )
        return super().misfit(visual, images)

    def inputs(self, last: Tensor, visual: Tensor, places: Tensor | None) -> Tensor:
        """(tokens, width) float32, the hidden states of the visual tokens."""
        return visual.float()

    def interpret(
        self, logits: Tensor, sizes: Sequence[Size], min_score: float | None = None
    ) -> BoxesResult:
        """The objects in each image."""
        images = logits.view(len(sizes), self.grid[0] * self.grid[1], -1)
        found = tuple(
            detections(
                raw,
                size,
                self.labels,
                self.grid,
                self.calibration,
                nms_iou=self.nms_iou,
                min_score=self.threshold if min_score is None else min_score,
                most=self.most,
            )
            for raw, size in zip(images, sizes, strict=True)
        )
        return BoxesResult(kind=self.kind, detections=found, logits=logits.numpy().copy())


HEAD_KINDS: Registry[type[Head]] = Registry(
    "valora.head_kinds",
    "kind of head",
    {
        DETECTION: "valora_data.contract.heads:BoxHead",
        "classification": "valora_data.contract.heads:LabelHead",
        "counting": "valora_data.contract.heads:LabelHead",
        "yes_no": "valora_data.contract.heads:LabelHead",
        "action": "valora_data.contract.heads:LabelHead",
    },
    BundleError,
)


# Files


def write_head(file: Path, head: Head) -> None:
    """Write a head as safetensors; its metadata says what a server must know."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.tensors().items()}
    save_file(tensors, file, {"kind": head.kind, **head.metadata()})


def read_head(file: Path, width: int) -> Head:
    """Read a head.

    Args:
        file: A safetensors file that `write_head` wrote.
        width: Size of the base model's hidden states.

    Returns:
        The head, float32 on the CPU.

    Raises:
        BundleError: The file is damaged, its kind is unknown, or it is for another width.
    """
    import torch

    try:
        metadata, stored = read_safetensors(file, FILE_BYTES)
    except UnreadableError as error:
        raise BundleError(
            f"head {file} is damaged, as it {error.reason}: copy or export the bundle again"
        ) from error
    for name, tensor in stored.items():
        if tensor.is_complex():
            raise BundleError(f"head {file}: tensor {name} is complex; export the bundle again")
    tensors = {name: tensor.to(torch.float32) for name, tensor in stored.items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BundleError(f"head {file}: tensor {name} holds NaN or Inf; train it again")
        if tensor.numel() and (largest := float(tensor.abs().max())) > LARGEST:
            raise BundleError(
                f"head {file}: tensor {name} reaches {largest:.3g}, more than the {LARGEST:g} up "
                "to which answers stay finite; train it again"
            )
    try:
        kind = metadata["kind"][:100]
        return HEAD_KINDS[kind].parse(kind, metadata, tensors, width)
    except BundleError as error:
        raise BundleError(f"head {file} does not fit: {error}") from error
    except KeyError as error:
        raise BundleError(f"head {file} lacks {error}: export the bundle again") from error
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise BundleError(
            f"head {file} does not fit: {str(error)[:300]}; export the bundle again"
        ) from error


def parse_labels(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The label set in a head's metadata.

    Raises:
        KeyError: There is none.
        ValueError: It is empty or holds a label twice.
        TypeError: It is no list of strings.
    """
    labels = parse_json(metadata["labels"])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"labels: expected a list of names, got {shown(labels)}")
    if len(set(labels)) != len(labels) or not labels:
        raise ValueError(f"labels: expected different names, got {shown(labels)}")
    return tuple(labels)
