"""Object detection: a head on every visual token (VaLoRA §4.2.2), F1 at IoU 0.5."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import box_iou, generalized_box_iou_loss

from valora_data.contract import boxes as box_code
from valora_data.contract.boxes import DETECTION as KIND
from valora_data.contract.boxes import BoxHead
from valora_data.contract.results import BoxesResult, Detection
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample
from valora_data.tasks import DETECTION
from valora_train.metrics.evaluate import Matches, match
from valora_train.metrics.measures import Scores
from valora_train.metrics.per_class import detection_report
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Encoded, Example, HeadInputs, Rows
from valora_train.settings import HeadSettings
from valora_train.tasks.base import Evaluation, HeadTask, Prediction

# How boxes of new heads vote for their place, see `contract.boxes.vote`. Chosen on the validation
# splits of the six built-in domains from 0.01 to 0.12, where COCO mAP is flat from 0.03 to 0.08.
VOTE_SIGMA = 0.05
REACH = 0.75  # cells along each axis between the centres of a box and a cell it is assigned to
MIN_SCORE = 0.01  # boxes are measured from here on: mAP needs those below the threshold
FITS = 2  # of the Platt scaling, each on the boxes that the one before lets through


class BoxHeadModule(nn.Module):
    """Predicts objectness, box and, of several classes, class for every visual token of a grid."""

    calibration: Tensor  # (2,), Platt scaling of the confidence; see `calibrate`
    threshold: Tensor  # (), confidence from which a box counts, with the best F1 on validation

    def __init__(self, width: int, labels: Sequence[str], grid: tuple[int, int]) -> None:
        super().__init__()
        self.labels, self.grid = tuple(labels), grid
        self.vote_sigma: float | None = VOTE_SIGMA  # see `contract.boxes.vote`
        # Objectness, box (see `contract.boxes`) and class logits.
        self.linear = nn.Linear(width, BoxHead.outputs(self.labels))
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)
        with torch.no_grad():
            self.linear.bias[0] = -math.log(30)  # about one cell in thirty holds an object
        self.register_buffer("calibration", torch.tensor([1.0, 0.0]))
        self.register_buffer("threshold", torch.tensor(0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, tokens, 5 + classes) float32 from (n, tokens, width), states of visual tokens."""
        raw: Tensor = self.linear(hidden.float())
        return raw

    def loss(self, raw: Tensor, targets: DetectionTargets, weights: HeadSettings) -> Tensor:
        """The training loss of a batch, divided by its number of objects.

        The sum of the binary cross entropy of objectness, the generalised-IoU loss of boxes
        (Rezatofighi et al. 2019) and the cross entropy of classes. Objects are weighted by the
        teacher's confidence.
        """
        positive, weight = targets.positive, targets.weight
        objects = weight[positive].sum().clamp_min(1.0)
        found = box_code.decode(raw[..., 1:5], self.grid)[positive]
        assigned, wanted = targets.boxes[positive], positive.float()
        if weights.objectness == "iou":  # instead of 1 where a box is assigned
            wanted[positive] = box_iou(found.detach(), assigned).diagonal()
        objectness = F.binary_cross_entropy_with_logits(
            raw[..., 0], wanted, torch.where(positive, weight, 1.0), reduction="sum"
        )
        overlap = generalized_box_iou_loss(found, assigned)
        total = weights.objectness_weight * objectness
        total = total + weights.box_weight * (overlap * weight[positive]).sum()
        if len(self.labels) > 1:
            classes = targets.classes[positive]
            wrong = F.cross_entropy(raw[..., 5:][positive], classes, reduction="none")
            total = total + weights.class_weight * (wrong * weight[positive]).sum()
        loss: Tensor = total / objects
        return loss

    def predict(
        self, raw: Tensor, size: tuple[int, int], settings: HeadSettings, min_score: float
    ) -> list[Box]:
        """The boxes of an image of some width and height, from its (tokens, 5 + classes)."""
        found = self.stored(settings).detections(raw.float().cpu().numpy(), size, min_score)
        return [Box(*item.box, label=item.label, confidence=item.confidence) for item in found]

    def stored(self, settings: HeadSettings) -> BoxHead:
        """The head in the form that bundles hold, with settings of non-maximum suppression."""
        return BoxHead(
            kind=KIND, labels=self.labels, grid=self.grid, vote_sigma=self.vote_sigma,
            weight=self.linear.weight.detach(), bias=self.linear.bias.detach(),
            calibration=self.calibration.cpu(), threshold=float(self.threshold),
            nms_iou=settings.nms_iou, most=settings.most,
        )  # fmt: skip

    @classmethod
    def of(cls, head: BoxHead) -> BoxHeadModule:
        """The module of a head from a bundle."""
        module = cls(head.weight.shape[1], head.labels, head.grid)
        module.vote_sigma = head.vote_sigma
        module.linear.load_state_dict({"weight": head.weight, "bias": head.bias})
        module.calibration.copy_(head.calibration)
        module.threshold.fill_(head.threshold)
        return module

    def calibrate(self, matches: Matches) -> None:
        """Fit the Platt scaling on validation boxes, found with the current calibration."""
        from sklearn.linear_model import LogisticRegression

        if len(set(matches.hit.tolist())) < 2:
            return  # a fit needs hits and misses
        a, b = self.calibration.tolist()
        score = torch.from_numpy(matches.score).clamp(1e-6, 1 - 1e-6)
        logit = (torch.logit(score) - b) / a
        fit = LogisticRegression(C=1e6).fit(logit[:, None].numpy(), matches.hit)
        slope, offset = float(fit.coef_[0, 0]), float(fit.intercept_[0])
        if slope > 0:  # a negative slope would reverse the order of boxes
            self.calibration.copy_(torch.tensor([slope, offset]))


