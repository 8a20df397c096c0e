"""Ways to serve the domains of a task, trained and measured side by side.

`python -m tests.bench.valora_train.bench_compare --strategies affinity paper -- task=vqa` trains
dedicated adapters, one joint adapter, heads without LoRA, merged adapters, EWC and fusions, and
prints a table; `--picture FILE` draws adapters against the worst domain's share.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tests.bench.valora_train.trials import Trial, prepared, run_trials
from valora_train.reporting.texts import markdown_table

COLUMNS = (
    "way", "adapters", "worst domain's share on test", "mean share", "domains that keep theirs",
    "trainings", "minutes",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """What one way of serving the domains reaches with one seed."""

    adapters: int
    shares: list[float]  # of its dedicated adapter's accuracy that each domain keeps on test
    attempts: int
    minutes: float  # of training and measuring, in one process
    kept: int | None  # domains that keep the share that is asked for
    device: str


def ways(
    results: list[dict[str, Any]], alone: Mapping[int, Mapping[str, Mapping[str, float]]]
) -> dict[str, list[Way]]:
    """Every way with one entry for each seed."""
    found: dict[str, list[Way]] = defaultdict(list)

    def add(name: str, rows: list[dict[str, Any]], accuracy: Any, adapters: int) -> None:
        dedicated = alone[rows[0]["seed"]]
        shares = [accuracy[one]["test"] / dedicated[one]["test"] for one in dedicated]
        share = rows[0]["options"].get("share")
        found[name].append(Way(
            adapters, shares, sum(row["attempts"] for row in rows),
            sum(row["seconds"] for row in rows) / 60,
            None if share is None else sum(one >= share for one in shares), rows[0]["device"],
        ))  # fmt: skip

    for seed, dedicated in alone.items():
        mine = [row for row in results if row["seed"] == seed]
        single = [row for row in mine if row["method"] == "joint" and len(row["domains"]) == 1]
        add("dedicated adapters", single, dedicated, len(single))
        without = [row for row in mine if row["method"] == "head_only"]
        add("without LoRA", without, {n: one for r in without for n, one in r["accuracy"].items()},
            0)  # fmt: skip
        for row in mine:
            options = row["options"]
            if row["method"] == "merge":
                for way, one in row["variants"].items():
                    add(f"merged: {way}", [row | one], one["accuracy"], 1)
            elif row["method"] == "ewc":
                add(f"EWC, strength {options['strength']:g}", [row], row["accuracy"], 1)
            elif row["method"] == "fusion":
                name = f"`{options['fusion']['strategy']}` at {options['share']:.0%}"
                add(name, [row], row["accuracy"], row["adapters"])
            elif len(row["domains"]) == len(dedicated) > 1:
                add("one joint adapter", [row], row["accuracy"], 1)
    return found


def rows_of(found: Mapping[str, list[Way]]) -> list[list[str]]:
    """The rows of the table with `COLUMNS`: means over seeds, the worst share also of any seed."""
    rows = []
    for name, seeds in found.items():
        worst = [min(one.shares) for one in seeds]
        kept = [one.kept for one in seeds if one.kept is not None]
        devices = ", ".join(sorted({one.device for one in seeds}))
        spread = f" ({min(worst):.3f}–{max(worst):.3f})" if len(seeds) > 1 else ""
        rows.append([
            name,
            f"{fmean(one.adapters for one in seeds):.3g}",
            f"{fmean(worst):.3f}{spread}",
            f"{fmean(fmean(one.shares) for one in seeds):.3f}",
            f"{fmean(kept):.3g}" if kept else "–",
            f"{fmean(one.attempts for one in seeds):.3g}",
            f"{fmean(one.minutes for one in seeds):.1f} ({devices})",
        ])  # fmt: skip
    return rows


def draw(found: Mapping[str, list[Way]], file: str) -> None:
    """Adapters against the worst domain's share of its dedicated adapter; areas are minutes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), dpi=110)
    axes = figure.add_subplot()
    for place, (name, seeds) in enumerate(found.items()):
        worst, adapters = [min(one.shares) for one in seeds], fmean(one.adapters for one in seeds)
        minutes, colour = fmean(one.minutes for one in seeds), f"C{place % 10}"
        axes.vlines(adapters, min(worst), max(worst), colour)
        axes.scatter(
            adapters, fmean(worst), s=25 + 8 * minutes, color=colour, edgecolor="black",
            marker="os^Dv"[place // 10 % 5], label=f"{name}, {minutes:.1f} min",
        )  # fmt: skip
    axes.set(xlabel="adapters", ylabel="worst domain's share of its dedicated adapter, test")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.savefig(file, bbox_inches="tight")


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--strategies", nargs="*", default=["paper", "first_fit", "rehearsal"])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.95])
    parser.add_argument("--ewc", type=float, nargs="*", default=[100.0, 10_000.0])
    parser.add_argument("--no-merge", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--picture")
    parser.add_argument("overrides", nargs="+", help="settings of valora-train, such as task=vqa")
    given = parser.parse_args()
    settings, domains = prepared(given.overrides)
    names = tuple(item.settings.name for item in domains)
    trials = [
        trial
        for seed in given.seeds
        for trial in (
            *(Trial(way, (name,), seed) for way in ("joint", "head_only") for name in names),
            Trial("joint", tuple(sorted(names)), seed),  # as in an oracle
            *([] if given.no_merge else [Trial("merge", names, seed)]),
            *(Trial("ewc", names, seed, {"strength": value}) for value in given.ewc),
        )
    ]
    results = run_trials(settings, domains, trials, given.processes)
    alone: dict[int, dict[str, Any]] = {seed: {} for seed in given.seeds}
    for row in results:
        if row["method"] == "joint" and len(row["domains"]) == 1:
            alone[row["seed"]] |= row["accuracy"]
    largest = {item.settings.name: item.settings.domain().task.spec.largest for item in domains}
    fusions = []
    for seed, share, strategy in (
        (seed, share, name)
        for seed in given.seeds for share in given.shares for name in given.strategies
    ):  # fmt: skip
        paper = strategy == "paper"
        asked = {n: (round(share * alone[seed][n]["val"], 6), 0.0, largest[n]) for n in names}
        chosen = {
            "strategy": strategy, "order": "random" if paper else settings.fusion.order,
            "head_only": settings.fusion.head_only and not paper,
        }  # fmt: skip
        options = {"fusion": chosen, "required": asked, "share": share}
        fusions.append(Trial("fusion", names, seed, options))
    results += run_trials(settings, domains, fusions, given.processes)
    found = ways(results, alone)
    print("\n".join(markdown_table(COLUMNS, rows_of(found))))
    if given.picture:
        draw(found, given.picture)


if __name__ == "__main__":
    main()
