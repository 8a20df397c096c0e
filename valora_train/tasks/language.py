"""Tasks whose answers the language model writes; image captioning, by CIDEr."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from valora_data.contract.results import text_matches
from valora_data.errors import DataError
from valora_data.schema import Answer, Sample
from valora_data.tasks import CAPTION
from valora_train.metrics.measures import Scores, cider
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Encoded, Example, HiddenStates
from valora_train.tasks.base import DomainTask, Prediction

Size = tuple[int, int]  # width and height in pixels


class LanguageTask(DomainTask):
    """Writes answers. A subclass says how answers become text, and text answers."""

    def target_text(self, sample: Sample, seen: Size) -> str | None:
        """The text to learn; None or nothing but white space if the sample has no answer.

        `seen` are width and height of the first image as the model sees it, in pixels.
        """
        return sample.answer.choice

    def parse(self, text: str, sample: Sample, seen: Size) -> Answer:
        """The answer in a generated text; the answer of the sample is not read."""
        return Answer(answers=(text,))

    def training_example(self, sample: Sample) -> Example:
        """The prompt for a sample, with the answer to write."""
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
        """The answers in the generated texts."""
        return [
            Prediction(self.parse(text, sample, seen), text)
            for (text, seen), sample in zip(raw, samples, strict=True)
        ]

    def golden(self, prediction: Prediction, threshold: float | None) -> dict[str, Any]:
        """The text."""
        return {"text": prediction.text or ""}

    def matches(self, found: Any, expected: Any, threshold: float | None) -> bool:
        """Whether the texts are equal."""
        return text_matches(found["text"], expected)

    def metadata(self, head: Any) -> dict[str, Any]:
        """The maximum length of answers in tokens."""
        return {"max_tokens": self.settings.max_tokens}


class CaptionTask(LanguageTask):
    """Describes images."""

    spec = CAPTION

    @classmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """CIDEr-D."""
        return cider([one.captions for one in predicted], [other.captions for other in truth])

    def target_text(self, sample: Sample, seen: Size) -> str | None:
        """The first reference caption."""
        return next(iter(sample.answer.captions), None)

    def parse(self, text: str, sample: Sample, seen: Size) -> Answer:
        """The text as a caption."""
        return Answer(captions=(text,))
