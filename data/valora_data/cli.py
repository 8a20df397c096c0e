"""`valora-data check`: look at a data set before it is used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.schema import Task
from valora_data.sources.shelf import is_shelf, read_shelf
from valora_data.tasks import task_names
from valora_data.wording import plural

if TYPE_CHECKING:
    from rich.console import Console

    from valora_data.sources.base import Source

SHOWN_LABELS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0, 1 if something is wrong with the data, or 2 for invalid arguments."""
    options = _parser().parse_args(arguments)
    from rich.console import Console

    from valora_data.check import check, say

    console, out = Console(), Path(options.out)
    try:
        if options.kind is None and is_shelf(Path(options.path)):
            return _check_shelf(Path(options.path), out, console)
        return 0 if check(_source(options), out, console) else 1
    except DataError as error:
        say(Console(stderr=True), "[red]error:[/]", str(error))
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="valora-data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    about = "counts, labels, all faults, copies, leaks between splits, contact sheets"
    command = commands.add_parser("check", help=about)
    command.add_argument("path", metavar="PATH", help="file, folder, or name on the hub")
    command.add_argument("--out", default=".valora/check", help="folder for pictures")
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
        kind, task, labels, path=options.path, images=options.images, columns=columns,
        frames=options.frames,
    )  # fmt: skip


def _check_shelf(folder: Path, out: Path, console: Console) -> int:
    """Show which domains a folder of small models would become, and check their data."""
    from valora_data.check import check, say, show_table
    from valora_data.sources.base import Source

    shelf = read_shelf(folder)
    rows = [
        [name, model.task, ", ".join(model.labels[:SHOWN_LABELS]), model.weights,
         "" if model.score is None else f"{model.score:.3f}", model.data]
        for name, model in shelf.models.items()
    ]  # fmt: skip
    names = ("domain", "task", "labels", "teacher", "its score", "data")
    columns = {name: name == "its score" for name in names}
    show_table(console, f"{plural(len(rows), 'domain')} in {folder}", columns, rows)
    for note in shelf.notes:
        say(console, "[yellow]![/]", note)
    sound = True
    for name, model in shelf.models.items():
        console.print(f"\n[bold]{name}[/]")
        source = Source(model.kind, model.task, model.labels, name=name, path=str(model.data))
        sound &= check(source, out / name, console)
    say(console, "\nfuse them:", f"make fuse TASK=own ARGS=shelf={folder}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
