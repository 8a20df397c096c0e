"""A small ResNet that is trained here, for images and videos."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from valora_teachers.base import TeacherKind, check_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_data.schema import Sample, Task
    from valora_teachers.base import OnEpoch, Teacher


class Small(TeacherKind):
    """Classifies, counts, or recognises actions."""

    artefact: ClassVar[str | None] = "teacher"
    trainable: ClassVar[bool] = True
    reads_prompt: ClassVar[bool] = False

    def options(self) -> Sequence[str]:
        """Settings of the training."""
        from valora_teachers.small import SmallSettings

        return SmallSettings.__slots__

    def check(self, options: Mapping[str, Any]) -> None:
        """Check the settings of the training."""
        from valora_teachers.small import SmallSettings

        check_numbers(options, SmallSettings)
        SmallSettings(**options)

    def load(
        self,
        weights: Path | str,
        task: Task,
        labels: Sequence[str],
        names: Mapping[str, str] | None,
        options: Mapping[str, Any],
        prompt: str,
    ) -> Teacher:
        """Load the folder that the training wrote."""
        from valora_teachers.small import SmallTeacher

        return SmallTeacher.load(Path(weights), task, labels, names)

    def train(
        self,
        samples: Sequence[Sample],
        task: Task,
        labels: Sequence[str],
        folder: Path,
        options: Mapping[str, Any],
        on_epoch: OnEpoch | None,
    ) -> dict[str, Any]:
        """Train a network from scratch."""
        from valora_teachers.small import SmallSettings, train_small

        settings = SmallSettings(**options)
        report = train_small(
            samples,
            task,
            labels,
            folder,
            settings=settings,
            on_epoch=on_epoch,
            validation=self.validation,
        )
        return asdict(report)
