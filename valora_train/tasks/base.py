"""The behaviour of a task type: prompts, targets, head, loss, metric and golden examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from valora_data.contract.heads import read_head, write_head
from valora_data.errors import BundleError
from valora_train.errors import SettingsError
from valora_train.model.prompts import Example

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from valora_data.contract.head import Head
    from valora_data.contract.results import HeadResult
    from valora_data.schema import Answer, Domain, Sample
    from valora_data.tasks import TaskSpec
    from valora_train.metrics.measures import Scores
    from valora_train.metrics.per_class import ClassReport
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded, HeadInputs, HiddenStates
    from valora_train.settings import HeadSettings

EVALUATION_BATCH = 64
"""Samples that go through the model at once when a head is measured."""


@dataclass(frozen=True)
class Prediction:
    """The model's answer to a sample.

    Attributes:
        answer: The answer in the form that metrics read.
        text: The generated text; None where a head answers.
    """

    answer: Answer
    text: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """What a domain reaches on a split.

    Attributes:
        accuracy: Value of the task's standard metric.
        interval: Its 95 % bootstrap interval.
        predictions: The answer to every sample.
        details: Further metrics by name.
        threshold: Confidence from which a box counts; None where there are no boxes.
        classes: Metrics of each class; None where answers are no classes.
    """

    accuracy: float
    interval: tuple[float, float]
    predictions: list[Prediction]
    details: dict[str, float] = field(default_factory=dict)
    threshold: float | None = None
    classes: ClassReport | None = None


class DomainTask(ABC):
    """A domain with the behaviour of its task type. Every task type is a subclass.

    Another package adds one with an entry point in the group ``valora.tasks``.

    Args:
        domain: The domain.
        settings: Settings of heads and answers.
        video: Whether samples are videos and not images.

    Attributes:
        spec: What is declared about the task type.
        whole_prompt: Whether the tokens behind the last visual token are needed.
        geometric: Whether crops, rotations and shifts of an image leave its answer right, its boxes
            being moved along; otherwise augmentation changes colours and sharpness only.
        remembers: Whether the head is a memory that stands before the prompt
            (`valora_train.model.memory`), instead of reading hidden states.
        options_type: A dataclass of the settings that only this task type has; they are given in
            `heads.options`, below the name of the task type. None if it has none.
        options: The domain's settings of that dataclass; None if the task type has none.
    """

    spec: ClassVar[TaskSpec]
    whole_prompt: ClassVar[bool] = True
    geometric: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    options_type: ClassVar[type | None] = None

    def __init__(self, domain: Domain, settings: HeadSettings, video: bool = False) -> None:
        self.domain = domain
        self.settings = settings
        self.video = video
        self.options: Any = self.read_options(
            domain.task, settings.options.get(str(domain.task), {})
        )

    @classmethod
    def read_options(cls, name: str, values: Mapping[str, Any]) -> Any:
        """Read the settings of this task type.

        Args:
            name: Name of the task type.
            values: The settings as they are given in `heads.options`.

        Returns:
            An instance of `options_type`; None if the task type has no settings.

        Raises:
            SettingsError: A key is unknown, or a value is missing or of the wrong type.
        """
        if cls.options_type is None:
            if values:
                raise SettingsError(
                    f"task type {name} has no options, got {', '.join(values)}: leave "
                    f"heads.options.{name} out"
                )
            return None
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls.options_type).validate_python(dict(values), extra="forbid")
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(("heads.options", name, *map(str, first["loc"])))
            raise SettingsError(
                f"bad setting {where}={first['input']!r}: {first['msg'][0].lower()}"
                f"{first['msg'][1:]}"
            ) from error

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
        """Build the task of a domain for a model.

        Args:
            domain: The domain.
            settings: Settings of heads and answers.
            lmm: The model.
            video: Whether samples are videos and not images.
            first_head: A pretraining head that the base model ships, see `DetectionTask`.
        """
        return cls(domain, settings, video)

    @classmethod
    @abstractmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """The standard metric of predicted answers, of the LMM or of a teacher.

        Args:
            predicted: The answer to each sample.
            truth: The true answer to each sample.

        Raises:
            DataError: The truth of a sample is not known.
        """

    # --- learning -------------------------------------------------------------------------------

    def prepare(self, samples: Sequence[Sample]) -> None:  # noqa: B027  # overriding it is optional
        """Look at the training samples before anything is learnt; by default nothing.

        Args:
            samples: The training samples, at least one.
        """

    def prompt(self, sample: Sample) -> Example:
        """The prompt for a sample: the question, and all images or frames."""
        return Example(self.domain.question(sample), sample.images, self.video)

    def training_example(self, sample: Sample) -> Example:
        """The prompt for a sample, with the answer to learn where it is text."""
        return self.prompt(sample)

    def mirrored(self, sample: Sample) -> Sample:
        """The sample with its images mirrored left to right; the answer stays."""
        from PIL import ImageOps

        first, *rest = (ImageOps.mirror(image) for image in sample.images)
        return replace(sample, image=first, rest=tuple(rest))

    @abstractmethod
    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> Any:
        """The targets of a head; they can be indexed with rows and moved to a device.

        Args:
            samples: Samples with answers.
            encoded: The same samples, encoded.

        Raises:
            DataError: A sample has no answer that can be learnt.
        """

    @abstractmethod
    def new_head(self, lmm: Lmm, first: Encoded, seed: int) -> nn.Module | None:
        """A head with initial weights; None where the model writes its answers.

        Args:
            lmm: The model whose hidden states it reads.
            first: One of the samples, encoded.
            seed: Seed of the initial weights.
        """

    @abstractmethod
    def loss(self, head: Any, states: HiddenStates, targets: Any, lmm: Lmm) -> Tensor:
        """Training loss of a batch of this domain.

        Args:
            head: The head, if there is one.
            states: Last hidden states of the batch.
            targets: Targets of the same samples.
            lmm: The model.
        """

    def head_loss(self, head: Any, inputs: HeadInputs, targets: Any) -> Tensor:
        """Training loss of a batch, given what the head reads."""
        raise NotImplementedError(f"{self.domain.task} has no head")

    # --- heads in bundles -----------------------------------------------------------------------

    def stored_head(self, head: Any) -> Head:
        """A trained head in the form that bundles hold."""
        raise NotImplementedError(f"{self.domain.task} has no head")

    def load_head(self, head: Head) -> nn.Module:
        """The module of a head from a bundle.

        Raises:
            BundleError: The head is of another kind than the task's.
        """
        raise BundleError(
            f"domain {self.domain.name} of task {self.domain.task} cannot use a {head.kind} head: "
            "export the bundle again"
        )

    def write_head(self, head: Any, file: Path) -> None:
        """Write a trained head to a file."""
        write_head(file, self.stored_head(head))

    def read_head(self, file: Path, width: int) -> nn.Module:
        """Read a head from a file.

        Args:
            file: The file.
            width: Size of the model's hidden states.

        Raises:
            BundleError: The file is damaged or holds a head that does not fit.
        """
        return self.load_head(read_head(file, width))

    # --- answering ------------------------------------------------------------------------------

    @abstractmethod
    def outputs(self, head: Any, lmm: Lmm, batch: Sequence[Encoded]) -> Any:
        """Raw outputs of the head or the model for prompts, without gradients."""

    def calibrate(  # noqa: B027  # overriding it is optional
        self, head: Any, raw: Any, samples: Sequence[Sample]
    ) -> None:
        """Fit how raw outputs become answers, on the validation split; by default nothing.

        Args:
            head: The head, which keeps what was fitted.
            raw: `outputs` of the samples.
            samples: The validation samples, with answers.
        """

    @abstractmethod
    def predictions(self, head: Any, raw: Any, samples: Sequence[Sample]) -> list[Prediction]:
        """Answers from raw outputs; the true answers of `samples` are not read."""

    @torch.no_grad()
    def answer(self, head: Any, lmm: Lmm, samples: Sequence[Sample]) -> list[Prediction]:
        """Answers to samples by the active adapter; their true answers are not read.

        Args:
            head: The head, if there is one.
            lmm: The model.
            samples: The samples. They are encoded in the batches of training: other shapes round
                differently.
        """
        encoded = lmm.encode([self.prompt(sample) for sample in samples], self.whole_prompt)
        return self.predictions(head, self.outputs(head, lmm, encoded), samples)

    def evaluate(
        self, head: Any, predictions: list[Prediction], samples: Sequence[Sample]
    ) -> Evaluation:
        """Compare predictions with the truth by the task's metric.

        Args:
            head: The head, if there is one.
            predictions: The answers.
            samples: The same samples, with true answers.
        """
        truth = [sample.answer for sample in samples]
        scores = self.measure([one.answer for one in predictions], truth)
        return Evaluation(scores.mean, scores.interval(), predictions, scores.details)

    def threshold(self, head: Any) -> float | None:
        """Confidence from which an answer counts; None if all do."""
        return None

    # --- golden examples and the manifest -------------------------------------------------------

    @abstractmethod
    def golden(self, prediction: Prediction, threshold: float | None) -> Any:
        """A prediction as ``golden.json`` holds it.

        Args:
            prediction: The prediction.
            threshold: Confidence from which an answer counts; None if all do.
        """

    @abstractmethod
    def matches(self, found: Any, expected: Any, threshold: float | None) -> bool:
        """Whether a prediction reproduces a golden one; both as `golden` returns them."""

    def metadata(self, head: Any) -> dict[str, Any]:
        """What the manifest says of the domain beside its accuracy."""
        return {}


class HeadTask(DomainTask):
    """A task that a head answers.

    A subclass says how a module of the head is made, stored and loaded, what its targets and its
    loss are, and how its outputs become answers.

    Attributes:
        result: Form of the answer.
    """

    result: ClassVar[type[HeadResult]]

    @abstractmethod
    def head_loss(self, head: Any, inputs: HeadInputs, targets: Any) -> Tensor:
        """Training loss of a batch, given what the head reads."""

    @abstractmethod
    def stored_head(self, head: Any) -> Head:
        """A trained head in the form that bundles hold."""

    def loss(self, head: Any, states: HiddenStates, targets: Any, lmm: Lmm) -> Tensor:
        """Training loss of a batch of this domain."""
        return self.head_loss(head, states.head_inputs(), targets)

    def outputs(self, head: Any, lmm: Lmm, batch: Sequence[Encoded]) -> Tensor:
        """(n, …) float32 on the CPU, what the head returns."""
        step = EVALUATION_BATCH
        raw = [
            self.head_outputs(head, lmm.states(batch[at : at + step]).head_inputs()).cpu()
            for at in range(0, len(batch), step)
        ]
        return torch.cat(raw)

    def head_outputs(self, head: Any, inputs: HeadInputs) -> Tensor:
        """(n, …) float32, what the head returns for n prompts."""
        raw: Tensor = head(inputs)
        return raw

    def matches(self, found: Any, expected: Any, threshold: float | None) -> bool:
        """Whether a prediction reproduces a golden one, within the tolerances of its form."""
        return self.result.matches(found, expected, threshold or 0.0)
