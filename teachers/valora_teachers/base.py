"""What every teacher looks like: a small model that answers one domain's question about images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from valora_data.errors import ValoraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image

    from valora_data.schema import Box, Task


class TeacherError(ValoraError):
    """A teacher is missing, cannot be loaded, or does not do what the domain asks for."""


@dataclass(frozen=True, slots=True)
class TeacherOutput:
    """What a teacher says about one image; a task fills the fields that it needs.

    Attributes:
        boxes: Found objects with confidences, most confident first, in pixels of the image.
    """

    boxes: tuple[Box, ...] = ()


class Teacher(Protocol):
    """A model that knows one domain."""

    @property
    def task(self) -> Task:
        """What it does."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that it answers with, in the order of class indices."""
        ...

    def predict(self, images: Sequence[Image]) -> list[TeacherOutput]:
        """Answer for RGB images of any size, one output per image in order."""
        ...
