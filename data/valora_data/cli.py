"""`valora-data check`: counts, labels, faults and copies of a data set before it is used."""

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from valora_data.drawing import contact_sheet
from valora_data.duplicates import Duplicates, Pair
from valora_data.errors import DataError
from valora_data.faults import ImageReader, described
from valora_data.schema import Sample, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import FORMATS, detect_kind, open_source
from valora_data.sources.shelf import is_shelf, read_shelf
from valora_data.tasks import TaskSpec, task_names
from valora_data.wording import agreeing, encode_all_output, examples, plural

NAMED = 5  # faults of each kind, and pairs of copies, that the report names
SHOWN_SAMPLES, SHOWN_LABELS = 18, 20


@dataclass(slots=True)
class SplitFacts:
    """Numbers of samples, images or frames, labels, and samples without an answer; examples."""

    samples: int = 0
    images: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    examples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample, spec: TaskSpec, rng: random.Random) -> None:
        """Count a sample, and perhaps keep it as one of the examples."""
        answer = sample.answer
        self.samples += 1
        self.images += len(sample.images)
        choice = () if spec.detects or answer.choice is None else (answer.choice,)
        self.labels.update([box.label for box in answer.boxes] if spec.detects else choice)
        self.unanswered += not (answer.boxes or choice or answer.captions)
        if len(self.examples) < SHOWN_SAMPLES:
            self.examples.append(sample)
        elif (index := rng.randrange(self.samples)) < SHOWN_SAMPLES:
            self.examples[index] = sample


def check(source: Source, out: Path, console: Console) -> bool:
    """Read a data set from end to end, show what is in it, and say if nothing must be fixed."""
    spec, duplicates, rng = source.task.spec, Duplicates(), random.Random(0)
    reader = ImageReader(source.path or source.name, tolerance=math.inf)
    streams = open_source(replace(source, reader=reader))
    whole = Split.TRAIN if len(streams) > 1 else "all"
    splits = {str(split or whole): SplitFacts() for split in streams}
    problems = list[str]()
    with console.status(f"Reading {source.path} …"):
        for (name, facts), stream in zip(splits.items(), streams.values(), strict=True):
            try:
                for sample in stream():
                    facts.add(sample, spec, rng)
                    duplicates.add(name, sample)
            except DataError as error:
                problems.append(f"split {name} cannot be read: {error}")
                if len(problems) == len(streams):
                    raise
    pairs = sorted(duplicates.pairs(), key=lambda pair: not pair.equal)
    problems += described([fault for fault in reader.found if fault.kind.skips], NAMED)
    problems += [*_copies(pairs, leaks=True), *_gaps(splits, spec)]
    notes = described([fault for fault in reader.found if not fault.kind.skips], NAMED)
    notes += _copies(pairs, leaks=False)
    _show_counts(source.task, splits, console)
    out.mkdir(parents=True, exist_ok=True)
    for name, facts in splits.items():
        if facts.samples:
            contact_sheet(facts.examples).save(out / f"{name}.png", compress_level=1)
            _say(console, "[dim]wrote[/]", str(out / f"{name}.png"))
    lines = [f"{fault.kind.name.lower()}\t{fault.text}\n" for fault in reader.found]
    if lines := [*lines, *(f"copy\t{pair}\n" for pair in pairs)]:
        (out / "faults.tsv").write_text("".join(lines), "utf-8", "backslashreplace")
        _say(console, "[dim]wrote[/]", str(out / "faults.tsv"))
    for sign, sentences in (("[yellow]![/]", notes), ("[red]✗[/]", problems)):
        for sentence in sentences:
            _say(console, sign, sentence)
    if not problems:
        noted = f"no faults; {plural(len(notes), 'note')} above" if notes else "nothing is wrong"
        _say(console, "[green]✓[/]", noted)
    return not problems


def _say(console: Console, sign: str, text: str) -> None:
    console.print(f"{sign} {escape(text)}", highlight=False, soft_wrap=True)