@dataclass(frozen=True)
class DetectionTargets(Rows):
    """Targets of a box head for each visual token of each image.

    A box is assigned to the cell that holds its centre, and to those cells whose centres are near
    the centre of the box (see `REACH`) and inside the box. A cell with several boxes gets the
    smallest.
    """

    positive: Tensor  # (n, tokens) bool, whether a box is assigned to the token
    weight: Tensor  # (n, tokens) float32, the teacher's confidence in the box
    boxes: Tensor  # (n, tokens, 4) float32, (x0, y0, x1, y1) relative to the image size
    classes: Tensor  # (n, tokens) int64, index of the label

    @classmethod
    def of(
        cls, samples: Sequence[Sample], labels: Sequence[str], grid: tuple[int, int]
    ) -> DetectionTargets:
        """Create the targets of images with boxes in pixels, for a grid of rows and columns."""
        rows, columns = grid
        shape = torch.tensor([columns, rows], dtype=torch.float32)
        centres = torch.from_numpy(box_code.cell_centres(grid))
        parts = []
        for sample in samples:
            width, height = sample.image.size
            boxes = sorted(sample.answer.boxes, key=lambda box: -box.area)
            # Row 0 stands for no box, so that it owns the cells that no box does.
            edges = torch.tensor([(0.0, 0.0, 0.0, 0.0)] + [
                (box.x0 / width, box.y0 / height, box.x1 / width, box.y1 / height) for box in boxes
            ])  # fmt: skip
            weights = torch.tensor([0.0] + [box.confidence for box in boxes])
            classes = torch.tensor([0] + [labels.index(box.label) for box in boxes])
            low, high = edges[:, None, :2], edges[:, None, 2:]
            middle = (low + high) / 2
            near = ((centres - middle) * shape).abs().amax(-1) <= REACH
            mine = near & (centres > low).all(-1) & (centres < high).all(-1)  # (1 + boxes, tokens)
            column, row = (middle[:, 0] * shape).long().unbind(-1)
            cell = row.clamp_max(rows - 1) * columns + column.clamp_max(columns - 1)
            order = torch.arange(len(edges))
            mine[order, cell] = True
            owner = (mine * order[:, None]).amax(0)  # the smallest box comes last
            parts.append((owner > 0, weights[owner], edges[owner], classes[owner]))
        return cls(*map(torch.stack, zip(*parts, strict=True)))


