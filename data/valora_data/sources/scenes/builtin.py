"""The built-in domains of every task: drawn, or real images out of wheels, never downloaded.

Every sample is a function of (seed, domain, split, index) alone, so that any one can be made again
without the ones before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.schema import Sample, Split, Task
from valora_data.sources.scenes.boards import SceneDomain, scene_rng
from valora_data.sources.scenes.classification import CLASSIFICATION, COUNTING, VIDEO
from valora_data.sources.scenes.detection import DETECTION
from valora_data.sources.scenes.language import CAPTION, GROUNDING, VQA
from valora_data.sources.scenes.photographs import DIGITS, digit_samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SCENES: Mapping[Task, Mapping[str, SceneDomain]] = {
    Task.DETECTION: DETECTION,
    Task.CLASSIFICATION: {
        "digits": SceneDomain("which digit is this?", None, DIGITS),
        **CLASSIFICATION,
    },
    Task.VIDEO: VIDEO,
    Task.VQA: VQA,
    Task.CAPTION: CAPTION,
    Task.GROUNDING: GROUNDING,
    Task.COUNTING: COUNTING,
}
"""Domains by task and name."""


def builtin_names(task: Task) -> tuple[str, ...]:
    """Names of a task's built-in domains."""
    return tuple(SCENES.get(task, ()))


def builtin_labels(task: Task, name: str) -> tuple[str, ...]:
    """Label set of a built-in domain; empty where answers are language."""
    return _domain(task, name).labels


def builtin_prompt(task: Task, name: str) -> str:
    """Prompt of a built-in domain (see `valora_data.schema.Domain`)."""
    return _domain(task, name).prompt


def builtin_samples(
    task: Task, name: str, split: Split, count: int, seed: int = 0
) -> Iterator[Sample]:
    """The first `count` samples of a split of a built-in domain; another seed gives other scenes.

    Raises:
        DataError: If there is no such domain, or the real images of a split are fewer.
    """
    draw = _domain(task, name).draw
    if draw is None:
        yield from digit_samples(split, count, seed)
        return
    for index in range(count):
        (first, *rest), answer, prompt = draw(scene_rng(name, split, index, seed), split)
        yield Sample(f"{name}/{split}/{index:05d}", first, answer, prompt, tuple(rest))


def _domain(task: Task, name: str) -> SceneDomain:
    if name not in builtin_names(task):
        raise DataError(
            f"unknown built-in domain {name!r} of task {task}: choose from "
            f"{', '.join(builtin_names(task))}"
        )
    return SCENES[task][name]
