"""The behaviour of a task type: prompts, targets, head, loss, metric and golden examples."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import torch
from PIL import ImageOps
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from valora_data.contract.head import Head
from valora_data.contract.heads import read_head, write_head
from valora_data.contract.results import HeadResult
from valora_data.errors import BundleError
from valora_data.schema import Answer, Domain, Sample
from valora_data.tasks import TaskSpec
from valora_train.errors import SettingsError, explain
from valora_train.metrics.measures import Scores
from valora_train.metrics.per_class import ClassReport
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Encoded, Example, HeadInputs, HiddenStates
from valora_train.settings import HeadSettings

EVALUATION_BATCH = 64  # samples that go through the model at once when a head is measured


@dataclass(frozen=True)
class Prediction:
    """The answer to a sample in the form that metrics read; its text where the model wrote it."""

    answer: Answer
    text: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """What a domain reaches on a split."""

    accuracy: float  # value of the task's standard metric
    interval: tuple[float, float]  # its 95 % bootstrap interval
    predictions: list[Prediction]  # the answer to every sample
    details: dict[str, float] = field(default_factory=dict)  # further metrics by name
    threshold: float | None = None  # confidence from which a box counts; None without boxes
    classes: ClassReport | None = None  # metrics of each class; None where answers are none


class DomainTask(ABC):
    """A domain with the behaviour of its task type, a subclass.

    Another package adds one in the entry-point group ``valora.tasks``. `video` says whether samples
    are videos; `first_head` (5, width + 1) is a generic objectness and box head that the base model
    may ship.
    """

    spec: ClassVar[TaskSpec]  # what is declared about the task type
    whole_prompt: ClassVar[bool] = True  # the tokens behind the last visual token are needed
    # Answers stay right, boxes being moved along, where an image is cropped, turned or shifted.
    geometric: ClassVar[bool] = False
    remembers: ClassVar[bool] = False  # the head is a memory before the prompt (`model.memory`)
    # Dataclass of the settings below `heads.options.NAME`, which `options` holds then.
    options_type: ClassVar[type | None] = None

    def __init__(
        self, domain: Domain, settings: HeadSettings, lmm: Lmm, *, video: bool = False,
        first_head: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.domain, self.settings, self.lmm = domain, settings, lmm
        self.video, self.first_head = video, first_head
        given = settings.options.get(str(domain.task), {})
        self.options: Any = self.read_options(domain.task, given)

    @classmethod
    def read_options(cls, name: str, values: Mapping[str, Any]) -> Any:
        """Read the settings of the task type `name`, as they are given in `heads.options`."""
        if cls.options_type is None:
            if values:
                text = f"task type {name} has no options, got {', '.join(values)}: leave"
                raise SettingsError(f"{text} heads.options.{name} out")
            return None
        try:
            # Strictly, a dataclass can be made of JSON only.
            given = json.dumps(dict(values))
            return TypeAdapter(cls.options_type).validate_json(given, strict=True, extra="forbid")
        except ValidationError as error:
            known = get_type_hints(cls.options_type)
            raise SettingsError(explain(error, known, "heads.options", name)) from error

    @classmethod
    @abstractmethod
    def measure(cls, predicted: Sequence[Answer], truth: Sequence[Answer]) -> Scores:
        """The standard metric of predicted answers, of the LMM or of a teacher."""

    def prepare(self, samples: Sequence[Sample]) -> None:  # noqa: B027  # overriding it is optional
        """Look at the training samples, at least one, before anything is learnt."""

    def prompt(self, sample: Sample) -> Example:
        """The prompt for a sample: the question, and all images or frames."""
        return Example(self.domain.question(sample), sample.images, self.video)

    def training_example(self, sample: Sample) -> Example:
        """The prompt for a sample, with the answer to learn where it is text."""
        return self.prompt(sample)

    def mirrored(self, sample: Sample) -> Sample:
        """The sample with its images mirrored left to right; the answer stays."""
        first, *rest = (ImageOps.mirror(image) for image in sample.images)
        return replace(sample, image=first, rest=tuple(rest))

    def targets(self, samples: Sequence[Sample], encoded: Sequence[Encoded]) -> Any:
        """What a head learns of samples: `Rows` or a tensor; None where answers are text."""
        return None

    def new_head(self, lmm: Lmm, first: Encoded, seed: int) -> nn.Module | None:
        """A head with initial weights; None where the model writes. `first` is a sample."""
        return None

    @abstractmethod
    def loss(self, head: Any, states: HiddenStates, targets: Any, lmm: Lmm) -> Tensor:
        """Training loss of a batch, from its last hidden states; `head` is None without one."""

    def head_loss(self, head: Any, inputs: HeadInputs, targets: Any) -> Tensor:
        """Training loss of a batch, given what the head reads."""
        raise NotImplementedError

    def write_head(self, head: Any, file: Path) -> None:
        """Write a trained head to a file."""
        raise NotImplementedError

    def read_head(self, file: Path, width: int) -> nn.Module:
        """Read a head, for a model whose hidden states have a width."""
        raise BundleError(f"domain {self.domain.name} of task {self.domain.task} has no head")

    @abstractmethod
    def outputs(self, head: Any, lmm: Lmm, batch: Sequence[Encoded]) -> Any:
        """Raw outputs of the head or the model for prompts, without gradients."""

    def calibrate(  # noqa: B027  # overriding it is optional
        self, head: Any, raw: Any, samples: Sequence[Sample]
    ) -> None:
        """Fit how raw outputs become answers, on the validation split; the head keeps the fit."""

    @abstractmethod
    def predictions(self, head: Any, raw: Any, samples: Sequence[Sample]) -> list[Prediction]:
        """Answers from raw outputs; the true answers of `samples` are not read."""

    @torch.no_grad()
    def answer(self, head: Any, lmm: Lmm, samples: Sequence[Sample]) -> list[Prediction]:
        """Answers by the active adapter, in the batches of training: shapes round differently."""
        encoded = lmm.encode([self.prompt(sample) for sample in samples], self.whole_prompt)
        return self.predictions(head, self.outputs(head, lmm, encoded), samples)

    def evaluate(
        self, head: Any, predictions: list[Prediction], samples: Sequence[Sample]
    ) -> Evaluation:
        """Compare predictions with the true answers of the same samples by the task's metric."""
        truth = [sample.answer for sample in samples]
        scores = self.measure([one.answer for one in predictions], truth)
        return Evaluation(scores.mean, scores.interval(), predictions, scores.details)

    @abstractmethod
    def golden(self, prediction: Prediction, threshold: float | None) -> Any:
        """A prediction as ``golden.json`` holds it, from the confidence that counts, if any."""

    @abstractmethod
    def matches(self, found: Any, expected: Any, threshold: float | None) -> bool:
        """Whether a prediction reproduces a golden one; both as `golden` returns them."""

    def metadata(self, head: Any) -> dict[str, Any]:
        """What the manifest says of the domain beside its accuracy."""
        return {}


