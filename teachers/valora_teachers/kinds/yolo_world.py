"""Ultralytics' YOLO-World: an open-vocabulary detector that is prompted with phrases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from valora_data.identity import place_hash
from valora_teachers.base import TeacherKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_data.schema import Task
    from valora_teachers.base import Teacher


class YoloWorldKind(TeacherKind):
    """Detects a domain's labels, or the phrase of each sample."""

    artefact: ClassVar[str | None] = "teacher.pt"
    reads_prompt: ClassVar[bool] = False

    def options(self) -> Sequence[str]:
        """The text encoder: a folder or a name on the hub."""
        return ("text_encoder",)

    def inputs(
        self, weights: str | None, options: Mapping[str, Any], cache: Path | None
    ) -> dict[str, str]:
        """The model, and the text encoder."""
        from valora_teachers.yolo_world import TEXT_ENCODER

        found = super().inputs(weights, options, cache)
        return found | {"text_encoder": place_hash(options.get("text_encoder", TEXT_ENCODER))}

    def load(
        self,
        weights: Path | str,
        task: Task,
        labels: Sequence[str],
        names: Mapping[str, str] | None,
        options: Mapping[str, Any],
        prompt: str,
    ) -> Teacher:
        """Load a `.pt` of YOLO-World."""
        from valora_teachers.yolo_world import YoloWorld

        return YoloWorld.load(Path(weights), task, labels, names, **options)
