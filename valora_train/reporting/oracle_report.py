"""What an oracle table says, in the terminal and in MLflow."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

from valora_data.wording import plural
from valora_train.fusion.exact import exact_packing
from valora_train.fusion.replay import (
    asked_of,
    compare,
    random_requirements,
    replay,
    served,
    share_requirements,
)
from valora_train.fusion.strategies.registry import STRATEGIES, make_strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rich.console import Console

    from valora_train.fusion.exact import Bound, Optimum
    from valora_train.fusion.oracle import OracleTable
    from valora_train.fusion.requirement import Requirement
    from valora_train.reporting.study import StudyRun
    from valora_train.settings import FusionSettings, OracleSettings

OPTIMUM = ("seed", "adapters", "packing", "without LoRA", "out of reach", "kept on test")


def packing_text(packing: Sequence[Sequence[str]]) -> str:
    """Adapters for people, e.g. ``person + vehicle | bicycle``."""
    return " | ".join(" + ".join(group) for group in packing) or "–"


def optimum_text(found: Optimum) -> str:
    """An exact packing for people; domains that only help to train an adapter in brackets."""
    groups = []
    for group, trained in zip(found.packing, found.trained, strict=True):
        helpers = [name for name in trained if name not in group]
        groups.append([*group[:-1], group[-1] + f" (beside {', '.join(helpers)})" * bool(helpers)])
    return packing_text(groups)


def optimum_row(
    table: OracleTable, seed: int, found: Optimum, requirements: Mapping[str, Requirement]
) -> list[str]:
    """The row of an exact packing in the table with the columns `OPTIMUM`."""
    reached = served(table, found.packing, found.trained, seed)
    kept = [name for name, asked in requirements.items() if asked.kept_by(reached[name]._asdict())]
    return [
        str(seed),
        str(len(found.packing)),
        optimum_text(found),
        ", ".join(found.head_only) or "–",
        ", ".join(found.unreachable) or "–",
        f"{len(kept)} of {len(requirements)}",
    ]


def report_oracle(
    table: OracleTable,
    contracts: Mapping[str, Requirement],
    oracle: OracleSettings,
    fusion: FusionSettings,
    console: Console,
    run: StudyRun,
) -> None:
    """Print and log all that a complete table says.

    Args:
        table: The table.
        contracts: What each domain must reach by its contract.
        oracle: Random vectors of requirements, and shares of the dedicated adapters' accuracy.
        fusion: Margin, order of the domains, whether they may take no adapter, and whether they
            must keep a share of their dedicated adapters instead of their contracts.
        console: The console to print to.
        run: The run to log to.
    """
    report_table(table, asked_of(table, contracts, fusion), fusion.head_only, console, run)
    report_strategies(table, oracle.requirements, fusion, console, run)
    if oracle.shares:
        report_shares(table, oracle.shares, fusion, console, run)


def report_table(
    table: OracleTable,
    requirements: Mapping[int, Mapping[str, Requirement]],
    head_only: bool,
    console: Console,
    run: StudyRun,
) -> None:
    """Print and log the fewest adapters for some requirements.

    Args:
        table: The table.
        requirements: What each domain must reach, by seed.
        head_only: Whether a domain that keeps its requirement without LoRA takes no adapter.
        console: The console to print to.
        run: The run to log to.
    """
    found = {
        seed: exact_packing(table, asked, seed, head_only=head_only)
        for seed, asked in requirements.items()
    }
    rows = [optimum_row(table, seed, one, requirements[seed]) for seed, one in found.items()]
    title = f"The fewest adapters of {table.task}, by its oracle table"
    print_table(console, title, OPTIMUM, rows)
    run.log_table(OPTIMUM, rows, "optimum")
    run.log_metrics({f"adapters/seed-{seed}": len(one.packing) for seed, one in found.items()})
    run.log_table(*reached_rows(table), "groups")
    counts = [len(one.packing) for one in found.values()]
    least, most = min(counts), max(counts)
    span = plural(least, "adapter") if least == most else f"{least} to {most} adapters"
    run.note(f"**{span}** at the requirements of the task, over {plural(len(found), 'seed')}.")


def report_strategies(
    table: OracleTable, count: int, fusion: FusionSettings, console: Console, run: StudyRun
) -> None:
    """Print and log how often each strategy finds the fewest adapters, without training.

    Args:
        table: The table.
        count: Random vectors of requirements.
        fusion: Margin, order of the domains, and whether they may take no adapter.
        console: The console to print to.
        run: The run to log to.
    """
    made = {name: make_strategy(name) for name in STRATEGIES}
    found = compare(
        table,
        made,
        list(random_requirements(table, count, 0)),
        head_only=fusion.head_only,
        order=fusion.order,
    )
    columns = (
        "strategy", "at the optimum", "most above it", "adapters", "optimum", "attempts",
        "rolled back",
    )  # fmt: skip
    rows = [
        [
            name, f"{one.at_optimum:.1%}", str(one.most_above), f"{one.adapters:.2f}",
            f"{one.optimum:.2f}", f"{one.attempts:.1f}", f"{one.rolled_back:.1f}",
        ]
        for name, one in sorted(found.items(), key=lambda item: -item[1].at_optimum)
    ]  # fmt: skip
    print_table(console, f"Strategies on {count:,} random vectors of requirements", columns, rows)
    run.log_table(columns, rows, "strategies")
    run.log_metrics({f"at_optimum/{name}": one.at_optimum for name, one in found.items()})


def report_shares(
    table: OracleTable,
    shares: Sequence[float],
    fusion: FusionSettings,
    console: Console,
    run: StudyRun,
) -> None:
    """Print and log what every strategy packs at shares of the dedicated adapters' accuracy.

    Args:
        table: The table.
        shares: Shares that every domain must keep on validation.
        fusion: Order of the domains, and whether they may take no adapter.
        console: The console to print to.
        run: The run to log to.
    """
    rows = share_rows(table, shares, fusion)
    columns = ("packing", *(f"at {share:.0%}" for share in shares))
    title = (
        "Adapters (worst domain's share of its dedicated adapter on test) where every domain must "
        "keep a share of it on validation"
    )
    print_table(console, title, columns, rows)
    run.log_table(columns, rows, "shares")


def share_rows(
    table: OracleTable, shares: Sequence[float], fusion: FusionSettings
) -> list[list[str]]:
    """A row for every way to pack, a cell for every share: means over the table's seeds."""
    names = list(table.domains)
    fixed = {
        "dedicated adapters": [[name] for name in names],
        "one joint adapter": [names],
        "without LoRA": [],
    }
    rows = []
    for name, packing in fixed.items():
        cell = _share_cell(table, dict.fromkeys(table.seeds, (packing, packing)))
        rows.append([name, *(cell for _ in shares)])
    found: dict[str, list[str]] = {"fewest (exact)": []}
    for share in shares:
        asked = {seed: share_requirements(table, share, seed) for seed in table.seeds}
        best = {
            seed: exact_packing(table, asked[seed], seed, head_only=fusion.head_only)
            for seed in table.seeds
        }
        cell = _share_cell(table, {seed: (one.packing, one.trained) for seed, one in best.items()})
        found["fewest (exact)"].append(cell)
        for name in STRATEGIES:
            packed = {
                seed: replay(
                    make_strategy(name), table, asked[seed], seed,
                    head_only=fusion.head_only, order=fusion.order,
                )
                for seed in table.seeds
            }  # fmt: skip
            packings = {
                seed: (one.packing.values(), one.trained.values()) for seed, one in packed.items()
            }
            found.setdefault(name, []).append(_share_cell(table, packings))
    return rows + [[name, *cells] for name, cells in found.items()]


