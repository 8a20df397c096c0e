"""Any Python callable, named ``package.module:function``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from valora_data.identity import code_hash
from valora_teachers.base import BATCH, TeacherKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from valora_data.schema import Task
    from valora_teachers.base import Teacher


class Function(TeacherKind):
    """Calls a function with lists of samples."""

    reads_prompt: ClassVar[bool] = False

    def options(self) -> Sequence[str]:
        """Samples per call, and files or folders that the function reads."""
        return ("batch", "files")

    def inputs(
        self, weights: str | None, options: Mapping[str, Any], cache: Path | None
    ) -> dict[str, str]:
        """The function's module, the local modules that it imports, and the files it names.

        Files that the code does not name are to be listed in the option `files`.
        """
        code = code_hash(str(weights).partition(":")[0])
        return super().inputs(None, options, cache) | {"function": code}

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

        batch = int(options.get("batch", BATCH))
        return FunctionTeacher(str(weights), task, labels, names, batch)
