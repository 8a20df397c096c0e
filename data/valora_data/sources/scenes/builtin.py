"""The built-in domains of every task: drawn, or real images out of wheels, never downloaded.

Every sample is a function of (seed, domain, split, index) alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.schema import Sample, Split, Task
from valora_data.sources.scenes import detection as detection_scenes
from valora_data.sources.scenes import digits
from valora_data.sources.scenes.boards import scene_rng
from valora_data.sources.scenes.caption import CAPTION
from valora_data.sources.scenes.classification import CLASSIFICATION
from valora_data.sources.scenes.counting import COUNTING
from valora_data.sources.scenes.grounding import GROUNDING
from valora_data.sources.scenes.video import VIDEO
from valora_data.sources.scenes.vqa import VQA

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from valora_data.sources.scenes.scene_domain import SceneDomain

DIGITS = "digits"
SCENES: Mapping[Task, Mapping[str, SceneDomain]] = {
    Task.CLASSIFICATION: CLASSIFICATION,
    Task.VIDEO: VIDEO,
    Task.VQA: VQA,
    Task.CAPTION: CAPTION,
    Task.GROUNDING: GROUNDING,
    Task.COUNTING: COUNTING,
}
"""Drawn domains of every task except detection, by task and name."""


def builtin_names(task: Task) -> tuple[str, ...]:
    """Names of a task's built-in domains."""
    if task is Task.DETECTION:
        return detection_scenes.DOMAINS
    names = tuple(SCENES.get(task, ()))
    return (DIGITS, *names) if task is Task.CLASSIFICATION else names


def builtin_labels(task: Task, name: str) -> tuple[str, ...]:
    """Label set of a built-in domain; empty where answers are language.

    Raises:
        DataError: If there is no such domain.
    """
    _check(task, name)
    if task is Task.DETECTION:
        return (name,)
    return digits.LABELS if _is_digits(task, name) else SCENES[task][name].labels


def builtin_prompt(task: Task, name: str) -> str:
    """Prompt of a built-in domain (see `valora_data.schema.Domain`).

    Raises:
        DataError: If there is no such domain.
    """
    _check(task, name)
    if task is Task.DETECTION:
        return f"detect {name.replace('_', ' ')}"
    return "which digit is this?" if _is_digits(task, name) else SCENES[task][name].prompt


def builtin_samples(
    task: Task, name: str, split: Split, count: int, seed: int = 0
) -> Iterator[Sample]:
    """The first `count` samples of a split of a built-in domain.

    Args:
        task: The domain's task.
        name: The domain.
        split: Which photographs, digits and random numbers.
        count: Number of samples.
        seed: Another seed gives other scenes.

    Yields:
        Samples with ids ``<domain>/<split>/<number>``.

    Raises:
        DataError: If there is no such domain, or the real images of a split are fewer.
    """
    _check(task, name)
    if task is Task.DETECTION:
        yield from detection_scenes.detection_samples(name, split, count, seed)
    elif _is_digits(task, name):
        yield from digits.digit_samples(split, count, seed)
    else:
        draw = SCENES[task][name].draw
        for index in range(count):
            drawn = draw(scene_rng(name, split, index, seed), split)
            first, *rest = drawn.images
            key = f"{name}/{split}/{index:05d}"
            yield Sample(key, first, drawn.answer, drawn.prompt, tuple(rest))


def _is_digits(task: Task, name: str) -> bool:
    return task is Task.CLASSIFICATION and name == DIGITS


def _check(task: Task, name: str) -> None:
    names = builtin_names(task)
    if name not in names:
        raise DataError(
            f"unknown built-in domain {name!r} of task {task}: choose from {', '.join(names)}"
        )
