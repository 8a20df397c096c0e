"""The check of a data set: counts, labels, all of its faults, copies within and across splits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from valora_data.drawing import contact_sheet, pair_sheet
from valora_data.duplicates import Duplicates, Key, Likeness, Pair
from valora_data.errors import DataError
from valora_data.faults import described
from valora_data.schema import Sample, Split
from valora_data.sources.base import Source
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.registry import open_source
from valora_data.tasks import TaskSpec
from valora_data.wording import agreeing, examples, plural

NAMED = 5  # faults of each kind, and pairs of copies, that the report names
SHOWN_SAMPLES, SHOWN_LABELS, SHOWN_PAIRS = 18, 20, 24
BAR = 30  # letters


class Reservoir:
    """A uniform random choice of samples from a stream, in the stream's order."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._random = size, random.Random(seed)
        self._kept: dict[int, tuple[int, Sample]] = {}
        self.seen = 0

    def offer(self, sample: Sample) -> None:
        """Keep a sample, perhaps in the place of another one."""
        place = self.seen if self.seen < self._size else self._random.randrange(self.seen + 1)
        if place < self._size:
            self._kept[place] = (self.seen, sample)
        self.seen += 1

    @property
    def samples(self) -> list[Sample]:
        """The samples that were chosen."""
        return [sample for _, sample in sorted(self._kept.values(), key=lambda entry: entry[0])]


@dataclass(slots=True)
class SplitFacts:
    """Numbers of images or frames, of each label, and of samples without an answer; examples."""

    images: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    examples: Reservoir = field(default_factory=lambda: Reservoir(SHOWN_SAMPLES, 0))

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.examples.seen

    def add(self, sample: Sample, spec: TaskSpec) -> None:
        """Count a sample."""
        answer = sample.answer
        self.examples.offer(sample)
        self.images += len(sample.images)
        choice = () if spec.detects or answer.choice is None else (answer.choice,)
        self.labels.update([box.label for box in answer.boxes] if spec.detects else choice)
        self.unanswered += not (answer.boxes or choice or answer.captions)


def check(source: Source, out: Path, console: Console) -> bool:
    """Read a data set from end to end, show what is in it, and say if nothing must be mended."""
    spec, duplicates = source.task.spec, Duplicates()
    reader, streams = _streams(source)
    splits = {name: SplitFacts() for name in streams}
    problems = list[str]()
    with console.status(f"Reading {source.path} …"):
        for name, stream in streams.items():
            try:
                for sample in stream():
                    splits[name].add(sample, spec)
                    duplicates.add(name, sample)
            except DataError as error:
                problems.append(f"split {name} cannot be read: {error}")
                if len(problems) == len(streams):
                    raise
    order = list(Likeness)
    pairs = sorted(duplicates.pairs(), key=lambda pair: order.index(pair.likeness))
    problems += described([fault for fault in reader.found if fault.kind.skips], NAMED)
    for name, facts in splits.items():
        problems += _missing_answers(name, facts, spec)
    problems += [*_copies(pairs, leaks=True), *_strange_labels(splits, spec)]
    notes = described([fault for fault in reader.found if not fault.kind.skips], NAMED)
    notes += _copies(pairs, leaks=False)
    _show_counts(source.task, splits, console)
    for path in _write_files(source, reader, pairs, splits, out):
        say(console, "[dim]wrote[/]", str(path))
    for sign, sentences in (("[yellow]![/]", notes), ("[red]✗[/]", problems)):
        for sentence in sentences:
            say(console, sign, sentence)
    if not problems:
        noted = f"no faults; {plural(len(notes), 'note')} above" if notes else "nothing is wrong"
        say(console, "[green]✓[/]", noted)
    return not problems


def say(console: Console, sign: str, text: str) -> None:
    """Print a sentence of any length as one line."""
    console.print(f"{sign} {escape(text)}", highlight=False, soft_wrap=True)


