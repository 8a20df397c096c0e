"""Models of transformers, from a folder or the hub."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from valora_teachers.base import TeacherKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from valora_data.schema import Task
    from valora_teachers.base import Teacher


class HuggingFace(TeacherKind):
    """Loads whatever the model's configuration says that it is for."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"batch", "device"})

    def options(self) -> Sequence[str]:
        """What `load_huggingface` takes beside the model, the task and the labels."""
        from valora_teachers.huggingface import load_huggingface

        taken = inspect.signature(load_huggingface).parameters
        return [name for name in taken if name not in ("source", "task", "labels")]

    def load(
        self,
        weights: Path | str,
        task: Task,
        labels: Sequence[str],
        names: Mapping[str, str] | None,
        options: Mapping[str, Any],
        prompt: str,
    ) -> Teacher:
        """Load a model from a folder or by its name on the hub."""
        from valora_teachers.huggingface import load_huggingface

        return load_huggingface(
            weights, task, labels, **({"names": names, "prompt": prompt} | dict(options))
        )