class DetectionTask(HeadTask):
    """Finds the objects of a domain; its head starts from the base model's generic one."""

    spec = DETECTION
    result, module, head_type = BoxesResult, BoxHeadModule, BoxHead
    whole_prompt: ClassVar[bool] = False
    geometric = True

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """Refused: F1 depends on a threshold, see `metrics.evaluate`."""
        raise NotImplementedError("detections are measured by valora_train.metrics.evaluate.match")

    def prompt(self, sample: Sample) -> Example:
        return Example(self.domain.question(sample), (sample.image,))

    def mirrored(self, sample: Sample) -> Sample:
        width = sample.image.width
        boxes = tuple(replace(b, x0=width - b.x1, x1=width - b.x0) for b in sample.answer.boxes)
        return replace(super().mirrored(sample), answer=Answer(boxes))

    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> DetectionTargets:
        """The targets of each visual token; all images must have the same grid of them."""
        grids = sorted({item.grid for item in encoded})
        if len(grids) > 1:
            raise DataError(
                f"images of domain {self.domain.name} give grids of {grids[0]} and {grids[-1]} "
                "visual tokens, but a box head reads one grid: bring the images to one size"
            )
        return DetectionTargets.of(samples, self.domain.labels, grids[0])

    def new_head(self, lmm: Lmm, first: Encoded, seed: int) -> BoxHeadModule:
        """A head with initial weights, or those of the base model's generic head."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = BoxHeadModule(lmm.width, self.domain.labels, first.grid).to(lmm.device)
        if self.first_head is not None:
            with torch.no_grad():
                head.linear.weight[:5].copy_(self.first_head[:, :-1])
                head.linear.bias[:5].copy_(self.first_head[:, -1])
        return head

    def head_outputs(self, head: BoxHeadModule, inputs: HeadInputs) -> Tensor:
        """(n, tokens, 5 + classes) float32, from the hidden states of the visual tokens."""
        raw: Tensor = head(inputs.visual)
        return raw

    def calibrate(self, head: BoxHeadModule, raw: Tensor, samples: Sequence[Sample]) -> None:
        """Fit the Platt scaling of the confidence, then the threshold with the best F1."""
        head.calibration.copy_(torch.tensor([1.0, 0.0]))
        # The boxes from `MIN_SCORE` on are fitted; which ones these are depends on the fit before.
        for _ in range(FITS):
            head.calibrate(self._match(self.predictions(head, raw, samples), samples))
        matches = self._match(self.predictions(head, raw, samples), samples)
        head.threshold.fill_(matches.best_threshold())

    def predictions(
        self, head: BoxHeadModule, raw: Tensor, samples: Sequence[Sample]
    ) -> list[Prediction]:
        found = (
            head.predict(row, sample.image.size, self.settings, MIN_SCORE)
            for row, sample in zip(raw, samples, strict=True)
        )
        return [Prediction(Answer(tuple(boxes))) for boxes in found]

    def _match(self, predictions: Sequence[Prediction], samples: Sequence[Sample]) -> Matches:
        found = [one.answer.boxes for one in predictions]
        return match(found, [sample.answer.boxes for sample in samples], self.domain.labels)

    def evaluate(
        self, head: BoxHeadModule, predictions: list[Prediction], samples: Sequence[Sample]
    ) -> Evaluation:
        matches, threshold = self._match(predictions, samples), float(head.threshold)
        classes = detection_report(
            [one.answer.boxes for one in predictions],
            [sample.answer.boxes for sample in samples],
            self.domain.labels, threshold, matches.ap,
        )  # fmt: skip
        details = {"map": matches.map, "ece": matches.calibration_error()}
        accuracy, interval = matches.f1(threshold), matches.f1_interval(threshold)
        return Evaluation(accuracy, interval, predictions, details, threshold, classes)

    def golden(self, prediction: Prediction, threshold: float | None) -> Any:
        found = tuple(
            Detection(box.label, box.confidence, box.xyxy)
            for box in prediction.answer.boxes
            if box.confidence >= (threshold or 0.0)
        )
        return BoxesResult(kind=KIND, detections=(found,)).golden()

    def metadata(self, head: BoxHeadModule) -> dict[str, Any]:
        return {"threshold": float(head.threshold)}
