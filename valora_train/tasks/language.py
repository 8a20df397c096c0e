"""Tasks whose answers the language model writes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn import functional as F

from valora_data.contract.results import golden_text, text_matches
from valora_data.errors import DataError
from valora_train.tasks.base import DomainTask, Prediction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from valora_data.schema import Answer, Sample
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded, Example, HiddenStates, Size


class LanguageTask(DomainTask):
    """Writes answers. A subclass says how answers become text, and text answers."""

    @abstractmethod
    def target_text(self, sample: Sample, seen: Size) -> str | None:
        """The text to learn.

        Args:
            sample: A sample with its answer.
            seen: Width and height of the first image as the model sees it, in pixels.

        Returns:
            The text; None or nothing but white space if the sample has no answer.
        """

    @abstractmethod
    def parse(self, text: str, sample: Sample, seen: Size) -> Answer:
        """The answer in a generated text.

        Args:
            text: The text.
            sample: The sample; its answer is not read.
            seen: Width and height of the first image as the model sees it, in pixels.
        """

    def training_example(self, sample: Sample) -> Example:
        """The prompt for a sample, with the answer to write.

        Raises:
            DataError: The sample has no answer.
        """
        if not (self.target_text(sample, sample.image.size) or "").strip():
            raise DataError(
                f"sample {sample.id} of domain {self.domain.name} has no answer to learn: leave it "
                "out, or check the teacher"
            )
        return replace(self.prompt(sample), answer=partial(self._text, sample))

    def _text(self, sample: Sample, seen: Size) -> str:
        return self.target_text(sample, seen) or ""

    def mirrored(self, sample: Sample) -> Sample:
        """Refused: words such as left and right would be wrong for a mirrored image."""
        raise DataError(
            f"domain {self.domain.name} answers in language, which a mirrored image may belie: set "
            f"domains.{self.domain.name}.mirror=false"
        )

    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> Any:
        """None: the answers follow the prompts."""
        return None

    def new_head(self, lmm: Lmm, first: Encoded, seed: int) -> nn.Module | None:
        """None: the language model's own head writes."""
        return None

    def loss(self, head: Any, states: HiddenStates, targets: Any, lmm: Lmm) -> Tensor:
        """Cross entropy of each token of the answer, given those before it."""
        hidden, tokens = states.answer_pairs()
        return F.cross_entropy(lmm.logits(hidden), tokens)

    def outputs(self, head: None, lmm: Lmm, batch: Sequence[Encoded]) -> list[tuple[str, Size]]:
        """The generated text, and the size of the image as the model sees it."""
        texts = lmm.write(batch, self.settings.max_tokens)
        return [(text, item.seen) for text, item in zip(texts, batch, strict=True)]

    def predictions(
        self, head: None, raw: Sequence[tuple[str, Size]], samples: Sequence[Sample]
    ) -> list[Prediction]:
        """The answers in the generated texts."""
        return [
            Prediction(self.parse(text, sample, seen), text)
            for (text, seen), sample in zip(raw, samples, strict=True)
        ]

    def golden(self, prediction: Prediction, threshold: float | None) -> dict[str, Any]:
        """The text."""
        return golden_text(prediction.text or "")

    def matches(self, found: Any, expected: Any, threshold: float | None) -> bool:
        """Whether the texts are equal."""
        return text_matches(found["text"], expected)

    def metadata(self, head: None) -> dict[str, Any]:
        """The maximum length of answers in tokens."""
        return {"max_tokens": self.settings.max_tokens}
