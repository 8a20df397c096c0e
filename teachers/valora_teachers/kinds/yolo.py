"""Ultralytics' YOLO: detectors (also segmentation and pose models), and classifiers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from valora_data.schema import Task
from valora_teachers.base import TeacherError, TeacherKind, check_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_data.schema import Sample
    from valora_teachers.base import OnEpoch, Teacher


class Yolo(TeacherKind):
    """Loads any `.pt` of Ultralytics; trains small detectors."""

    artefact: ClassVar[str | None] = "teacher.pt"
    trainable: ClassVar[bool] = True
    reads_prompt: ClassVar[bool] = False

    def options(self) -> Sequence[str]:
        """Settings of the training."""
        from valora_teachers.yolo import YoloSettings

        return YoloSettings.__slots__

    def check(self, options: Mapping[str, Any]) -> None:
        """Check the settings of the training."""
        from valora_teachers.yolo import YoloSettings

        check_numbers(options, YoloSettings)
        YoloSettings(**options)

    def load(
        self,
        weights: Path | str,
        task: Task,
        labels: Sequence[str],
        names: Mapping[str, str] | None,
        options: Mapping[str, Any],
        prompt: str,
    ) -> Teacher:
        """Load a detector or a classifier, as the task needs."""
        spec = task.spec
        if spec.choice and spec.labels == "required" and not spec.video:
            from valora_teachers.yolo_classify import YoloClassifier

            return YoloClassifier.load(Path(weights), task, labels, names)
        if not spec.detects:
            raise TeacherError(
                f"a YOLO gives no answers for task {task}: use it for detection, classification "
                "or counting, or yolo_world for grounding"
            )
        from valora_teachers.yolo import YoloTeacher

        return YoloTeacher.load(Path(weights), labels, names)

    def train(
        self,
        samples: Sequence[Sample],
        task: Task,
        labels: Sequence[str],
        folder: Path,
        options: Mapping[str, Any],
        on_epoch: OnEpoch | None,
    ) -> dict[str, Any]:
        """Train a detector from its yaml."""
        if not task.spec.detects:
            raise TeacherError(
                f"a YOLO is trained here for detection only, not for {task}: choose teacher small"
            )
        from valora_teachers.yolo import YoloSettings, train_yolo

        settings = YoloSettings(**options)
        report = train_yolo(
            samples,
            labels,
            folder,
            settings=settings,
            on_epoch=on_epoch,
            validation=self.validation,
        )
        return asdict(report)
