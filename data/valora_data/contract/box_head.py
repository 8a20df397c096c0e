"""Heads that find objects (VaLoRA §4.2.2); `boxes` has the arithmetic."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from valora_data.contract.boxes import read_detections
from valora_data.contract.files import expect, parse_json
from valora_data.contract.head import Head, check_shapes, parse_labels
from valora_data.contract.results import BoxesResult, Detection, Size
from valora_data.wording import plural

DETECTION = "detection"  # the kind of head that finds objects
MAX_BOXES = 10_000  # of an image, that a box head may be set to return


@dataclass(frozen=True, eq=False, kw_only=True)
class BoxHead(Head):
    """Finds objects: every visual token says objectness, box and class (see `contract.boxes`)."""

    finds_boxes: ClassVar[bool] = True
    grid: tuple[int, int]  # rows and columns of visual tokens of an image
    calibration: Tensor  # (2,) float32 on the CPU, Platt scaling of the confidence
    threshold: float  # confidence from which a box counts
    nms_iou: float  # overlap above which the less confident of two boxes of a class is dropped
    most: int  # maximum number of boxes of an image
    vote_sigma: float | None = None  # see `boxes.vote`; None in heads of earlier versions

    @classmethod
    def parse(
        cls, kind: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], width: int
    ) -> Self:
        """Build the head from the contents of its file."""
        labels, weight = parse_labels(metadata), tensors["weight"]
        grid, outputs = parse_json(metadata["grid"]), cls.outputs(labels)
        sides = [type(side) for side in grid]
        expect(sides == [int, int] and min(grid) > 0, "grid", "rows and columns", grid)
        check_shapes(tensors, weight=(outputs, width), bias=(outputs,), calibration=(2,))
        nms_iou, most = float(metadata["nms_iou"]), int(metadata["most"])
        sigma = float(metadata["vote_sigma"]) if "vote_sigma" in metadata else None
        expect(0 <= nms_iou <= 1, "nms_iou", "0 to 1", nms_iou)
        expect(1 <= most <= MAX_BOXES, "most", f"1 to {MAX_BOXES}", most)
        expect(sigma is None or 0 < sigma <= 1, "vote_sigma", "above 0, up to 1", sigma)
        return cls(
            kind=kind, labels=labels, weight=weight.contiguous(), bias=tensors["bias"],
            grid=tuple(grid), calibration=tensors["calibration"],
            threshold=tensors["threshold"].item(), nms_iou=nms_iou, most=most, vote_sigma=sigma,
        )  # fmt: skip

    @staticmethod
    def outputs(labels: Sequence[str]) -> int:
        """Outputs for each visual token; a single class needs no class logits."""
        return 5 + (len(labels) if len(labels) > 1 else 0)

    def metadata(self) -> dict[str, str]:
        """Labels, grid and settings of non-maximum suppression and votes."""
        lists = {name: json.dumps(getattr(self, name)) for name in ("labels", "grid")}
        votes = {} if self.vote_sigma is None else {"vote_sigma": str(self.vote_sigma)}
        return {**lists, "nms_iou": str(self.nms_iou), "most": str(self.most), **votes}

    def tensors(self) -> dict[str, Tensor]:
        """The linear layer, the calibration and the threshold."""
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
                f"a {self.kind} head of {rows} × {columns} cells cannot read {visual} visual "
                f"tokens of {plural(images, 'image')}: send images as the bundle's card says"
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
        least = self.threshold if min_score is None else min_score
        found = [self.detections(raw, size, least) for raw, size in zip(images, sizes, strict=True)]
        return BoxesResult(kind=self.kind, detections=tuple(found), logits=logits.numpy().copy())

    def detections(self, raw: Tensor, size: Size, min_score: float) -> tuple[Detection, ...]:
        """The objects in one image, by falling confidence; `raw` as in `boxes.read_detections`."""
        boxes, scores, classes = read_detections(
            raw, self.grid, self.calibration.to(raw.device), nms_iou=self.nms_iou,
            min_score=min_score, most=self.most, vote_sigma=self.vote_sigma,
        )  # fmt: skip
        width, height = size
        rows = zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True)
        return tuple(
            Detection(self.labels[index], score, (x0 * width, y0 * height, x1 * width, y1 * height))
            for (x0, y0, x1, y1), score, index in rows
        )
