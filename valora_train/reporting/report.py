"""The table at the end: what each domain needed and got, and where to look next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from valora_data.contract.bundle import Bundle


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural where it needs one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_report(bundle: Bundle, console: Console, seconds: float) -> None:
    """Print what a bundle promises.

    Args:
        bundle: The bundle.
        console: Where to print.
        seconds: How long it all took.
    """
    table = Table(title=f"{bundle.name}, version {bundle.version}", title_style="bold")
    columns = (
        "domain", "metric", "teacher", "required", "validation", "test (95 %)", "without LoRA",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    table.add_column("adapter")
    for name, facts in bundle.domains.items():
        accuracy = facts["accuracy"]
        low, high = accuracy["test_ci95"]
        colour = "green" if facts["status"] == "met" else "red"
        teacher = "–" if accuracy["teacher"] is None else f"{accuracy['teacher']:.3f}"
        table.add_row(
            name,
            facts["metric"],
            teacher,
            f"{facts['required']:.3f}",
            f"{accuracy['val']:.3f}",
            f"[{colour}]{accuracy['test']:.3f}[/] ({low:.3f}–{high:.3f})",
            f"{accuracy['head_only']:.3f}",
            facts["adapter"],
        )
    console.print(table)
    met = sum(facts["status"] == "met" for facts in bundle.domains.values())
    console.print(
        f"{met} of {counted(len(bundle.domains), 'domain')} at their requirement on test, in "
        f"{counted(len(bundle.adapters), 'adapter')} after "
        f"{counted(bundle.manifest['attempts'], 'attempt')} "
        f"({seconds:.0f} s).\n"
        f"Bundle: {bundle.folder}/README.md    Every step: mlflow ui, then "
        f"experiment valora/{bundle.name}",
        highlight=False,
    )
