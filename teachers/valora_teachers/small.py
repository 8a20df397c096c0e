"""A small ResNet of transformers that is trained here, for images or short clips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from valora_data.schema import Answer, Sample
from valora_teachers.base import Count, NotNegative, OnEpoch, Teacher, TeacherError, TeacherOptions


class SmallOptions(TeacherOptions):
    """How a small classifier is trained; the defaults suit 96-pixel scenes and one core."""

    size: Annotated[int, Field(ge=16)] = 64  # side in pixels that images are resized to
    width: Count = 24  # channels of the first stage; each further one has twice as many
    depth: Count = 1  # blocks of each of the three stages
    frames: Count = 4  # frames that are taken of a clip; images have one
    epochs: Count = 24  # passes over the training samples
    batch: Annotated[int, Field(ge=2)] = 32  # samples per step
    lr: NotNegative = 6e-3  # peak learning rate of AdamW; it warms up and falls along a cosine
    weight_decay: NotNegative = 0.05  # decay of AdamW
    shift: NotNegative = 0.12  # largest shift in augmentation, as a share of the side
    jitter: NotNegative = 0.15  # largest change of brightness; half of it for each channel
    seed: Annotated[int, Field(ge=0)] = 0  # seed of weights, order and augmentation


class Small(Teacher):
    """Classifies, counts, or recognises actions, with a probability for every label."""

    options_type = SmallOptions
    artefact: ClassVar[str | None] = "teacher"
    trainable: ClassVar[bool] = True
    reads_prompt: ClassVar[bool] = False
    batch = 64

    def load(self, weights: Path | str) -> None:
        from transformers import ResNetForImageClassification

        try:
            model = ResNetForImageClassification.from_pretrained(weights, use_safetensors=True)
            self._size, self._frames = model.config.image_size, model.config.frames
        except (AttributeError, OSError, ValueError) as error:
            raise TeacherError(
                f"{weights} holds no small classifier that was trained here: give its folder, or "
                "use teacher huggingface for others"
            ) from error
        self._model = model.eval()
        classes = {int(index): str(name) for index, name in model.config.id2label.items()}
        self.match_classes(Path(weights).name, classes)

    def answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        from valora_teachers.small_network import probabilities

        rows = probabilities(self._model, samples, self._size, self._frames)
        return [self.choose(row) for row in rows]

    def train(
        self, samples: Sequence[Sample], folder: Path, on_epoch: OnEpoch | None = None,
        validation: Sequence[Sample] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Train a network from scratch; where samples have soft labels, it learns those."""
        from valora_teachers.small_network import train

        spec = self.task.spec
        if not spec.choice or spec.labels != "required":
            raise TeacherError(
                f"a small classifier cannot do task {self.task}: let labels stand in for a teacher "
                "(teacher: labels), or name a trained one"
            )
        self.check_labelled(samples, lambda sample: [sample.answer.choice])
        frames = self.options.frames if spec.video else 1
        known = [sample for sample in validation if sample.answer.choice in self.labels]
        return train(
            samples, self.labels, self.options, frames, folder / "teacher", on_epoch, known
        )