def show_table(
    console: Console, title: str, columns: Mapping[str, bool], rows: Iterable[Iterable[object]]
) -> None:
    """Print a table; `columns` says of each whether it holds numbers."""
    table = Table(title=title, title_justify="left")
    for name, numbers in columns.items():
        table.add_column(name, overflow="fold", justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def _write_files(
    source: Source,
    reader: ImageReader,
    pairs: Sequence[Pair],
    splits: Mapping[str, SplitFacts],
    out: Path,
) -> Iterator[Path]:
    """Write contact sheets, and a table of everything that was found."""
    out.mkdir(parents=True, exist_ok=True)
    sheets = {
        name: contact_sheet(facts.examples.samples)
        for name, facts in splits.items()
        if facts.samples
    }
    for name, leaks in (("leaks", True), ("duplicates", False)):
        shown = [pair for pair in pairs if pair.leaks is leaks][:SHOWN_PAIRS]
        if sheet := pair_sheet(shown, _pictures_of(source, shown)):
            sheets[name] = sheet
    for name, sheet in sheets.items():
        sheet.save(out / f"{name}.png", compress_level=1)
        yield out / f"{name}.png"
    lines = [f"{fault.kind.name.lower()}\t{fault.text}\n" for fault in reader.found]
    lines += [f"copy\t{pair}\n" for pair in pairs]
    if lines:
        (out / "faults.tsv").write_text("".join(lines), encoding="utf-8")
        yield out / "faults.tsv"


def _streams(source: Source) -> tuple[ImageReader, dict[str, Callable[[], Iterator[Sample]]]]:
    reader = ImageReader.for_check(source.path or source.name)
    splits = open_source(replace(source, reader=reader))
    whole = Split.TRAIN if len(splits) > 1 else "all"
    return reader, {str(split or whole): stream for split, stream in splits.items()}


def _pictures_of(source: Source, pairs: Sequence[Pair]) -> Mapping[Key, Sample]:
    """Samples of some pairs by split and id, read once more; what is gone is left out."""
    wanted = {key for pair in pairs for key in (pair.first, pair.second)}
    found: dict[Key, Sample] = {}
    for name, stream in _streams(source)[1].items() if wanted else ():
        with suppress(DataError):  # it was reported when the set was checked
            found |= {
                (name, sample.id): sample for sample in stream() if (name, sample.id) in wanted
            }
    return found


def _show_counts(task: str, splits: Mapping[str, SplitFacts], console: Console) -> None:
    columns = {"split": False, "samples": True, "images": True, "answered": True}
    rows: list[list[object]] = [
        [split, facts.samples, facts.images, facts.samples - facts.unanswered]
        for split, facts in splits.items()
    ]
    show_table(console, f"task {task}", columns, rows)
    total: Counter[str] = sum((facts.labels for facts in splits.values()), start=Counter())
    if not total:
        return
    most = max(total.values())
    rows = [
        [label, *(facts.labels[label] for facts in splits.values()),
         "█" * max(1, round(BAR * count / most))]
        for label, count in total.most_common(SHOWN_LABELS)
    ]  # fmt: skip
    if len(total) > SHOWN_LABELS:
        rows.append([f"… {len(total) - SHOWN_LABELS} more"])
    columns = {"label": False, **dict.fromkeys(splits, True), "": False}
    show_table(console, plural(len(total), "label"), columns, rows)


def _copies(pairs: Sequence[Pair], *, leaks: bool) -> Iterator[str]:
    """A sentence for each likeness of pairs in two splits, or in one."""
    for likeness in Likeness:
        found = [pair for pair in pairs if pair.leaks is leaks and pair.likeness is likeness]
        how = "" if likeness is Likeness.EQUAL and not leaks else f", {likeness}"
        if found and leaks:
            yield (
                f"{plural(len(found), 'picture|pictures is|are in two splits')}{how} "
                f"({examples([*map(str, found)], NAMED)}): keep each in one split, or set "
                "domains.NAME.source.leaks=keep_test"
            )
        elif found:
            shown = examples([f"{pair.second[1]} is {pair.first[1]}" for pair in found], NAMED)
            yield (
                f"{plural(len(found), 'picture|pictures occurs|occur again in its|their')} own "
                f"split{how} ({shown}): they go to the same split, and one of each is enough"
            )


def _missing_answers(name: str, facts: SplitFacts, spec: TaskSpec) -> Iterator[str]:
    if not facts.samples:
        yield f"split {name} holds no samples: add some"
    elif name == Split.UNLABELLED:
        return
    elif facts.unanswered == facts.samples:
        yield (
            f"none of the {plural(facts.samples, 'image')} of split {name} has "
            f"{'objects' if spec.detects else 'answers'}: check where the labels are, or use "
            "kind `images` for images without labels"
        )
    elif facts.unanswered and not spec.detects:
        yield (
            f"{facts.unanswered} of {plural(facts.samples, 'sample')} of split {name} "
            f"{agreeing(facts.unanswered, 'has|have')} no answer: add it or remove them"
        )


def _strange_labels(splits: Mapping[str, SplitFacts], spec: TaskSpec) -> Iterator[str]:
    labels = {name: facts.labels for name, facts in splits.items() if facts.labels}
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
