"""`valora-data check` and `valora-data preview`: look at a data set before it is used."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.schema import Sample, Task
from valora_data.sources.shelf import is_shelf, read_shelf
from valora_data.tasks import task_names
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from valora_data.inspection import Inspection
    from valora_data.sources.base import Source

BAR = 30
SHOWN_LABELS = 20
SHOWN_PAIRS = 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Returns:
        0; 1 if something is wrong with the data; 2 for invalid arguments.
    """
    options = _parser().parse_args(arguments)
    from rich.console import Console

    console = Console()
    try:
        if options.command == "preview":
            return _preview(_source(options), options, console)
        if options.kind is None and is_shelf(Path(options.path)):
            return _check_shelf(Path(options.path), Path(options.out), console)
        return _check(_source(options), Path(options.out), console)
    except DataError as error:
        _say(Console(stderr=True), "[red]error:[/]", str(error))
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="valora-data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    about = "counts, labels, all faults, copies, leaks between splits"
    check = commands.add_parser("check", help=about)
    check.add_argument("--out", default=".valora/check", help="folder for pictures")
    preview = commands.add_parser("preview", help="write a contact sheet")
    preview.add_argument("--out", default="preview.png", help="PNG to write")
    preview.add_argument("--count", type=int, default=24, help="samples on the sheet")
    preview.add_argument("--limit", type=int, default=5000, help="samples to choose from")
    preview.add_argument("--split", help="only this split")
    preview.add_argument("--seed", type=int, default=0, help="another seed chooses others")
    for command in (check, preview):
        command.add_argument("path", metavar="PATH", help="file, folder, or name on the hub")
        command.add_argument("--kind", help="format, such as coco; guessed from the path")
        command.add_argument("--task", choices=task_names(), help="task; guessed from the data")
        command.add_argument("--labels", help="labels, separated by commas; all by default")
        command.add_argument("--images", help="folder of the images")
        command.add_argument("--annotations", help="file of answers to a file of VQA questions")
        command.add_argument("--frames", type=int, default=4, help="frames taken of each video")
        command.add_argument(
            "--column", action="append", default=[], metavar="FIELD=NAME",
            help="name of a column, such as label=species; may be repeated",
        )  # fmt: skip
    return parser


def _source(options: argparse.Namespace) -> Source:
    from valora_data.sources.base import Source
    from valora_data.sources.registry import FORMATS, detect_kind

    kind = options.kind or detect_kind(options.path)
    for column in options.column:
        if "=" not in column:
            raise DataError(f"--column {column} names no column: write FIELD=NAME")
    columns = dict(column.split("=", 1) for column in options.column)
    task = Task(options.task) if options.task else FORMATS[kind]().guess_task(options.path)
    labels = tuple(label.strip() for label in options.labels.split(",")) if options.labels else ()
    return Source(
        kind, task, labels, path=options.path, images=options.images,
        annotations=options.annotations, columns=columns, frames=options.frames,
    )  # fmt: skip


def _say(console: Console, sign: str, text: str) -> None:
    from rich.markup import escape

    console.print(f"{sign} {escape(text)}", highlight=False, soft_wrap=True)


def _check_shelf(folder: Path, out: Path, console: Console) -> int:
    """Show which domains a folder of small models would become, and check their data."""
    from rich.table import Table

    from valora_data.sources.base import Source

    shelf = read_shelf(folder)
    table = Table(title=f"{plural(len(shelf.models), 'domain')} in {folder}", title_justify="left")
    for name in ("domain", "task", "labels", "teacher", "its score", "data"):
        table.add_column(name, overflow="fold", justify="right" if name == "its score" else "left")
    for name, model in shelf.models.items():
        shown = ", ".join(model.labels[:SHOWN_LABELS])
        score = "" if model.score is None else f"{model.score:.3f}"
        table.add_row(name, model.task, shown, str(model.weights), score, str(model.data))
    console.print(table)
    for note in shelf.notes:
        _say(console, "[yellow]![/]", note)
    wrong = 0
    for name, model in shelf.models.items():
        console.print(f"\n[bold]{name}[/]")
        source = Source(model.kind, model.task, model.labels, name=name, path=str(model.data))
        wrong += _check(source, out / name, console)
    _say(console, "\nfuse them:", f"make fuse TASK=own ARGS=shelf={folder}")
    return 1 if wrong else 0


