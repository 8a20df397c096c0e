"""The base model itself, with the document in its prompt: what a memory should answer like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from valora_data.contract.base_model import base_hash, processor_hash
from valora_data.errors import BundleError
from valora_teachers.base import TeacherError, TeacherKind, check_numbers
from valora_teachers.in_context import InContextOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from valora_data.schema import Task
    from valora_teachers.base import Teacher


class InContext(TeacherKind):
    """Reads documents and answers; the model is a folder, `tiny`, or a name on the hub."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"device", "batch"})

    def options(self) -> Sequence[str]:
        """Length of answers, type and device of the weights, and questions at once."""
        return ("max_tokens", "dtype", "device", "batch")

    def check(self, options: Mapping[str, Any]) -> None:
        """Check the values of options before any work."""
        numbers = {key: value for key, value in options.items() if key in ("max_tokens", "batch")}
        check_numbers(numbers, InContextOptions)

    def inputs(
        self, weights: str | None, options: Mapping[str, Any], cache: Path | None
    ) -> dict[str, str]:
        """Hashes of the model's weights and of what prompts are made with."""
        base = str(weights)
        try:
            return {"base": base_hash(base), "processor": processor_hash(base)}
        except BundleError as error:
            raise TeacherError(str(error)) from error

    def load(
        self,
        weights: Path | str,
        task: Task,
        labels: Sequence[str],
        names: Mapping[str, str] | None,
        options: Mapping[str, Any],
        prompt: str,
    ) -> Teacher:
        """Load the model."""
        from valora_teachers.in_context import InContextTeacher

        if names is not None or labels:
            raise TeacherError(
                "a teacher of kind in_context writes its answers: leave labels and names out"
            )
        return InContextTeacher(str(weights), task, prompt, dict(options))
