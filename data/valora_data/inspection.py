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
    """Counts of one split."""

    samples: int = 0  # number of samples
    images: int = 0  # number of images or frames
    # number of occurrences of each label, answer or object class
    labels: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0  # number of samples without an answer; for detection, without objects
    # number of images of each (width, height) in pixels
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, sample: Sample, task: Task) -> None:
        """Count a sample."""
        answer = sample.answer
        self.samples += 1
        self.images += len(sample.images)
        self.sizes[sample.image.size] += 1
        if task.spec.detects:
            self.labels.update(box.label for box in answer.boxes)
            self.unanswered += not answer.boxes
        elif answer.choice is not None:
            self.labels[answer.choice] += 1
        elif not answer.captions and not answer.boxes:
            self.unanswered += 1


@dataclass(slots=True)
class Inspection:
    """Result of checking a data set."""

    task: Task  # task of the answers
    faults: Faults  # everything that was found in files, rows and boxes
    # counts by split name; `all` for a set without splits
    splits: dict[str, SplitFacts] = field(default_factory=dict)
    # images that occur again, in another split or in their own, equal ones first
    pairs: list[Pair] = field(default_factory=list)
    # one sentence for each kind of fault that has to be mended
    problems: list[str] = field(default_factory=list)
    # one sentence for each kind of thing that is worth knowing
    notes: list[str] = field(default_factory=list)


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
    duplicates, streams = Duplicates(), _streams(source, reader)
    failed: dict[str, DataError] = {}
    for name, stream in streams.items():
        facts = found.splits[name] = SplitFacts()
        try:
            for sample in stream():
                facts.add(sample, source.task)
                duplicates.add(name, sample)
                if on_sample is not None:
                    on_sample(name, sample)
        except DataError as error:
            failed[name] = error
    if len(failed) == len(streams):
        raise next(iter(failed.values()))
    order = list(Likeness)
    found.pairs = sorted(duplicates.pairs(), key=lambda pair: order.index(pair.likeness))
    found.problems = [
        *(f"split {name} cannot be read: {error}" for name, error in failed.items()),
        *_of_kinds(found, skips=True), *_of_copies(found, leaks=True), *_of_labels(found),
    ]  # fmt: skip
    found.notes = [*_of_kinds(found, skips=False), *_of_copies(found, leaks=False)]
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


def _of_kinds(found: Inspection, *, skips: bool) -> Iterator[str]:
    for kind, texts in found.faults.texts(skips=skips).items():
        yield f"{plural(len(texts), kind.what)} ({_examples(texts)}): {kind.remedy}"


def _of_copies(found: Inspection, *, leaks: bool) -> Iterator[str]:
    for likeness in Likeness:
        pairs = [one for one in found.pairs if one.leaks is leaks and one.likeness is likeness]
        if pairs and leaks:
            yield (
                f"{plural(len(pairs), 'picture|pictures is|are in two splits')}, {likeness} "
                f"({_examples(list(map(str, pairs)))}): keep each in one split, or set "
                "domains.NAME.source.leaks=keep_test"
            )
        elif pairs:
            how = "" if likeness is Likeness.EQUAL else f", {likeness}"
            shown = _examples([f"{pair.second[1]} is {pair.first[1]}" for pair in pairs])
            yield (
                f"{plural(len(pairs), 'picture|pictures occurs|occur again in its|their')} own "
                f"split{how} ({shown}): they go to the same split, and one of each is enough"
            )


def _of_labels(found: Inspection) -> Iterator[str]:
    spec = found.task.spec
    for name, facts in found.splits.items():
        if not facts.samples:
            yield f"split {name} holds no samples: add some"
        elif name != Split.UNLABELLED and facts.unanswered == facts.samples:
            what = "objects" if spec.detects else "answers"
            yield (
                f"none of the {plural(facts.samples, 'image')} of split {name} has {what}: check "
                "where the labels are, or use kind `images` for images without labels"
            )
        elif name != Split.UNLABELLED and facts.unanswered and not spec.detects:
            yield (
                f"{facts.unanswered} of {plural(facts.samples, 'sample')} of split {name} "
                f"{agreeing(facts.unanswered, 'has|have')} no answer: add it or remove them"
            )
    labels = {name: facts.labels for name, facts in found.splits.items() if facts.labels}
    learnt = labels.get(str(Split.TRAIN), labels.get("all"))
    if not spec.choice or spec.labels != "required" or learnt is None:
        return
    if len(learnt) == 1:
        yield f"there is only one class, {next(iter(learnt))!r}: add another"
    for name, used in labels.items():
        if strange := sorted(set(used) - set(learnt)):
            yield (
                f"split {name} has labels that are not in {Split.TRAIN} "
                f"({', '.join(strange[:5])}): give all splits the same label set"
            )


def _examples(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return "; ".join(texts[:NAMED]) + more