class HeadTask(DomainTask):
    """A task that a head answers.

    A subclass says how a head is made (`new_head`), what it learns (`targets`), and how its outputs
    become answers (`calibrate`, `predictions`, `golden`).
    """

    result: ClassVar[type[HeadResult]]  # form of the answer
    # Class of the head, with `loss(raw, targets, settings)`, `stored(settings)` and `of(head)`; a
    # subclass may override the methods that call these, instead.
    module: ClassVar[type[Any]]
    head_type: ClassVar[type[Head]]  # class of the head in bundles

    def head_outputs(self, head: Any, inputs: HeadInputs) -> Tensor:
        """(n, …) float32, what the head returns for n prompts."""
        raw: Tensor = head(inputs)
        return raw

    def head_loss(self, head: Any, inputs: HeadInputs, targets: Any) -> Tensor:
        loss: Tensor = head.loss(self.head_outputs(head, inputs), targets, self.settings)
        return loss

    def stored_head(self, head: Any) -> Head:
        """A trained head in the form that bundles hold."""
        stored: Head = head.stored(self.settings)
        return stored

    def load_head(self, head: Any) -> nn.Module:
        """The module of a head from a bundle, whose kind must be the task's."""
        if not isinstance(head, self.head_type):
            text = f"domain {self.domain.name} of task {self.domain.task} cannot use a {head.kind}"
            raise BundleError(f"{text} head: export the bundle again")
        module: nn.Module = self.module.of(head)
        return module

    def write_head(self, head: Any, file: Path) -> None:
        write_head(file, self.stored_head(head))

    def read_head(self, file: Path, width: int) -> nn.Module:
        return self.load_head(read_head(file, width))

    def loss(self, head: Any, states: HiddenStates, targets: Any, lmm: Lmm) -> Tensor:
        return self.head_loss(head, states.head_inputs(), targets)

    def outputs(self, head: Any, lmm: Lmm, batch: Sequence[Encoded]) -> Tensor:
        """(n, …) float32 on the CPU, what the head returns."""
        return _outputs([(self, head)], lmm, batch)[0]

    def matches(self, found: Any, expected: Any, threshold: float | None) -> bool:
        return self.result.matches(found, expected, threshold or 0.0)


def _outputs(
    heads: Sequence[tuple[HeadTask, Any]], lmm: Lmm, batch: Sequence[Encoded]
) -> list[Tensor]:
    """What heads return that read the same hidden states, each as `HeadTask.outputs`."""
    found: list[list[Tensor]] = [[] for _ in heads]
    for start in range(0, len(batch), EVALUATION_BATCH):
        inputs = lmm.states(batch[start : start + EVALUATION_BATCH]).head_inputs()
        for raw, (task, head) in zip(found, heads, strict=True):
            raw.append(task.head_outputs(head, inputs).cpu())
    return [torch.cat(raw) for raw in found]


@torch.no_grad()
def answer_together(
    heads: Sequence[tuple[HeadTask, Any]], lmm: Lmm, samples: Sequence[Sample]
) -> list[list[Prediction]]:
    """Answers of tasks and heads on the active adapter; equal prompts share passes."""
    groups: dict[Any, list[int]] = {}
    for place, (task, _) in enumerate(heads):
        groups.setdefault((task.domain.question(samples[0]), task.whole_prompt), []).append(place)
    found: list[list[Prediction]] = [[] for _ in heads]
    for places in groups.values():
        first, mine = heads[places[0]][0], [heads[place] for place in places]
        encoded = lmm.encode([first.prompt(sample) for sample in samples], first.whole_prompt)
        for place, raw in zip(places, _outputs(mine, lmm, encoded), strict=True):
            found[place] = heads[place][0].predictions(heads[place][1], raw, samples)
    return found
