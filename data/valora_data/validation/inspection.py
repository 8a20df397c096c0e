"""Checks of a data set: counts, labels, all of its faults, and copies within and across splits."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from valora_data.duplicates import Duplicates, Likeness, Pair
from valora_data.errors import DataError
from valora_data.schema import Sample, Split, Task
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.registry import open_source
from valora_data.wording import agreeing, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from valora_data.duplicates import Key
    from valora_data.faults import Faults
    from valora_data.sources.base import Source

SHOWN_PAIRS = 24
"""Pairs of copies of which pictures are drawn."""
NAMED = 5
"""Faults of each kind, and pairs of copies, that the report names."""


@dataclass(slots=True)
class SplitFacts:
    """Counts of one split.

    Attributes:
        samples: Number of samples.
        images: Number of images or frames.
        labels: Number of occurrences of each label, answer or object class.
        unanswered: Number of samples without an answer; for detection, without objects.
        sizes: Number of images of each (width, height) in pixels.
    """

    samples: int = 0
    images: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)


@dataclass(slots=True)
class Inspection:
    """Result of checking a data set.

    Attributes:
        task: Task of the answers.
        faults: Everything that was found in files, rows and boxes.
        splits: Counts by split name; `all` for a set without splits.
        pairs: Images that occur again, in another split or in their own.
        problems: One sentence for each kind of fault that has to be mended.
        notes: One sentence for each kind of thing that is worth knowing.
    """

    task: Task
    faults: Faults
    splits: dict[str, SplitFacts] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def leaks(self) -> list[Pair]:
        """Images in two splits, equal ones first."""
        return sorted((pair for pair in self.pairs if pair.leaks), key=_order)

    @property
    def duplicates(self) -> list[Pair]:
        """Images that occur again in their own split, equal ones first."""
        return sorted((pair for pair in self.pairs if not pair.leaks), key=_order)


def _order(pair: Pair) -> int:
    return list(Likeness).index(pair.likeness)


def inspect(source: Source, on_sample: Callable[[str, Sample], None] | None = None) -> Inspection:
    """Read a data set from end to end and check it.

    Args:
        source: The source; any number of faults is tolerated and collected.
        on_sample: Called with the split's name and each sample.

    Raises:
        DataError: The set cannot be read at all.
    """
    reader = ImageReader.for_check(source.path or source.name)
    found = Inspection(source.task, reader.faults)
    duplicates = Duplicates()
    splits = open_source(replace(source, reader=reader))
    failed: list[DataError] = []
    unread: list[str] = []
    for split, stream in splits.items():
        name = str(split or (Split.TRAIN if len(splits) > 1 else "all"))
        facts = found.splits.setdefault(name, SplitFacts())
        try:
            for sample in stream():
                _note(facts, sample, source.task)
                duplicates.add(name, sample)
                if on_sample is not None:
                    on_sample(name, sample)
        except DataError as error:
            failed.append(error)
            unread.append(f"split {name} cannot be read: {error}")
    if len(failed) == len(splits):
        raise failed[0]
    found.pairs = duplicates.pairs()
    found.problems = [*unread, *_problems(found)]
    found.notes = _notes(found)
    return found


def pictures_of(source: Source, pairs: Sequence[Pair]) -> Mapping[Key, Sample]:
    """Samples of some pairs by split and id, read once more; what is gone is left out."""
    wanted = {key for pair in pairs for key in (pair.first, pair.second)}
    found: dict[Key, Sample] = {}
    splits = open_source(replace(source, reader=ImageReader.for_check(source.path or source.name)))
    for split, stream in splits.items():
        name = str(split or (Split.TRAIN if len(splits) > 1 else "all"))
        left = {key for key in wanted if key[0] == name}
        with suppress(DataError):  # it was reported when the set was checked
            for sample in stream() if left else ():
                if (name, sample.id) in left:
                    found[name, sample.id] = sample
                    left.remove((name, sample.id))
                    if not left:
                        break
    return found


def _note(facts: SplitFacts, sample: Sample, task: Task) -> None:
    answer = sample.answer
    facts.samples += 1
    facts.images += len(sample.images)
    facts.sizes[sample.image.size] += 1
    if task.spec.detects:
        facts.labels.update(box.label for box in answer.boxes)
        facts.unanswered += not answer.boxes
    elif answer.choice is not None:
        facts.labels[answer.choice] += 1
    elif not answer.captions and not answer.boxes:
        facts.unanswered += 1


def _problems(found: Inspection) -> list[str]:
    problems = _of_kinds(found, skips=True)
    for likeness in Likeness:
        leaks = [pair for pair in found.leaks if pair.likeness is likeness]
        if leaks:
            problems.append(
                f"{plural(len(leaks), 'picture|pictures is|are in two splits')}, {likeness} "
                f"({_examples(list(map(str, leaks)))}): keep each in one split, or set "
                "domains.NAME.source.leaks=keep_test"
            )
    spec = found.task.spec
    for name, facts in found.splits.items():
        if not facts.samples:
            problems.append(f"split {name} holds no samples: add some")
        elif name != Split.UNLABELLED and facts.unanswered == facts.samples:
            what = "objects" if spec.detects else "answers"
            problems.append(
                f"none of the {plural(facts.samples, 'image')} of split {name} has {what}: check "
                "where the labels are, or use kind `images` for images without labels"
            )
        elif name != Split.UNLABELLED and facts.unanswered and not spec.detects:
            problems.append(
                f"{facts.unanswered} of {plural(facts.samples, 'sample')} of split {name} "
                f"{agreeing(facts.unanswered, 'has|have')} no answer: add it or remove them"
            )
    labels = {name: facts.labels for name, facts in found.splits.items() if facts.labels}
    learnt = labels.get(str(Split.TRAIN), labels.get("all"))
    if spec.choice and spec.labels == "required" and learnt is not None:
        if len(learnt) == 1:
            problems.append(f"there is only one class, {next(iter(learnt))!r}: add another")
        for name, used in labels.items():
            strange = sorted(set(used) - set(learnt))
            if strange:
                problems.append(
                    f"split {name} has labels that are not in {Split.TRAIN} "
                    f"({', '.join(strange[:5])}): give all splits the same label set"
                )
    return problems


def _notes(found: Inspection) -> list[str]:
    notes = _of_kinds(found, skips=False)
    for likeness in Likeness:
        pairs = [pair for pair in found.duplicates if pair.likeness is likeness]
        if pairs:
            how = "" if likeness is Likeness.EQUAL else f", {likeness}"
            shown = [f"{pair.second[1]} is {pair.first[1]}" for pair in pairs]
            notes.append(
                f"{plural(len(pairs), 'picture|pictures occurs|occur again in its|their')} own "
                f"split{how} ({_examples(shown)}): they go to the same split, and one of each is "
                "enough"
            )
    return notes


def _of_kinds(found: Inspection, *, skips: bool) -> list[str]:
    return [
        f"{plural(len(faults), kind.what)} ({_examples([fault.text for fault in faults])}): "
        f"{kind.remedy}"
        for kind, faults in found.faults.by_kind().items()
        if kind.skips is skips
    ]


def _examples(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return "; ".join(texts[:NAMED]) + more