def _share_cell(
    table: OracleTable,
    packings: Mapping[int, tuple[Collection[Sequence[str]], Collection[Sequence[str]]]],
) -> str:
    """Adapters and the worst share, as means over seeds, e.g. ``1.3 (0.978)``.

    Args:
        table: The table.
        packings: By seed, the domains that each adapter holds, and those it was trained with.
    """
    worst = []
    for seed, (packing, trained) in packings.items():
        reached = served(table, packing, trained, seed)
        alone = {name: table.reached(seed, [name])[name].test for name in table.domains}
        # What diverged alone measures nothing; what diverged in the packing keeps nothing.
        shares = [
            0.0 if math.isnan(reached[name].test) else reached[name].test / most
            for name, most in alone.items()
            if most > 0
        ]
        worst.append(min(shares, default=0.0))
    adapters = fmean(len(packing) for packing, _ in packings.values())
    return f"{adapters:.3g} ({fmean(worst):.3f})"


def reached_rows(table: OracleTable) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of what every domain reaches on validation in every group."""
    columns = ["seed", "group", *table.domains]
    rows = []
    for seed in table.seeds:
        without = table.head_only(seed)
        rows.append([seed, "without LoRA", *(round(without[n].val, 4) for n in table.domains)])
        for group in table.groups():
            reached = table.reached(seed, group)
            cells = [round(reached[n].val, 4) if n in reached else "" for n in table.domains]
            rows.append([seed, " + ".join(group), *cells])
    return columns, rows


def report_bounds(
    bounds: Mapping[int, Bound], largest: int, console: Console, run: StudyRun
) -> None:
    """Print and log the lower bounds that some groups prove.

    Args:
        bounds: The bound of each seed.
        largest: Number of domains of the largest groups.
        console: The console to print to.
        run: The run to log to.
    """
    columns = ("seed", "at least", "proof")
    rows = [
        [str(seed), plural(bound.adapters, "adapter"), bound.proof]
        for seed, bound in bounds.items()
    ]
    title = f"Lower bound on adapters, from groups of up to {largest} domains"
    print_table(console, title, columns, rows)
    run.log_table(columns, rows, "bounds")
    run.log_metrics({f"bound/seed-{seed}": bound.adapters for seed, bound in bounds.items()})
    run.note("; ".join(f"seed {row[0]}: at least {row[1]}, because {row[2]}" for row in rows))


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table.

    Args:
        console: The console.
        title: Title of the table.
        columns: Names of the columns.
        rows: Cells.
    """
    table = Table(title=title, title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
