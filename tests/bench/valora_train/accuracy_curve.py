"""Accuracy against the number of domains in one adapter (VaLoRA, Figure 5).

``python -m tests.bench.valora_train.accuracy_curve STAGE`` reads the decisions of a fusion from the
output folder of its `fuse` stage and prints a table; `--picture` also plots it. `make curve TASK=x`
packs all domains into one adapter, whatever it costs, and does both.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from valora_train.fusion.state import FUSION
from valora_train.reporting.texts import markdown_table
from valora_train.stage import read_json


def main() -> None:
    """Print the table, and draw the figure if `--picture` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", type=Path, help="output folder of a fuse stage")
    parser.add_argument("--adapter", default="adapter-1", help="name of the adapter")
    parser.add_argument("--picture", type=Path, help="PNG file to write")
    given = parser.parse_args()
    if not (given.stage / FUSION).is_file():
        sys.exit(f"error: {given.stage} holds no {FUSION}: give the output folder of a fuse stage")
    result = read_json(given.stage / FUSION)
    points = [  # also those that were rolled back, but none that diverged
        attempt["accuracy"]
        for attempt in result["attempts"]
        if attempt["adapter"] == given.adapter and None not in attempt["accuracy"].values()
    ]
    if not points:
        sys.exit(f"error: there is no attempt on {given.adapter}: give another --adapter")
    names = list(dict.fromkeys(name for point in points for name in point))
    rows = [
        [str(len(point)), f"{fmean(point.values()):.3f}"]
        + [f"{point[name]:.3f}" if name in point else "" for name in names]
        for point in points
    ]
    print("\n".join(markdown_table(("domains", "mean", *names), rows)))
    if given.picture is not None:
        task = given.stage.name.removeprefix("fuse-").rpartition("-")[0]
        draw(points, names, task).savefig(given.picture)


def draw(points: list[dict[str, float]], names: list[str], title: str) -> Figure:
    """Accuracy of each domain, and their mean, in each attempt on the adapter."""
    figure = Figure(figsize=(6, 3), dpi=110)
    axes = figure.add_subplot(
        title=title, xlabel="domains in the adapter", ylabel="accuracy on validation"
    )
    for name in names:
        mine = [point for point in points if name in point]
        axes.plot([len(one) for one in mine], [one[name] for one in mine], marker="o", label=name)
    held = [len(point) for point in points]
    axes.plot(held, [fmean(point.values()) for point in points], "k--", label="mean")
    axes.set_xticks(held)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