def _show_table(
    console: Console, title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]
) -> None:
    names = (Column(name, overflow="fold") for name in columns)
    table = Table(*names, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def _show_counts(task: str, splits: Mapping[str, SplitFacts], console: Console) -> None:
    rows: list[list[object]] = [
        [split, one.samples, one.images, one.samples - one.unanswered]
        for split, one in splits.items()
    ]
    _show_table(console, f"task {task}", ("split", "samples", "images", "answered"), rows)
    total: Counter[str] = sum((facts.labels for facts in splits.values()), start=Counter())
    rows = [
        [label, *(facts.labels[label] for facts in splits.values())]
        for label, _ in total.most_common(SHOWN_LABELS)
    ]
    if len(total) > SHOWN_LABELS:
        rows.append([f"… {len(total) - SHOWN_LABELS} more"])
    if rows:
        _show_table(console, plural(len(total), "label"), ("label", *splits), rows)


def _copies(pairs: Sequence[Pair], *, leaks: bool) -> Iterator[str]:
    what = "picture|pictures occurs|occur again in its|their own split"
    remedy = "they go to the same split, and one of each is enough"
    if leaks:
        what = "picture|pictures is|are in two splits"
        remedy = "keep each in one split, or set domains.NAME.source.leaks=keep_test"
    for equal, how in ((True, "equal"), (False, "resized, recompressed or mirrored")):
        found = [
            str(pair) if leaks else f"{pair.second[1]} is {pair.first[1]}"
            for pair in pairs if (pair.leaks, pair.equal) == (leaks, equal)
        ]  # fmt: skip
        if found:
            yield f"{plural(len(found), what)}, {how} ({examples(found, NAMED)}): {remedy}"


def _gaps(splits: Mapping[str, SplitFacts], spec: TaskSpec) -> Iterator[str]:
    for name, facts in splits.items():
        missing, what = facts.unanswered, "objects" if spec.detects else "answers"
        if not facts.samples:
            yield f"split {name} holds no samples: add some"
        elif missing == facts.samples and name != Split.UNLABELLED:
            none = f"none of the {plural(missing, 'image')} of split {name} has {what}: check where"
            yield f"{none} the labels are, or use kind `images` for images without labels"
        elif missing and not spec.detects and name != Split.UNLABELLED:
            some = f"{missing} of {plural(facts.samples, 'sample')} of split {name}"
            yield f"{some} {agreeing(missing, 'has|have')} no answer: add it or remove them"
    labels = {name: facts.labels for name, facts in splits.items() if facts.labels}
    learnt = labels.get(str(Split.TRAIN), labels.get("all"))
    if not spec.choice or spec.labels != "required" or learnt is None:
        return
    if len(learnt) == 1:
        yield f"there is only one class, {next(iter(learnt))!r}: add another"
    for name, used in labels.items():
        if strange := sorted(set(used) - set(learnt)):
            text = f"split {name} has labels that are not in {Split.TRAIN}"
            yield f"{text} ({', '.join(strange[:5])}): give all splits the same label set"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0, 1 if something is wrong with the data, or 2 for invalid arguments."""
    encode_all_output()
    options = _parser().parse_args(arguments)
    console, out = Console(), Path(options.out)
    try:
        if options.kind is None and is_shelf(Path(options.path)):
            return _check_shelf(Path(options.path), out, console)
        return 0 if check(_source(options), out, console) else 1
    except DataError as error:
        _say(Console(stderr=True), "[red]error:[/]", str(error))
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="valora-data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    about = "counts, labels, all faults, copies, leaks between splits, contact sheets"
    command = commands.add_parser("check", help=about, description=f"Check a data set: {about}.")
    command.add_argument("path", metavar="PATH", help="file, folder, or name on the hub")
    command.add_argument("--out", default=".valora/check", help="folder for pictures (%(default)s)")
    command.add_argument("--kind", help="format, such as coco; guessed from the path")
    command.add_argument("--task", choices=task_names(), help="task; guessed from the data")
    command.add_argument("--labels", help="labels, separated by commas; all by default")
    command.add_argument("--images", help="folder of the images")
    command.add_argument("--frames", type=int, default=4, help="frames taken of each video")
    command.add_argument(
        "--column", action="append", default=[], metavar="FIELD=NAME",
        help="name of a column, such as label=species; may be repeated",
    )  # fmt: skip
    return parser


def _source(options: argparse.Namespace) -> Source:
    kind, columns = options.kind or detect_kind(options.path), {}
    for column in options.column:
        name, equals, columns[name] = column.partition("=")
        if not equals:
            raise DataError(f"--column {column} names no column: write FIELD=NAME")
    task = Task(options.task) if options.task else FORMATS[kind]().guess_task(options.path)
    labels = tuple(label.strip() for label in options.labels.split(",")) if options.labels else ()
    return Source(
        kind, task, labels, path=options.path, images=options.images, columns=columns,
        frames=options.frames,
    )  # fmt: skip


def _check_shelf(folder: Path, out: Path, console: Console) -> int:
    shelf = read_shelf(folder)
    rows = [
        [name, model.task, ", ".join(model.labels[:SHOWN_LABELS]), model.weights,
         "" if model.score is None else f"{model.score:.3f}", model.data]
        for name, model in shelf.models.items()
    ]  # fmt: skip
    names = ("domain", "task", "labels", "teacher", "its score", "data")
    _show_table(console, f"{plural(len(rows), 'domain')} in {folder}", names, rows)
    for note in shelf.notes:
        _say(console, "[yellow]![/]", note)
    sound = True
    for name, model in shelf.models.items():
        console.print(f"\n[bold]{name}[/]")
        source = Source(model.kind, model.task, model.labels, name=name, path=str(model.data))
        sound &= check(source, out / name, console)
    _say(console, "\nfuse them:", f"make fuse TASK=own ARGS=shelf={folder}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
