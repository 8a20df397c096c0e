"""Any Python callable, named ``package.module:function``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_teachers.base import TeacherKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from valora_data.schema import Task
    from valora_teachers.base import Teacher


class Function(TeacherKind):
    """Calls a function with lists of samples."""

    def options(self) -> Sequence[str]:
        """Samples per call."""
        return ("batch",)

    def load(
        self,
        weights: Path | str,
        task: Task,
        labels: Sequence[str],
        names: Mapping[str, str] | None,
        options: Mapping[str, Any],
        prompt: str,
    ) -> Teacher:
        """Import the function."""
        from valora_teachers.functions import FunctionTeacher

        return FunctionTeacher(str(weights), task, labels, names, **options)
