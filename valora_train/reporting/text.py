"""Words for people: counts with their nouns, and tables in markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def plural(number: int, noun: str) -> str:
    """A number with its noun, e.g. ``1 adapter`` or ``2 adapters``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def accuracy_text(accuracy: float | None) -> str:
    """An accuracy with three decimals, or a dash where there is none."""
    return "–" if accuracy is None else f"{accuracy:.3f}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a markdown table."""
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
