"""Heads that find objects (VaLoRA §4.2.2); `boxes` has the arithmetic."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from valora_data.contract.files import parse_json, shown
from valora_data.contract.head import Head, parse_labels
from valora_data.contract.results import BoxesResult, Detection
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from valora_data.contract.results import Size

DETECTION = "detection"
"""The kind of head that finds objects."""
MOST_BOXES = 10_000
"""Most boxes of an image that a box head may be set to return."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BoxHead(Head):
    """Finds objects: every visual token says objectness, box and class (see `contract.boxes`).

    Attributes:
        grid: Rows and columns of visual tokens of an image.
        calibration: (2,) float32 on the CPU, Platt scaling of the confidence.
        threshold: Confidence from which a box counts.
        nms_iou: Overlap above which the less confident of two boxes of a class is dropped.
        most: Maximum number of boxes of an image.
        vote_sigma: Where boxes vote for their place, see `boxes.vote`; None: they do not, as in
            heads of earlier versions.
    """

    finds_boxes: ClassVar[bool] = True
    grid: tuple[int, int]
    calibration: Tensor
    threshold: float
    nms_iou: float
    most: int
    vote_sigma: float | None = None

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
            vote_sigma=float(metadata["vote_sigma"]) if "vote_sigma" in metadata else None,
        )
        if not 0 <= head.nms_iou <= 1 or not 1 <= head.most <= MOST_BOXES:
            raise ValueError(
                f"expected nms_iou from 0 to 1 and most from 1 to {MOST_BOXES}, got "
                f"{shown(metadata['nms_iou'])} and {shown(metadata['most'])}"
            )
        if head.vote_sigma is not None and not 0 < head.vote_sigma <= 1:
            raise ValueError(
                f"expected vote_sigma above 0 and up to 1, got {shown(metadata['vote_sigma'])}"
            )
        head.check({"weight": (head.weight, (outputs, width)), "bias": (head.bias, (outputs,))})
        return head

    @staticmethod
    def outputs(labels: Sequence[str]) -> int:
        """Outputs for each visual token; a single class needs no class logits."""
        return 5 + (len(labels) if len(labels) > 1 else 0)

    def metadata(self) -> dict[str, str]:
        """Labels, grid and settings of non-maximum suppression and votes."""
        found = {
            "labels": json.dumps(self.labels),
            "grid": json.dumps(self.grid),
            "nms_iou": str(self.nms_iou),
            "most": str(self.most),
        }
        if self.vote_sigma is not None:
            found["vote_sigma"] = str(self.vote_sigma)
        return found

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

    def detections(self, raw: Tensor, size: Size, min_score: float) -> tuple[Detection, ...]:
        """The objects in one image, by falling confidence.

        Args:
            raw: (tokens, 5 + classes), see `boxes.read_detections`.
            size: Width and height of the image in pixels.
            min_score: Calibrated confidence below which boxes are dropped.
        """
        from valora_data.contract.boxes import read_detections

        boxes, scores, classes = read_detections(
            raw,
            self.grid,
            self.calibration.to(raw.device),
            nms_iou=self.nms_iou,
            min_score=min_score,
            most=self.most,
            vote_sigma=self.vote_sigma,
        )
        width, height = size
        return tuple(
            Detection(self.labels[index], score, (x0 * width, y0 * height, x1 * width, y1 * height))
            for (x0, y0, x1, y1), score, index in zip(
                boxes.tolist(), scores.tolist(), classes.tolist(), strict=True
            )
        )

    def interpret(
        self, logits: Tensor, sizes: Sequence[Size], min_score: float | None = None
    ) -> BoxesResult:
        """The objects in each image."""
        images = logits.view(len(sizes), self.grid[0] * self.grid[1], -1)
        least = self.threshold if min_score is None else min_score
        found = tuple(
            self.detections(raw, size, least) for raw, size in zip(images, sizes, strict=True)
        )
        return BoxesResult(kind=self.kind, detections=found, logits=logits.numpy().copy())
