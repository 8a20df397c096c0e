"""Object detection: a head on every visual token, F1 at IoU 0.5."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from valora_data.contract.box_head import DETECTION as KIND
from valora_data.contract.box_head import BoxHead
from valora_data.contract.results import BoxesResult, Detection
from valora_data.errors import DataError
from valora_data.schema import Answer, Sample
from valora_data.tasks import DETECTION
from valora_train.metrics.evaluate import match
from valora_train.metrics.per_class import detection_report
from valora_train.model.prompts import Example
from valora_train.tasks.base import Evaluation, HeadTask, Prediction
from valora_train.tasks.box_head import BoxHeadModule, DetectionTargets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from valora_data.contract.head import Head
    from valora_data.schema import Domain
    from valora_train.metrics.evaluate import Matches
    from valora_train.metrics.measures import Scores
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded, HeadInputs
    from valora_train.settings import HeadSettings
    from valora_train.tasks.base import DomainTask

MIN_SCORE = 0.01
"""Confidence from which boxes are measured; mAP and calibration need those below the threshold."""
FITS = 2
"""Fits of the Platt scaling, each on the boxes that the one before lets through."""


class DetectionTask(HeadTask):
    """Finds the objects of a domain.

    Args:
        domain: The domain.
        settings: Settings of its head.
        first_head: (5, width + 1): weight and bias of a generic objectness and box head to start
            from, if the base model ships one.
    """

    spec = DETECTION
    result = BoxesResult
    whole_prompt: ClassVar[bool] = False
    geometric = True

    def __init__(
        self, domain: Domain, settings: HeadSettings, first_head: Tensor | None = None
    ) -> None:
        super().__init__(domain, settings)
        self._first_head = first_head

    @classmethod
    def create(
        cls,
        domain: Domain,
        settings: HeadSettings,
        lmm: Lmm,
        *,
        video: bool,
        first_head: Tensor | None,
    ) -> DomainTask:
        """Build the task of a domain, whose head starts from the base model's generic one."""
        return cls(domain, settings, first_head)

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """Refused: F1 depends on a threshold, see `metrics.evaluate`."""
        raise NotImplementedError("detections are measured by valora_train.metrics.evaluate.match")

    def prompt(self, sample: Sample) -> Example:
        """The prompt for a sample: the question and one image."""
        return Example(self.domain.question(sample), (sample.image,))

    def mirrored(self, sample: Sample) -> Sample:
        """The sample with its image and boxes mirrored left to right."""
        width = sample.image.width
        boxes = tuple(replace(b, x0=width - b.x1, x1=width - b.x0) for b in sample.answer.boxes)
        return replace(super().mirrored(sample), answer=Answer(boxes))

    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> DetectionTargets:
        """The targets of each visual token.

        Raises:
            DataError: If images have different grids of visual tokens.
        """
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
        if self._first_head is not None:
            with torch.no_grad():
                head.linear.weight[:5].copy_(self._first_head[:, :-1])
                head.linear.bias[:5].copy_(self._first_head[:, -1])
        return head

    def head_loss(
        self, head: BoxHeadModule, inputs: HeadInputs, targets: DetectionTargets
    ) -> Tensor:
        """Loss of objectness, boxes and classes, see `BoxHeadModule.loss`."""
        return head.loss(self.head_outputs(head, inputs), targets, self.settings)

    def head_outputs(self, head: BoxHeadModule, inputs: HeadInputs) -> Tensor:
        """(n, tokens, 5 + classes) float32, from the hidden states of the visual tokens."""
        raw: Tensor = head(inputs.visual)
        return raw

    def stored_head(self, head: BoxHeadModule) -> BoxHead:
        """The head with its calibration and threshold."""
        return head.stored(self.settings)

    def load_head(self, head: Head) -> nn.Module:
        """The module of a head from a bundle."""
        return BoxHeadModule.of(head) if isinstance(head, BoxHead) else super().load_head(head)

    def calibrate(self, head: BoxHeadModule, raw: Tensor, samples: Sequence[Sample]) -> None:
        """Fit the Platt scaling of the confidence, then the threshold with the best F1.

        What is fitted does not depend on how the head was calibrated before.

        Args:
            head: The head.
            raw: (n, tokens, 5 + classes) float32.
            samples: The validation samples.
        """
        head.calibration.copy_(torch.tensor([1.0, 0.0]))
        # The boxes from `MIN_SCORE` on are fitted; which ones these are depends on the fit before.
        for _ in range(FITS):
            head.calibrate(self._match(self.predictions(head, raw, samples), samples))
        matches = self._match(self.predictions(head, raw, samples), samples)
        head.threshold.fill_(matches.best_threshold())

    def predictions(
        self, head: BoxHeadModule, raw: Tensor, samples: Sequence[Sample]
    ) -> list[Prediction]:
        """The boxes of every image from `MIN_SCORE` on."""
        return [
            Prediction(
                Answer(tuple(head.predict(row, sample.image.size, self.settings, MIN_SCORE)))
            )
            for row, sample in zip(raw, samples, strict=True)
        ]

    def _match(self, predictions: Sequence[Prediction], samples: Sequence[Sample]) -> Matches:
        return match(
            [one.answer.boxes for one in predictions],
            [sample.answer.boxes for sample in samples],
            self.domain.labels,
        )

    def evaluate(
        self, head: BoxHeadModule, predictions: list[Prediction], samples: Sequence[Sample]
    ) -> Evaluation:
        """F1 at the head's threshold, COCO mAP, calibration error; the same of each class."""
        matches = self._match(predictions, samples)
        threshold = float(head.threshold)
        return Evaluation(
            matches.f1(threshold),
            matches.f1_interval(threshold),
            predictions,
            {"map": matches.map, "ece": matches.calibration_error()},
            threshold,
            detection_report(
                [one.answer.boxes for one in predictions],
                [sample.answer.boxes for sample in samples],
                self.domain.labels,
                threshold,
                matches.ap,
            ),
        )

    def threshold(self, head: BoxHeadModule) -> float:
        """Confidence from which a box counts."""
        return float(head.threshold)

    def golden(self, prediction: Prediction, threshold: float | None) -> list[dict[str, Any]]:
        """The boxes from the threshold on."""
        found = tuple(
            Detection(box.label, box.confidence, box.xyxy)
            for box in prediction.answer.boxes
            if box.confidence >= (threshold or 0.0)
        )
        return BoxesResult(kind=KIND, detections=(found,)).golden()

    def metadata(self, head: BoxHeadModule) -> dict[str, Any]:
        """The threshold."""
        return {"threshold": float(head.threshold)}
