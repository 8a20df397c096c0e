"""The built-in domains; a sample is a function of (seed, domain, split, index) alone."""

from collections.abc import Iterator
from functools import partial

from valora_data.errors import DataError
from valora_data.schema import Sample, Split, Task
from valora_data.sources.base import Source, SourceFormat, Splits
from valora_data.sources.scenes import detection, shelves  # noqa: F401 - register
from valora_data.sources.scenes.boards import SCENES, SceneDomain, scene_rng
from valora_data.sources.scenes.photographs import DIGITS, digit_samples

__all__ = ["SCENES", "builtin_domain", "builtin_samples"]
SCENES[Task.CLASSIFICATION] = {
    "digits": SceneDomain("which digit is this?", DIGITS), **SCENES[Task.CLASSIFICATION]
}  # fmt: skip


def builtin_domain(task: Task, name: str) -> SceneDomain:
    """A built-in domain: its prompt and labels; a `DataError` if there is none of this name."""
    known = SCENES.get(task, {})
    if name not in known:
        text = f"unknown built-in domain {name!r} of task {task}: choose from"
        raise DataError(f"{text} {', '.join(known)}")
    return known[name]


def builtin_samples(
    task: Task, name: str, split: Split, count: int, seed: int = 0
) -> Iterator[Sample]:
    """The first `count` samples of a split; another seed gives others; or a `DataError`."""
    draw = builtin_domain(task, name).draw
    if draw is None:
        yield from digit_samples(split, count, seed)
        return
    for index in range(count):
        (first, *rest), answer, prompt = draw(scene_rng(name, split, index, seed), split)
        yield Sample(f"{name}/{split}/{index:05d}", first, answer, prompt, tuple(rest))


class ScenesFormat(SourceFormat):
    """The built-in domains: `Source.name` names one, `Source.counts` says how many samples."""

    drawn = True

    def supports(self, task: Task) -> bool:
        return task in SCENES

    def open(self, source: Source) -> Splits:
        draw = partial(builtin_samples, source.task, source.name)
        return {
            split: partial(draw, split, count, source.seed)
            for split in Split if (count := source.counts.get(split, 0))
        }  # fmt: skip
