"""Words for people: shares, sizes and sentences, and tables in markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def joined(names: Sequence[str]) -> str:
    """Names in a sentence: ``a``, ``a and b`` or ``a, b and c``."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def duration(seconds: float) -> str:
    """A duration: ``38 s``, ``12 min 05 s`` or ``3 h 20 min``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def fitting(sections: Sequence[Sequence[str]], most: int, where: str) -> str:
    """Join sections of lines; where that is too long, the longest ones lose their last lines.

    Args:
        sections: Lines of each section.
        most: Most characters.
        where: Place that has everything, which a shortened section names.
    """
    left = [list(lines) for lines in sections]
    cut = [0] * len(left)

    def text() -> str:
        return "\n".join(
            line
            for lines, gone in zip(left, cut, strict=True)
            for line in (*lines, *([f"… and {gone} more: {where}"] if gone else []))
        )

    while len(text()) > most and any(left):
        longest = max(range(len(left)), key=lambda place: sum(map(len, left[place])))
        left[longest].pop()
        cut[longest] += 1
    return text()


def accuracy_text(accuracy: float | None) -> str:
    """An accuracy with three decimals, or a dash where there is none."""
    return "–" if accuracy is None else f"{accuracy:.3f}"


def share_text(part: float, whole: float) -> str:
    """A share in percent, e.g. ``97 %``; a dash where the whole is nothing."""
    return f"{part / whole:.0%}".replace("%", " %") if whole > 0 else "–"


def bytes_text(size: int) -> str:
    """A number of bytes with two digits, e.g. ``640 kB`` or ``1.2 MB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            amount = size / factor
            return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
    return f"{size} B"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a markdown table."""
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
