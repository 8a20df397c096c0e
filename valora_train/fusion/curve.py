"""Accuracy against the number of domains in one adapter (VaLoRA, Figure 5), from a fusion's steps.

``python -m valora_train.fusion.curve STAGE`` reads what a fusion decided (the output of a `fuse`
stage) and prints a table; `--picture` also draws it. For the whole curve, let all domains into one
adapter: ``valora-train command=fuse fusion.margin=-10``, which `make curve TASK=x` does.
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
from valora_train.stage import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

PAPER = 4.0
"""Domains that the paper packs into an adapter, on average."""


@dataclass(frozen=True)
class Point:
    """What an adapter reaches when it holds so many domains.

    Attributes:
        held: How many.
        accuracy: Of each of them on validation.
    """

    held: int
    accuracy: dict[str, float]

    @property
    def mean(self) -> float:
        """The mean over the domains."""
        return sum(self.accuracy.values()) / len(self.accuracy)


def curve_of(result: Mapping[str, Any], adapter: str = "adapter-1") -> list[Point]:
    """The points of one adapter, every attempt on it included, rolled back or not.

    Args:
        result: Content of ``fusion.json``.
        adapter: Which.
    """
    return [
        Point(len(attempt["accuracy"]), dict(attempt["accuracy"]))
        for attempt in result["attempts"]
        if attempt["adapter"] == adapter
    ]


def _names(points: Sequence[Point]) -> list[str]:
    """All domains in the order of their attempts; one that was rolled back has one point."""
    return list(dict.fromkeys(name for point in points for name in point.accuracy))


def table(points: Sequence[Point]) -> str:
    """The points as a markdown table."""
    names = _names(points)
    lines = [
        f"| domains | mean | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for point in points:
        cells = [f"{point.accuracy[n]:.3f}" if n in point.accuracy else "" for n in names]
        lines.append(f"| {point.held} | {point.mean:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(points: Sequence[Point], title: str) -> Figure:
    """The curve: each domain in a colour, their mean dashed."""
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
    """Mean number of domains that an adapter holds; the paper's is `PAPER`."""
    packing = result["packing"]
    return sum(len(names) for names in packing.values()) / max(len(packing), 1)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", type=Path, help="output of a fuse stage")
    parser.add_argument("--adapter", default="adapter-1")
    parser.add_argument("--picture", type=Path, help="where to put a PNG")
    arguments = parser.parse_args()
    try:
        file = arguments.stage / FUSION
        if not file.is_file():
            raise StageError(
                f"{arguments.stage} holds no {FUSION}: name the output of a fuse stage"
            )
        result = read_json(file)
        points = curve_of(result, arguments.adapter)
        if not points:
            raise StageError(f"nothing was tried on {arguments.adapter}: choose another adapter")
    except ValoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(points))
    print(f"\n{domains_per_adapter(result):.1f} domains per adapter here, {PAPER:.0f} in the paper")
    if arguments.picture is not None:
        task = arguments.stage.name.removeprefix("fuse-").rpartition("-")[0]
        picture(points, task).savefig(arguments.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
