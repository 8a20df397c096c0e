"""Tasks whose answers the language model writes: captions, questions, and boxes as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from valora_data.contract.results import text_matches
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Domain, Sample
from valora_data.tasks import CAPTION, GROUNDING, VQA
from valora_train.metrics.measures import Scores, box_accuracy, cider, vqa
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Encoded, Example, HiddenStates, Size
from valora_train.tasks.base import DomainTask, Prediction
from valora_train.tasks.classification import ChoiceTask

Convention = Literal["grid1000", "pixels"]

GRID = 1000
NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
BOX = re.compile(
    rf"(?:<ref>(?P<name>.*?)</ref>\s*)?<box>\s*\({NUMBER},{NUMBER}\)\s*,\s*\({NUMBER},{NUMBER}\)\s*"
    r"</box>",
    re.DOTALL,
)


class LanguageTask(DomainTask):
    """Writes answers. A subclass says how answers become text, and text answers."""

    def target_text(self, sample: Sample, seen: Size) -> str | None:
        """The text to learn, if any; `seen` is the size of the first image as the model sees it."""
        return sample.answer.choice

    def parse(self, text: str, sample: Sample, seen: Size) -> Answer:
        """The answer in a generated text; the answer of the sample is not read."""
        return Answer(answers=(text,))

    def training_example(self, sample: Sample) -> Example:
        if not (self.target_text(sample, sample.image.size) or "").strip():
            raise DataError(
                f"sample {sample.id} of domain {self.domain.name} has no answer to learn: leave it "
                "out, or check the teacher"
            )
        return replace(
            self.prompt(sample), answer=lambda seen: self.target_text(sample, seen) or ""
        )

    def mirrored(self, sample: Sample) -> Sample:
        """Refused: words such as left and right would be wrong for a mirrored image."""
        raise DataError(
            f"domain {self.domain.name} answers in language, which a mirrored image may belie: set "
            f"domains.{self.domain.name}.mirror=false"
        )

    def loss(self, head: Any, states: HiddenStates, targets: Any, lmm: Lmm) -> Tensor:
        """Cross entropy of each token of the answer, given those before it."""
        hidden, tokens = states.answer_pairs()
        return F.cross_entropy(lmm.logits(hidden), tokens)

    def outputs(self, head: Any, lmm: Lmm, batch: Sequence[Encoded]) -> list[tuple[str, Size]]:
        """The generated text, and the size of the image as the model sees it."""
        texts = lmm.write(batch, self.settings.max_tokens)
        return [(text, item.seen) for text, item in zip(texts, batch, strict=True)]

    def predictions(
        self, head: Any, raw: Sequence[tuple[str, Size]], samples: Sequence[Sample]
    ) -> list[Prediction]:
        return [
            Prediction(self.parse(text, sample, seen), text)
            for (text, seen), sample in zip(raw, samples, strict=True)
        ]

    def golden(self, prediction: Prediction, threshold: float | None) -> dict[str, Any]:
        return {"text": prediction.text or ""}

    def matches(self, found: Any, expected: Any, threshold: float | None) -> bool:
        return text_matches(found["text"], expected)

    def metadata(self, head: Any) -> dict[str, Any]:
        return {"max_tokens": self.settings.max_tokens}


class CaptionTask(LanguageTask):
    """Describes images."""

    spec = CAPTION

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        return cider([one.captions for one in predicted], [other.captions for other in truth])

    def target_text(self, sample: Sample, seen: Size) -> str | None:
        return next(iter(sample.answer.captions), None)

    def parse(self, text: str, sample: Sample, seen: Size) -> Answer:
        return Answer(captions=(text,))


class VqaTask(DomainTask):
    """Answers questions about images; its subclass follows from the labels."""

    spec = VQA

    def __new__(cls, domain: Domain, *_: Any, **__: Any) -> VqaTask:
        """Create the task of a domain, with a head where it has labels."""
        return super().__new__(VqaChoiceTask if domain.labels else VqaTextTask)

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        return vqa(predicted, truth)


class VqaChoiceTask(VqaTask, ChoiceTask):
    """Answers questions with one of the domain's labels."""

    def __init__(self, domain: Domain, *given: Any, **options: Any) -> None:
        super().__init__(domain, *given, **options)
        self.kind = "yes_no" if set(domain.labels) == {"yes", "no"} else "classification"


class VqaTextTask(VqaTask, LanguageTask):
    """Answers questions in words; it learns the commonest answer of the annotators."""


def write_box(box: Box, size: Size, seen: Size, convention: Convention, step: int = 1) -> str:
    """A box as Qwen-VL writes it, on a grid, or in `seen` pixels, in multiples of `step`."""
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
        return box_accuracy(predicted, truth)

    def target_text(self, sample: Sample, seen: Size) -> str | None:
        size, lmm = sample.image.size, self.lmm
        boxes = sample.answer.boxes
        return "".join(
            write_box(b, size, seen, lmm.coordinates, lmm.coordinate_step) for b in boxes
        )

    def parse(self, text: str, sample: Sample, seen: Size) -> Answer:
        return Answer(tuple(read_boxes(text, sample.image.size, seen, self.lmm.coordinates)))

    def metadata(self, head: Any) -> dict[str, Any]:
        return super().metadata(head) | {"coordinates": self.lmm.coordinates}
