"""Accuracy against the number of domains in one adapter (VaLoRA, Figure 5).

``python -m valora_train.reporting.accuracy_curve STAGE`` reads the decisions of a fusion from the
output folder of its `fuse` stage and prints a table; `--picture` also plots it. To pack all domains
into one adapter, whatever it costs, fuse with ``fusion.margin=-10 fusion.head_only=false``, as
`make curve TASK=x` does.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import ValoraError
from valora_train.errors import StageError
from valora_train.fusion.state import FUSION
from valora_train.reporting.text import markdown_table
from valora_train.stage import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

PAPER_DOMAINS_PER_ADAPTER = 4.0
"""Mean number of domains that the paper packs into an adapter."""


@dataclass(frozen=True)
class Point:
    """Accuracy of an adapter that holds a number of domains.

    Attributes:
        held: Number of domains.
        accuracy: Accuracy of each domain on the validation split.
    """

    held: int
    accuracy: dict[str, float]

    @property
    def mean(self) -> float:
        """Mean accuracy over the domains."""
        return sum(self.accuracy.values()) / len(self.accuracy)


def curve_points(result: Mapping[str, Any], adapter: str = "adapter-1") -> list[Point]:
    """One point for every attempt on an adapter, also those that were rolled back.

    Attempts whose training diverged are left out.

    Args:
        result: Content of ``fusion.json``.
        adapter: Name of the adapter.
    """
    return [
        Point(len(attempt["accuracy"]), dict(attempt["accuracy"]))
        for attempt in result["attempts"]
        if attempt["adapter"] == adapter and None not in attempt["accuracy"].values()
    ]


def _names(points: Sequence[Point]) -> list[str]:
    """All domains in the order of their attempts, also those that were rolled back."""
    return list(dict.fromkeys(name for point in points for name in point.accuracy))


def curve_table(points: Sequence[Point]) -> str:
    """The points as a markdown table."""
    names = _names(points)
    rows = [
        (
            str(point.held),
            f"{point.mean:.3f}",
            *(f"{point.accuracy[n]:.3f}" if n in point.accuracy else "" for n in names),
        )
        for point in points
    ]
    return "\n".join(markdown_table(("domains", "mean", *names), rows))


def curve_figure(points: Sequence[Point], title: str) -> Figure:
    """A plot of the points: each domain in a colour, their mean dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), dpi=90)
    axes = figure.add_subplot()
    for name in _names(points):
        mine = [point for point in points if name in point.accuracy]
        axes.plot([p.held for p in mine], [p.accuracy[name] for p in mine], marker="o", label=name)
    axes.plot([p.held for p in points], [p.mean for p in points], "k--", label="mean")
    axes.set_xlabel("domains in the adapter")
    axes.set_ylabel("accuracy on validation")
    axes.set_xticks([p.held for p in points])
    axes.set_title(title)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def domains_per_adapter(result: Mapping[str, Any]) -> float:
    """Mean number of domains per adapter."""
    packing = result["packing"]
    return sum(len(names) for names in packing.values()) / max(len(packing), 1)


def main() -> int:
    """Print the table, and draw the figure if `--picture` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", type=Path, help="output folder of a fuse stage")
    parser.add_argument("--adapter", default="adapter-1", help="name of the adapter")
    parser.add_argument("--picture", type=Path, help="PNG file to write")
    arguments = parser.parse_args()
    try:
        file = arguments.stage / FUSION
        if not file.is_file():
            raise StageError(
                f"{arguments.stage} holds no {FUSION}: give the output folder of a fuse stage"
            )
        result = read_json(file)
        points = curve_points(result, arguments.adapter)
        if not points:
            raise StageError(f"there is no attempt on {arguments.adapter}: give another --adapter")
    except ValoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(curve_table(points))
    here, paper = domains_per_adapter(result), PAPER_DOMAINS_PER_ADAPTER
    print(f"\n{here:.1f} domains per adapter here, {paper:.0f} in the paper")
    if arguments.picture is not None:
        task = arguments.stage.name.removeprefix("fuse-").rpartition("-")[0]
        curve_figure(points, task).savefig(arguments.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