def _check(source: Source, out: Path, console: Console) -> int:
    from valora_data.drawing import contact_sheet, pair_sheet
    from valora_data.inspection import inspect, pictures_of

    examples: dict[str, _Reservoir] = {}
    with console.status(f"Reading {source.path} …"):
        found = inspect(
            source, lambda split, one: examples.setdefault(split, _Reservoir(18, 0)).offer(one)
        )
    _report(found, console)
    out.mkdir(parents=True, exist_ok=True)
    sheets = {split: contact_sheet(kept.samples) for split, kept in examples.items()}
    for name, leaks in (("leaks", True), ("duplicates", False)):
        pairs = [pair for pair in found.pairs if pair.leaks is leaks][:SHOWN_PAIRS]
        if pairs and (sheet := pair_sheet(pairs, pictures_of(source, pairs))):
            sheets[name] = sheet
    for name, sheet in sheets.items():
        sheet.save(out / f"{name}.png", compress_level=1)
        _say(console, "[dim]wrote[/]", str(out / f"{name}.png"))
    lines = [f"{fault.kind.name.lower()}\t{fault.text}\n" for fault in found.faults.found]
    lines += [f"copy\t{pair}\n" for pair in found.pairs]
    if lines:
        (out / "faults.tsv").write_text("".join(lines), encoding="utf-8")
        _say(console, "[dim]wrote[/]", str(out / "faults.tsv"))
    for sign, sentences in (("[yellow]![/]", found.notes), ("[red]✗[/]", found.problems)):
        for sentence in sentences:
            _say(console, sign, sentence)
    if not found.problems:
        noted = f"no faults; {plural(len(found.notes), 'note')} above"
        _say(console, "[green]✓[/]", noted if found.notes else "nothing is wrong")
    return 1 if found.problems else 0


def _report(found: Inspection, console: Console) -> None:
    from rich.table import Table

    table = Table(title=f"task {found.task}", title_justify="left")
    for name in ("split", "samples", "images", "answered"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for split, facts in found.splits.items():
        counts = (facts.samples, facts.images, facts.samples - facts.unanswered)
        table.add_row(split, *map(str, counts))
    console.print(table)
    total: Counter[str] = sum((facts.labels for facts in found.splits.values()), start=Counter())
    if not total:
        return
    table = Table(title=plural(len(total), "label"), title_justify="left")
    for name in ("label", *found.splits, ""):
        table.add_column(name, justify="right" if name in found.splits else "left")
    most = max(total.values())
    for label, count in total.most_common(SHOWN_LABELS):
        numbers = [str(facts.labels[label]) for facts in found.splits.values()]
        table.add_row(label, *numbers, "█" * max(1, round(BAR * count / most)))
    if len(total) > SHOWN_LABELS:
        table.add_row(f"… {len(total) - SHOWN_LABELS} more")
    console.print(table)


def _preview(source: Source, options: argparse.Namespace, console: Console) -> int:
    from valora_data.drawing import contact_sheet
    from valora_data.sources.registry import open_source

    if options.count < 1:
        raise DataError(f"--count must be at least 1, got {options.count}")
    kept = _Reservoir(options.count, options.seed)
    splits = {str(split or "all"): stream for split, stream in open_source(source).items()}
    if options.split and options.split not in splits:
        raise DataError(f"there is no split {options.split!r}, only {', '.join(splits)}: name one")
    streams = [stream for name, stream in splits.items() if options.split in (None, name)]
    for sample in islice((sample for stream in streams for sample in stream()), options.limit):
        kept.offer(sample)
    if not kept.samples:
        raise DataError(f"{options.path} holds no samples: there is nothing to show")
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(kept.samples).save(out, compress_level=1)
    console.print(f"{len(kept.samples)} of {plural(kept.seen, 'sample')} in {out}", highlight=False)
    return 0


class _Reservoir:
    """A uniform random choice of samples from a stream, in the stream's order."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._random = size, random.Random(seed)
        self._kept: list[tuple[int, Sample]] = []
        self.seen = 0

    def offer(self, sample: Sample) -> None:
        self.seen += 1
        if len(self._kept) < self._size:
            self._kept.append((self.seen, sample))
        elif (place := self._random.randrange(self.seen)) < self._size:
            self._kept[place] = (self.seen, sample)

    @property
    def samples(self) -> list[Sample]:
        return [sample for _, sample in sorted(self._kept, key=lambda entry: entry[0])]


if __name__ == "__main__":
    sys.exit(main())
