"""Ways to serve the domains of a task, as one table and one picture."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import TYPE_CHECKING

from valora_train.trials.comparison import pareto

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from valora_train.trials.comparison import Contender

COLUMNS = (
    "method", "adapters", "worst share", "mean share", "domains kept", "attempts", "minutes",
)  # fmt: skip


def by_name(contenders: Sequence[Contender]) -> dict[str, list[Contender]]:
    """The seeds of each contender."""
    found: dict[str, list[Contender]] = defaultdict(list)
    for one in contenders:
        found[one.name].append(one)
    return dict(found)


def comparison_rows(contenders: Sequence[Contender]) -> list[list[str]]:
    """The rows of the table with `COLUMNS`: means over seeds, the worst share also of any seed."""
    rows = []
    minutes = _minutes(contenders)
    for name, seeds in by_name(contenders).items():
        kept = [one.kept for one in seeds if one.kept is not None]
        worst = [one.worst for one in seeds]
        rows.append(
            [
                name,
                _number(fmean(one.adapters for one in seeds)),
                f"{fmean(worst):.3f} ({min(worst):.3f}–{max(worst):.3f})",
                f"{fmean(one.mean for one in seeds):.3f}",
                _number(fmean(kept)) if kept else "–",
                _number(fmean(one.attempts for one in seeds)),
                minutes[name],
            ]
        )
    return rows


def _minutes(contenders: Sequence[Contender], unit: str = "") -> dict[str, str]:
    """Mean minutes by name, with the device where not all were trained on one: ``1.5 (cuda)``.

    Args:
        contenders: Every way and seed.
        unit: Follows the number.
    """
    several = len({one.device for one in contenders}) > 1
    found = {}
    for name, seeds in by_name(contenders).items():
        devices = sorted({part for one in seeds for part in one.device.split(", ")})
        where = f" ({', '.join(devices)})" if several else ""
        found[name] = f"{fmean(one.minutes for one in seeds):.1f}{unit}{where}"
    return found


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def pareto_picture(contenders: Sequence[Contender], title: str) -> Figure:
    """Adapters against the worst domain's share of its dedicated adapter; areas are minutes."""
    from matplotlib.figure import Figure

    groups, told = by_name(contenders), _minutes(contenders, " min")
    points = [
        (fmean(one.adapters for one in seeds), fmean(one.worst for one in seeds))
        for seeds in groups.values()
    ]
    figure = Figure(figsize=(11, 6.5), dpi=110)
    axes = figure.add_subplot()
    front = pareto(points)
    axes.step(
        [points[at][0] for at in front], [points[at][1] for at in front], where="post",
        color="#9e9e9e", zorder=1, label="no other needs fewer adapters for that share",
    )  # fmt: skip
    for place, ((name, seeds), (x, y)) in enumerate(zip(groups.items(), points, strict=True)):
        minutes = fmean(one.minutes for one in seeds)
        colour = f"C{place % 10}"
        worst = [one.worst for one in seeds]
        axes.vlines(x, min(worst), max(worst), color=colour, zorder=2)
        axes.scatter(
            x, y, s=25 + 8 * minutes, color=colour, edgecolor="black", zorder=3,
            marker="os^Dv"[place // 10 % 5],
            label=f"{name}, {told[name]}",
        )  # fmt: skip
    axes.set_xlabel("adapters (mean over seeds)")
    axes.set_ylabel("worst domain's share of its dedicated adapter, test")
    axes.set_title(f"{title} (lines: all seeds; areas: minutes)")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()
    return figure
