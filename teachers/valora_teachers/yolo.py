"""Ultralytics' YOLO: detectors, also segmentation and pose models, and classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from valora_teachers.base import Count, Share, Teacher, TeacherError, TeacherOptions
from valora_teachers.ultralytics_plugin import load_ultralytics, open_weights, predict, read_boxes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Answer, Sample
    from valora_teachers.base import OnEpoch


class YoloOptions(TeacherOptions):
    """How a small YOLO is trained; the defaults suit 96-pixel scenes and two cores.

    Attributes:
        size: Side in pixels that images are resized to; a multiple of 32.
        width: Channels as a share of Ultralytics' full width; YOLO11n has 0.25.
        epochs: Passes over the training images.
        batch: Images per step.
        lr: Peak learning rate of AdamW; it warms up and falls along a cosine.
        weight_decay: Decay of AdamW.
        scale: Largest change of size in augmentation, as a share.
        shift: Largest shift in augmentation, as a share of the side.
        jitter: Largest relative change of brightness and of saturation.
        seed: Seed of weights, order and augmentation.
    """

    size: Annotated[int, Field(ge=32, multiple_of=32)] = 96
    width: Annotated[float, Field(gt=0)] = 0.25
    epochs: Count = 18
    batch: Annotated[int, Field(ge=2)] = 16
    lr: Share = 3e-3
    weight_decay: Share = 0.01
    scale: Share = 0.3
    shift: Share = 0.15
    jitter: Share = 0.25
    seed: Annotated[int, Field(ge=0)] = 0


class Yolo(Teacher):
    """Loads any `.pt` of Ultralytics; trains small detectors."""

    options_type = YoloOptions
    artefact: ClassVar[str | None] = "teacher.pt"
    trainable: ClassVar[bool] = True
    reads_prompt: ClassVar[bool] = False
    batch = 64

    def load(self, weights: Path | str) -> None:
        """Load a `.pt` file. It is a pickle: loading runs its code, so load only what you trust."""
        spec, path = self.task.spec, Path(weights)
        self._classifies = spec.choice and spec.labels == "required" and not spec.video
        if not spec.detects and not self._classifies:
            raise TeacherError(
                f"a YOLO gives no answers for task {self.task}: use it for detection, "
                "classification or counting, or yolo_world for grounding"
            )
        self._model, kind, classes = open_weights(path)
        if self._classifies and kind != "classify":
            raise TeacherError(
                f"{path.name} is a model for {kind!r}, which gives no class of an image: give one "
                "that was trained with task 'classify'"
            )
        if not self._classifies and kind not in ("detect", "segment", "pose"):
            raise TeacherError(
                f"{path.name} is a model for {kind!r}, which gives no boxes: give one that was "
                "trained with task 'detect'"
            )
        self.match_classes(path.name, classes)

    def answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        """Find boxes, or choose a label."""
        if self._classifies:
            found = predict(self._model, samples)
            return [self.choose(result.probs.data.tolist()) for result in found]
        results = predict(self._model, samples, classes=sorted(self.label_of))
        return [read_boxes(result, self.label_of) for result in results]

    def train(
        self,
        samples: Sequence[Sample],
        folder: Path,
        on_epoch: OnEpoch | None = None,
        validation: Sequence[Sample] = (),
    ) -> dict[str, Any]:
        """Train a small detector from its yaml; Ultralytics' tools open the file."""
        self._check(samples)
        load_ultralytics()
        from valora_teachers.yolo_training import train_yolo

        known = [x for x in validation if {box.label for box in x.answer.boxes} <= {*self.labels}]
        return train_yolo(
            samples, self.labels, self.options, folder / str(self.artefact), on_epoch, known
        )

    def _check(self, samples: Sequence[Sample]) -> None:
        if not self.task.spec.detects:
            raise TeacherError(
                f"a YOLO is trained here for detection only, not for {self.task}: choose teacher "
                "small"
            )
        if len(samples) < 2:
            raise TeacherError(
                f"training a YOLO needs at least 2 training images, got {len(samples)}: add samples"
            )
        for sample in samples:
            for box in sample.answer.boxes:
                if box.label not in self.labels:
                    raise TeacherError(
                        f"sample {sample.id} has label {box.label!r}, which is none of "
                        f"{', '.join(self.labels)}: correct the label or add it"
                    )
        if not any(sample.answer.boxes for sample in samples):
            raise TeacherError("no training image has a box: a YOLO has nothing to learn from")
