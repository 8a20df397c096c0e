"""What tells one task from another: how a domain is asked, learns, answers and is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from valora_data.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from valora_data.contract.heads import Head
    from valora_data.schema import Answer, Domain, Sample
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded, Example, HeadInputs, HiddenStates
    from valora_train.settings import HeadSettings

MEASURED_AT_ONCE = 64


@dataclass(frozen=True)
class Said:
    """An answer of the model.

    Attributes:
        answer: In the form that metrics read.
        text: What it wrote, where it writes.
    """

    answer: Answer
    text: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """What a domain reaches on a split.

    Attributes:
        accuracy: By the task's standard metric.
        interval: 95 % bootstrap interval of it.
        details: Further metrics by name.
        said: The answer to every sample.
        threshold: Confidence from which a box counts; None where there are no boxes.
    """

    accuracy: float
    interval: tuple[float, float]
    said: list[Said]
    details: dict[str, float] = field(default_factory=dict)
    threshold: float | None = None


class DomainTask(ABC):
    """A domain's task.

    Args:
        domain: The domain.
        settings: Of heads and answers.
        video: Whether samples are videos and not images.

    Attributes:
        whole: Whether what follows the last visual token is read.
    """

    whole: ClassVar[bool] = True

    def __init__(self, domain: Domain, settings: HeadSettings, video: bool) -> None:
        self.domain = domain
        self.settings = settings
        self.video = video

    # --- learning -------------------------------------------------------------------------------

    @abstractmethod
    def asked(self, sample: Sample) -> Example:
        """A sample as it is asked."""

    def taught(self, sample: Sample) -> Example:
        """A sample as it is learnt; with the answer where it is text."""
        return self.asked(sample)

    @abstractmethod
    def mirrored(self, sample: Sample) -> Sample:
        """The same, left to right."""

    @abstractmethod
    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> Any:
        """What a head should say; rows can be taken, and it moves to a device.

        Args:
            samples: With answers.
            encoded: The same samples, encoded.

        Raises:
            DataError: If a sample has no answer that can be learnt.
        """

    @abstractmethod
    def new_head(self, lmm: Lmm, first: Encoded, seed: int) -> nn.Module | None:
        """A fresh head; None where the model writes its answers.

        Args:
            lmm: What it reads.
            first: One of the samples.
            seed: Of its weights.
        """

    @abstractmethod
    def loss(self, head: Any, states: HiddenStates, targets: Any, lmm: Lmm) -> Tensor:
        """Training loss of a batch of this domain."""

    def probe_loss(self, head: Any, read: HeadInputs, targets: Any) -> Tensor:
        """The same of a head on the frozen base."""
        raise NotImplementedError(f"{self.domain.task} has no head")

    def stored_head(self, head: Any) -> Head:
        """A trained head in the form that bundles hold."""
        raise NotImplementedError(f"{self.domain.task} has no head")

    def load_head(self, head: Head) -> nn.Module:
        """The module of a head from a bundle.

        Raises:
            BundleError: It is another kind of head than the task's.
        """
        raise BundleError(
            f"domain {self.domain.name} has a {head.kind} head, but task {self.domain.task} has "
            "none: export the bundle again"
        )

    # --- answering ------------------------------------------------------------------------------

    @abstractmethod
    def read(self, head: Any, lmm: Lmm, batch: Sequence[Encoded]) -> Any:
        """What the model gives for prompts, before it is interpreted; no gradients."""

    @abstractmethod
    def calibrate(self, head: Any, raw: Any, samples: Sequence[Sample]) -> None:
        """Fit what makes answers of raw output to the validation split."""

    @abstractmethod
    def said(self, head: Any, raw: Any, samples: Sequence[Sample]) -> list[Said]:
        """The answers; the truth of `samples` is not looked at."""

    @abstractmethod
    def evaluation(self, head: Any, said: list[Said], samples: Sequence[Sample]) -> Evaluation:
        """How good they are."""

    def threshold(self, head: Any) -> float | None:
        """Confidence from which an answer counts, None if all do."""
        return None

    # --- golden examples and pictures -----------------------------------------------------------

    @abstractmethod
    def golden(self, said: Said, threshold: float | None) -> Any:
        """An answer as ``golden.json`` holds it.

        Args:
            said: The answer.
            threshold: Confidence from which an answer counts; None if all do.
        """

    @abstractmethod
    def same(self, found: Any, expected: Any, threshold: float | None) -> bool:
        """Whether an answer reproduces a golden one; both as `golden` returns them."""

    @abstractmethod
    def facts(self, head: Any) -> dict[str, Any]:
        """What the manifest says of the domain beside its accuracy."""
