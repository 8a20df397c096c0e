"""The summary at the end of a run: accuracy and requirement of every domain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from valora_train.reporting.text import accuracy_text, plural

if TYPE_CHECKING:
    from rich.console import Console

    from valora_data.contract.bundle import Bundle


def print_summary(bundle: Bundle, console: Console, seconds: float, link: str | None) -> None:
    """Print the accuracies that a bundle promises.

    Args:
        bundle: The bundle.
        console: The console to print to.
        seconds: Duration of the whole run, in seconds.
        link: Address of the fusion's run in MLflow's pages; None if there is none.
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
        table.add_row(
            name,
            facts["metric"],
            accuracy_text(accuracy["teacher"]),
            f"{facts['required']:.3f}",
            f"{accuracy['val']:.3f}",
            f"[{colour}]{accuracy['test']:.3f}[/] ({low:.3f}–{high:.3f})",
            f"{accuracy['head_only']:.3f}",
            facts["adapter"] or "none",
        )
    console.print(table)
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
