"""Ways to answer about documents, trained and measured side by side on the same questions.

`python -m tests.bench.valora_train.bench_context_ways --tokens 32 -- task.only=[ledger_1,ledger_2]`
reads the settings of `valora-train task=context`. What is measured is kept in `.valora/`, so that
an interrupted comparison continues with the next way; the table is in `ways.md` beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench.valora_train.context_table import COLUMNS, rows_of
from tests.bench.valora_train.context_ways import METHODS, REFERENCE, Reader
from tests.bench.valora_train.trials import prepared
from valora_data.contract.base_model import base_hash, processor_hash
from valora_data.errors import ValoraError
from valora_data.schema import Split, Task
from valora_train.errors import SettingsError
from valora_train.fusion.samples import make_deterministic
from valora_train.model.lmm import Lmm
from valora_train.reporting.progress import Display
from valora_train.reporting.texts import markdown_table
from valora_train.settings import Settings
from valora_train.stage import Stage, digest, intact, read_json, write_json
from valora_train.stages.distill import PSEUDO_LABELLED
from valora_train.stages.fuse import DomainInputs, domain_facts, training_facts

RESULTS, TABLE = "ways.json", "ways.md"


@dataclass(frozen=True)
class Measured:
    """A way of a size, as it was measured.

    Attributes:
        method: Name in `METHODS`.
        size: Tokens that were asked for; 0 where the way has no size.
        said: Each answer with whether it is right, by document.
        bytes: Bytes that are kept for a document.
        tokens: Tokens that stand before a question, on average.
        seconds: Seconds of learning for a document.
    """

    method: str
    size: int
    said: dict[str, list[tuple[str, bool]]]
    bytes: float
    tokens: float
    seconds: float


def asked_for(
    settings: Settings, methods: Sequence[str], tokens: Sequence[int]
) -> list[tuple[str, int]]:
    """The ways and sizes to measure; the one that others are compared with comes first.

    Raises:
        SettingsError: A domain is no document, or a way needs more documents.
    """
    domains = settings.chosen()
    for domain in domains:
        if domain.task is not Task.CONTEXT:
            raise SettingsError(f"domain {domain.name} is of task {domain.task}, not of context")
    for name in methods:
        if len(domains) < METHODS[name].documents:
            raise SettingsError(f"{name} needs {METHODS[name].documents} documents: choose more")
    names = methods or [name for name in METHODS if METHODS[name].documents <= len(domains)]
    names = [REFERENCE, *(name for name in names if name != REFERENCE)]
    return [(name, size) for name in names for size in (tokens if METHODS[name].sized else [0])]


def stage_of(
    settings: Settings, domains: Sequence[DomainInputs], asked: Sequence[tuple[str, int]]
) -> Stage:
    """The stage that compares ways to answer about the documents."""
    base = settings.model.id
    inputs = {"base": base_hash(base), "processor": processor_hash(base)}
    for item in domains:
        inputs[f"{item.settings.name}/taught"] = digest(item.distilled / PSEUDO_LABELLED)
        inputs[f"{item.settings.name}/test"] = digest(item.data / Split.TEST)
    values: dict[str, Any] = training_facts(settings) | {"asked": [list(one) for one in asked]}
    values["domains"] = [domain_facts(item.settings) for item in domains]
    return Stage(f"ways-{settings.task.name}", 1, values, inputs, resumable=True)


def measure(
    settings: Settings,
    domains: Sequence[DomainInputs],
    asked: Sequence[tuple[str, int]],
    folder: Path,
    display: Display,
) -> None:
    """Measure what is missing, and write the table into the stage's folder."""
    make_deterministic(settings.train.threads)
    found = read(folder) if (folder / RESULTS).is_file() else []
    done = {(one.method, one.size) for one in found}
    lmm = Lmm(settings.model, settings.train.lora)
    data = {item.settings.name: item.load(settings, lmm) for item in domains}
    Reader(settings, lmm, data, lambda *_: None).check(max(size for _, size in asked))
    for name, size in asked:
        if (name, size) in done:
            continue
        title = METHODS[name].title + (f", {size} tokens" if size else "")
        with display.work("ways", title) as on_step:
            answered = METHODS[name].run(Reader(settings, lmm, data, on_step), size)
        found.append(Measured(name, size, **asdict(answered)))
        write_json(folder / RESULTS, [asdict(one) for one in found])
        (row,) = rows_of(found[-1:], METHODS, REFERENCE)
        display.note("ways", f"{title}: {row[COLUMNS.index('accuracy (95 %)')]}")
    rows = rows_of(found, METHODS, REFERENCE)
    (folder / TABLE).write_text("\n".join(markdown_table(COLUMNS, rows)) + "\n", encoding="utf-8")


def read(folder: Path) -> list[Measured]:
    """What was measured."""
    return [Measured(**row) for row in read_json(intact(folder / RESULTS))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=[], metavar="WAY")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("overrides", nargs="*", help="settings of valora-train, such as task.only")
    given = parser.parse_args(arguments)
    overrides = ["task=context", *given.overrides]
    settings, domains = prepared(overrides)
    asked = asked_for(settings, given.methods, given.tokens)
    display = Display(Console(width=160, stderr=True))
    with display():
        stage = stage_of(settings, domains, asked)
        work = Path(settings.paths.work)
        folder, _ = stage.run(work, lambda out: measure(settings, domains, asked, out, display))
    print((folder / TABLE).read_text(encoding="utf-8"))


if __name__ == "__main__":
    try:
        main()
    except ValoraError as error:
        sys.exit(f"error: {error}")
