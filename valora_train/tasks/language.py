"""Answers in words by the language-model head: open questions, captions, referring expressions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn import functional as F

from valora_data.contract.heads import golden_text, text_matches
from valora_data.errors import DataError
from valora_data.schema import Answer, Task
from valora_train.metrics.measures import measure
from valora_train.model.prompts import Example
from valora_train.tasks.base import DomainTask, Evaluation, Said
from valora_train.tasks.coordinates import read_boxes, write_box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from valora_data.schema import Domain, Sample
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded, HiddenStates, Size
    from valora_train.settings import HeadSettings
    from valora_train.tasks.coordinates import Convention


class LanguageTask(DomainTask):
    """Writing in one domain.

    Args:
        domain: The domain.
        settings: Of the answers.
        video: Whether samples are videos.
        coordinates: How the base model writes boxes.
        step: What the numbers of boxes are multiples of.
    """

    def __init__(
        self,
        domain: Domain,
        settings: HeadSettings,
        video: bool,
        coordinates: Convention,
        step: int = 1,
    ) -> None:
        super().__init__(domain, settings, video)
        self._coordinates, self._step = coordinates, step

    def asked(self, sample: Sample) -> Example:
        """The question, and all images or frames."""
        return Example(self.domain.question(sample), sample.images, self.video)

    def taught(self, sample: Sample) -> Example:
        """The same, with the answer to write."""
        return replace(self.asked(sample), answer=self._answer(sample))

    def _answer(self, sample: Sample) -> Callable[[Size], str]:
        answer, text = sample.answer, None
        if self.domain.task is Task.GROUNDING and answer.boxes:
            boxes = answer.boxes
            return partial(self._boxes_as_text, boxes, sample.image.size)
        if self.domain.task is Task.CAPTION and answer.captions:
            text = answer.captions[0]
        elif self.domain.task is Task.VQA:
            text = answer.choice
        if text is None or not text.strip():
            raise DataError(
                f"sample {sample.id} of domain {self.domain.name} has no answer to learn: leave it "
                "out, or check the teacher"
            )
        return lambda _: text

    def _boxes_as_text(self, boxes: Any, size: Size, seen: Size) -> str:
        return "".join(write_box(box, size, seen, self._coordinates, self._step) for box in boxes)

    def mirrored(self, sample: Sample) -> Sample:
        """Not done: words say left and right."""
        raise DataError(
            f"domain {self.domain.name} answers in language, which a mirrored image may belie: set "
            f"domains.{self.domain.name}.mirror=false"
        )

    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> None:
        """None: the answers stand behind the prompts."""

    def new_head(self, lmm: Lmm, first: Encoded, seed: int) -> None:
        """None: the language model's own head writes."""

    def loss(self, head: None, states: HiddenStates, targets: None, lmm: Lmm) -> Tensor:
        """Cross entropy of the answer's tokens, each given those before it; the prompt's not."""
        hidden, tokens = states.answer_pairs()
        return F.cross_entropy(lmm.logits(hidden), tokens)

    def read(self, head: None, lmm: Lmm, batch: Sequence[Encoded]) -> list[tuple[str, Size]]:
        """What the model writes, and the size of the image that it sees."""
        texts = lmm.write(batch, self.settings.max_tokens)
        return [(text, item.seen) for text, item in zip(texts, batch, strict=True)]

    def calibrate(self, head: None, raw: Any, samples: Sequence[Sample]) -> None:
        """Nothing to fit."""

    def said(
        self,
        head: None,
        raw: Sequence[tuple[str, Size]],
        samples: Sequence[Sample],
    ) -> list[Said]:
        """The texts; of referring expressions with the boxes in them."""
        return [
            Said(self._read(text, sample.image.size, seen), text)
            for (text, seen), sample in zip(raw, samples, strict=True)
        ]

    def _read(self, text: str, size: Size, seen: Size) -> Answer:
        if self.domain.task is Task.GROUNDING:
            return Answer(boxes=tuple(read_boxes(text, size, seen, self._coordinates)))
        if self.domain.task is Task.CAPTION:
            return Answer(captions=(text,))
        return Answer(answers=(text,))

    def evaluation(
        self,
        head: None,
        said: list[Said],
        samples: Sequence[Sample],
    ) -> Evaluation:
        """The task's metric."""
        truth = [sample.answer for sample in samples]
        scores = measure(self.domain.task, [one.answer for one in said], truth)
        return Evaluation(scores.mean, scores.interval(), said, scores.details)

    def golden(self, said: Said, threshold: float | None) -> dict[str, Any]:
        """The text."""
        return golden_text(said.text or "")

    def same(self, found: Any, expected: Any, threshold: float | None) -> bool:
        """Whether the texts are equal."""
        return text_matches(found["text"], expected)

    def facts(self, head: None) -> dict[str, Any]:
        """How long answers get, and how boxes are written."""
        facts: dict[str, Any] = {"max_tokens": self.settings.max_tokens}
        if self.domain.task is Task.GROUNDING:
            facts["coordinates"] = self._coordinates
        return facts
