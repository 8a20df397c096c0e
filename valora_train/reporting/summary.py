"""The summary at the end of a run: accuracy and requirement of every domain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from valora_data.wording import plural
from valora_train.reporting.domain_table import BESIDE_OTHERS, PROMISES, domain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from valora_data.contract.bundle import Bundle


LEFT = ("domain", "metric", "adapter", "other metrics")
"""Columns that are aligned to the left."""


def _table(bundle: Bundle, title: str, columns: Sequence[str]) -> Table:
    """A table with one line for each domain of a bundle."""
    table = Table(title=title, title_style="bold")
    titles, rows = domain_table(bundle.domains, bundle.adapters, columns)
    for column in titles:
        table.add_column(column, justify="left" if column in LEFT else "right")
    for row, facts in zip(rows, bundle.domains.values(), strict=True):
        colour = "green" if facts["status"] == "met" else "red"
        cells = [
            f"[{colour}]{text}[/]" if column.startswith("test") else escape(text)
            for column, text in zip(titles, row, strict=True)
        ]
        table.add_row(*cells)
    return table


def print_summary(bundle: Bundle, console: Console, seconds: float, link: str | None) -> None:
    """Print the accuracies that a bundle promises.

    Args:
        bundle: The bundle.
        console: The console to print to.
        seconds: Duration of the whole run, in seconds.
        link: Address of the fusion's run in MLflow's pages; None if there is none.
    """
    title = f"{bundle.name}, version {bundle.version}"
    console.print(_table(bundle, title, PROMISES))
    beside = _table(bundle, "beside dedicated adapters and teachers", ("domain", *BESIDE_OTHERS))
    if len(beside.columns) > 1:
        console.print(beside)
    if rejected := bundle.manifest.get("rejected"):
        console.print("Rejected attempts", style="bold")
        for line in rejected:
            console.print(line.replace("**", ""), markup=False, highlight=False)
    met = sum(facts["status"] == "met" for facts in bundle.domains.values())
    console.print(
        f"{met} of {plural(len(bundle.domains), 'domain')} at their requirement on test, in "
        f"{plural(len(bundle.adapters), 'adapter')} after "
        f"{plural(bundle.manifest['attempts'], 'attempt')} "
        f"({seconds:.0f} s).\n"
        f"Bundle: {bundle.folder}/README.md",
        highlight=False,
    )
    if link is not None:
        console.print(
            f"Every step: {link}\n(after `make ui`, or `mlflow ui`)",
            highlight=False,
            soft_wrap=True,
        )
