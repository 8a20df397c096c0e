"""Checks of a data set: counts, labels, all of its faults, and copies within and across splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from valora_data.duplicates import Duplicates, Key, Likeness, Pair
from valora_data.errors import DataError
from valora_data.faults import Faults
from valora_data.schema import Sample, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.registry import open_source
from valora_data.wording import agreeing, plural

NAMED = 5  # faults of each kind, and pairs of copies, that the report names


@dataclass(slots=True)
class SplitFacts:
    """Numbers of samples, of images or frames, of each label, and of samples without an answer."""

    samples: int = 0
    images: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0

    def add(self, sample: Sample, task: Task) -> None:
        """Count a sample."""
        answer = sample.answer
        self.samples += 1
        self.images += len(sample.images)
        if task.spec.detects:
            self.labels.update(box.label for box in answer.boxes)
            self.unanswered += not answer.boxes
        elif answer.choice is not None:
            self.labels[answer.choice] += 1
        elif not answer.captions and not answer.boxes:
            self.unanswered += 1


@dataclass(slots=True)
class Inspection:
    """What was found in a data set.

    Splits are those of the source; `all` for a set without splits. Pairs are images that occur
    again, in another split or in their own, equal ones first. Problems have to be mended, notes
    are worth knowing.
    """

    task: Task
    faults: Faults
    splits: dict[str, SplitFacts] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def inspect(
    source: Source, on_sample: Callable[[str, Sample], None] = lambda _, __: None
) -> Inspection:
    """Read a data set from end to end and check it.

    Args:
        source: The source; any number of faults is tolerated and collected.
        on_sample: Called with the split's name and each sample.

    Raises:
        DataError: The set cannot be read at all.
    """
    reader = ImageReader.for_check(source.path or source.name)
    found = Inspection(source.task, reader.faults)
    duplicates, streams = Duplicates(), _streams(source, reader)
    failed: dict[str, DataError] = {}
    for name, stream in streams.items():
        facts = found.splits[name] = SplitFacts()
        try:
            for sample in stream():
                facts.add(sample, source.task)
                duplicates.add(name, sample)
                on_sample(name, sample)
        except DataError as error:
            failed[name] = error
    if len(failed) == len(streams):
        raise next(iter(failed.values()))
    order = list(Likeness)
    found.pairs = sorted(duplicates.pairs(), key=lambda pair: order.index(pair.likeness))
    found.problems = [f"split {name} cannot be read: {error}" for name, error in failed.items()]
    for skips, said in ((True, found.problems), (False, found.notes)):
        for kind, texts in found.faults.texts(skips=skips).items():
            said.append(f"{plural(len(texts), kind.what)} ({_examples(texts)}): {kind.remedy}")
    _compare_splits(found)
    _compare_labels(found)
    return found


def pictures_of(source: Source, pairs: Sequence[Pair]) -> Mapping[Key, Sample]:
    """Samples of some pairs by split and id, read once more; what is gone is left out."""
    wanted = {key for pair in pairs for key in (pair.first, pair.second)}
    found: dict[Key, Sample] = {}
    reader = ImageReader.for_check(source.path or source.name)
    for name, stream in _streams(source, reader).items():
        with suppress(DataError):  # it was reported when the set was checked
            found |= {key: one for one in stream() if (key := (name, one.id)) in wanted}
    return found


def _streams(source: Source, reader: ImageReader) -> dict[str, Callable[[], Iterator[Sample]]]:
    splits = open_source(replace(source, reader=reader))
    whole = Split.TRAIN if len(splits) > 1 else "all"
    return {str(split or whole): stream for split, stream in splits.items()}


def _compare_splits(found: Inspection) -> None:
    for likeness in Likeness:
        pairs = [pair for pair in found.pairs if pair.likeness is likeness]
        if leaks := [str(pair) for pair in pairs if pair.leaks]:
            found.problems.append(
                f"{plural(len(leaks), 'picture|pictures is|are in two splits')}, {likeness} "
                f"({_examples(leaks)}): keep each in one split, or set "
                "domains.NAME.source.leaks=keep_test"
            )
        if own := [f"{two[1]} is {one[1]}" for one, two, _ in pairs if one[0] == two[0]]:
            how = "" if likeness is Likeness.EQUAL else f", {likeness}"
            found.notes.append(
                f"{plural(len(own), 'picture|pictures occurs|occur again in its|their')} own "
                f"split{how} ({_examples(own)}): they go to the same split, and one of each is "
                "enough"
            )


def _compare_labels(found: Inspection) -> None:
    spec, say = found.task.spec, found.problems.append
    for name, facts in found.splits.items():
        if not facts.samples:
            say(f"split {name} holds no samples: add some")
        elif name != Split.UNLABELLED and facts.unanswered == facts.samples:
            say(
                f"none of the {plural(facts.samples, 'image')} of split {name} has "
                f"{'objects' if spec.detects else 'answers'}: check where the labels are, or use "
                "kind `images` for images without labels"
            )
        elif name != Split.UNLABELLED and facts.unanswered and not spec.detects:
            say(
                f"{facts.unanswered} of {plural(facts.samples, 'sample')} of split {name} "
                f"{agreeing(facts.unanswered, 'has|have')} no answer: add it or remove them"
            )
    labels = {name: facts.labels for name, facts in found.splits.items() if facts.labels}
    learnt = labels.get(str(Split.TRAIN), labels.get("all"))
    if not spec.choice or spec.labels != "required" or learnt is None:
        return
    if len(learnt) == 1:
        say(f"there is only one class, {next(iter(learnt))!r}: add another")
    for name, used in labels.items():
        if strange := sorted(set(used) - set(learnt)):
            say(
                f"split {name} has labels that are not in {Split.TRAIN} "
                f"({', '.join(strange[:5])}): give all splits the same label set"
            )


def _examples(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return "; ".join(texts[:NAMED]) + more
