"""A built-in domain: its task, question and label set, and the function that draws a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from PIL.Image import Image

    from valora_data.schema import Answer, Split, Task


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sample before it has a name.

    Attributes:
        images: RGB images or frames, at least one.
        answer: The truth.
        prompt: The sample's own question or phrase, if it has one.
    """

    images: tuple[Image, ...]
    answer: Answer
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class SceneDomain:
    """A built-in domain.

    Attributes:
        task: Its task.
        prompt: The domain's prompt (see `valora_data.schema.Domain`).
        draw: Draws one sample of a split with the given random numbers.
        labels: Labels in the order of the class indices; empty where answers are language.
    """

    task: Task
    prompt: str
    draw: Callable[[np.random.Generator, Split], Drawn]
    labels: tuple[str, ...] = ()


def chosen(rng: np.random.Generator, options: Sequence[str]) -> str:
    """One of some words."""
    return options[int(rng.integers(len(options)))]
