"""Object detection: a head on every visual token, F1 at IoU 0.5."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from valora_data.contract.heads import DETECTION, BoxesResult, BoxHead, Detection
from valora_data.errors import DataError
from valora_data.schema import Answer, Sample
from valora_train.metrics.evaluate import match
from valora_train.model.prompts import Example
from valora_train.tasks.base import DomainTask, Evaluation, Said
from valora_train.tasks.detection_head import DetectionHead, DetectionTargets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from valora_data.contract.heads import Head
    from valora_data.schema import Domain
    from valora_train.metrics.evaluate import Matches
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded, HeadInputs, HiddenStates
    from valora_train.settings import HeadSettings

MIN_SCORE = 0.01  # of the boxes that are measured; mAP and calibration need the unsure ones too


class DetectionTask(DomainTask):
    """Detection in one domain.

    Args:
        domain: The domain.
        settings: Of its head.
        first_head: (5, width + 1): weight and bias of a generic objectness and box head to start
            from, if the base model ships one.
    """

    whole: ClassVar[bool] = False

    def __init__(
        self, domain: Domain, settings: HeadSettings, first_head: Tensor | None = None
    ) -> None:
        super().__init__(domain, settings, video=False)
        self._first_head = first_head

    def asked(self, sample: Sample) -> Example:
        """The domain's prompt and the image."""
        return Example(self.domain.question(sample), (sample.image,))

    def mirrored(self, sample: Sample) -> Sample:
        """The image and its boxes, left to right."""
        from PIL import ImageOps

        width = sample.image.width
        boxes = tuple(replace(b, x0=width - b.x1, x1=width - b.x0) for b in sample.answer.boxes)
        return replace(sample, image=ImageOps.mirror(sample.image), answer=Answer(boxes))

    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> DetectionTargets:
        """What each visual token should say.

        Raises:
            DataError: If images have different grids of visual tokens.
        """
        grids = sorted({item.grid for item in encoded})
        if len(grids) > 1:
            raise DataError(
                f"images of domain {self.domain.name} give grids of {grids[0]} and {grids[-1]} "
                "visual tokens, but a detection head reads one grid: bring the images to one size"
            )
        return DetectionTargets.of(samples, self.domain.labels, grids[0])

    def new_head(self, lmm: Lmm, first: Encoded, seed: int) -> DetectionHead:
        """A fresh head, or the generic one of the base model."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = DetectionHead(lmm.width, self.domain.labels, first.grid).to(lmm.device)
        if self._first_head is not None:
            with torch.no_grad():
                head.linear.weight[:5].copy_(self._first_head[:, :-1])
                head.linear.bias[:5].copy_(self._first_head[:, -1])
        return head

    def loss(
        self,
        head: DetectionHead,
        states: HiddenStates,
        targets: DetectionTargets,
        lmm: Lmm,
    ) -> Tensor:
        """Of objectness, boxes and classes, see `DetectionHead.loss`."""
        return self.probe_loss(head, states.head_inputs(), targets)

    def probe_loss(
        self, head: DetectionHead, read: HeadInputs, targets: DetectionTargets
    ) -> Tensor:
        """The same of hidden states."""
        return head.loss(head(read.visual), targets, self.settings)

    def stored_head(self, head: DetectionHead) -> BoxHead:
        """The head with its calibration and threshold."""
        return head.stored(self.settings)

    def load_head(self, head: Head) -> nn.Module:
        """The module of a head from a bundle."""
        return DetectionHead.of(head) if isinstance(head, BoxHead) else super().load_head(head)

    def read(self, head: DetectionHead, lmm: Lmm, batch: Sequence[Encoded]) -> Tensor:
        """(n, tokens, 5 + classes) float32 on the CPU."""
        raw = [
            head(lmm.states(batch[start : start + 64]).head_inputs().visual).cpu()
            for start in range(0, len(batch), 64)
        ]
        return torch.cat(raw)

    def calibrate(self, head: DetectionHead, raw: Tensor, samples: Sequence[Sample]) -> None:
        """Platt scaling of the confidence, then the threshold with the best F1."""
        head.calibrate(self._match(self.said(head, raw, samples), samples))
        matches = self._match(self.said(head, raw, samples), samples)
        head.threshold.fill_(matches.best_threshold())

    def said(self, head: DetectionHead, raw: Tensor, samples: Sequence[Sample]) -> list[Said]:
        """Boxes of every image, unsure ones included."""
        return [
            Said(Answer(tuple(head.predict(row, sample.image.size, self.settings, MIN_SCORE))))
            for row, sample in zip(raw, samples, strict=True)
        ]

    def _match(self, said: Sequence[Said], samples: Sequence[Sample]) -> Matches:
        return match(
            [one.answer.boxes for one in said],
            [sample.answer.boxes for sample in samples],
            self.domain.labels,
        )

    def evaluation(
        self, head: DetectionHead, said: list[Said], samples: Sequence[Sample]
    ) -> Evaluation:
        """F1 at the head's threshold, COCO mAP, calibration error of the confidences."""
        matches = self._match(said, samples)
        threshold = float(head.threshold)
        return Evaluation(
            matches.f1(threshold),
            matches.f1_interval(threshold),
            said,
            {"map": matches.map, "ece": matches.calibration_error()},
            threshold,
        )

    def threshold(self, head: DetectionHead) -> float:
        """Confidence from which a box counts."""
        return float(head.threshold)

    def golden(self, said: Said, threshold: float | None) -> list[dict[str, Any]]:
        """The boxes from the head's threshold on."""
        found = tuple(
            Detection(box.label, box.confidence, box.xyxy)
            for box in said.answer.boxes
            if box.confidence >= (threshold or 0.0)
        )
        return BoxesResult(kind=DETECTION, detections=(found,)).golden()

    def same(self, found: Any, expected: Any, threshold: float | None) -> bool:
        """Whether the boxes agree; those close to the threshold may be missing."""
        return BoxesResult.matches(found, expected, threshold or 0.0)

    def facts(self, head: DetectionHead) -> dict[str, Any]:
        """The threshold."""
        return {"threshold": float(head.threshold)}
