"""Oracle tables, played: the fewest adapters, and how close each strategy comes.

`python -m tests.bench.valora_train.bench_oracle task=vqa` plays the strategies on the table of a
task in `oracles/` (`--table FILE` for another one), without a task on all of them. `--train` trains
every group of the domains first and writes the table; with `--largest 2` it trains pairs only,
which prove a lower bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from statistics import fmean

from hydra import compose, initialize_config_dir

from tests.bench.valora_train.oracle_table import (
    ORACLES,
    Measured,
    OracleTable,
    Packed,
    exact_packing,
    floors_of,
    lower_bound,
    random_requirements,
    replay,
    served,
    share_requirements,
)
from valora_train.cli import config_folder
from valora_train.fusion.requirement import Requirement, contract_requirement
from valora_train.fusion.strategies.registry import STRATEGIES, make_strategy
from valora_train.reporting.texts import markdown_table
from valora_train.settings import Settings, from_config

SHARES = (0.9, 0.95, 0.97, 0.99)


def asked_of(settings: Settings, table: OracleTable) -> dict[int, dict[str, Requirement]]:
    """What the settings ask of each domain, by seed."""
    fusion = settings.fusion
    if (share := fusion.of_dedicated) is not None:
        return {one: share_requirements(table, share, one, fusion.margin) for one in table.seeds}
    contracts = {
        one.name: contract_requirement(
            one, fusion.margin, *table.teacher.get(one.name, (None, None))
        )
        for one in settings.chosen()
    }
    return dict.fromkeys(table.seeds, contracts)


def fewest_rows(table: OracleTable, asked: Mapping[int, Mapping[str, Requirement]]) -> list[list]:
    """The best packing of each seed."""
    rows = []
    for seed, of in asked.items():
        best = exact_packing(table, of, seed)
        reached = served(table, best, seed)
        kept = sum(of[name].kept_by(reached[name]._asdict()) for name in of)
        text = " | ".join(" + ".join(group) for group in best.packing)
        rows.append([str(seed), str(len(best.packing)), text, f"{kept} of {len(of)}"])
    return rows


def strategy_rows(table: OracleTable, asked: Sequence[Mapping[str, Requirement]]) -> list[list]:
    """How often each strategy finds the fewest adapters; the seeds take turns."""
    seeds = [table.seeds[turn % len(table.seeds)] for turn in range(len(asked))]
    turns = list(zip(asked, seeds, strict=True))
    best = [len(exact_packing(table, of, seed).packing) for of, seed in turns]
    rows = []
    for name in STRATEGIES:
        played = [replay(make_strategy(name), table, of, seed) for of, seed in turns]
        above = [len(one.packing) - least for one, least in zip(played, best, strict=True)]
        at_optimum = fmean(not extra for extra in above)
        attempts = fmean(one.attempts for one in played)
        rows.append([name, f"{at_optimum:.1%}", str(max(above)), f"{attempts:.1f}"])
    return [*rows, ["fewest", f"mean {fmean(best):.2f}", "", ""]]


def share_rows(table: OracleTable) -> list[list]:
    """Adapters, and the worst domain's share of its dedicated adapter on test, at each share."""
    names = table.domains
    fixed = {"dedicated": [(name,) for name in names], "one joint": [tuple(names)], "no LoRA": []}

    def cell(packed: Mapping[int, Packed]) -> str:
        worst = []
        for seed, one in packed.items():
            reached, alone = served(table, one, seed), {n: table.alone(seed, n) for n in names}
            worst.append(min(reached[n].test / alone[n].test for n in names if alone[n].test > 0))
        adapters = fmean(len(one.packing) for one in packed.values())
        return f"{adapters:.3g} ({fmean(worst):.3f})"

    rows = [[n, cell(dict.fromkeys(table.seeds, Packed(p, p)))] for n, p in fixed.items()]
    rows.append(["fewest"])
    rows += [[name] for name in STRATEGIES]
    for share in SHARES:
        asked = {seed: share_requirements(table, share, seed) for seed in table.seeds}
        rows[3].append(cell({seed: exact_packing(table, of, seed) for seed, of in asked.items()}))
        for row in rows[4:]:
            strategy = make_strategy(row[0])
            row.append(
                cell({seed: replay(strategy, table, of, seed) for seed, of in asked.items()})
            )
    return [row + row[-1:] * (len(SHARES) + 1 - len(row)) for row in rows]


def size_rows(table: OracleTable) -> list[str]:
    """Mean and least share of the dedicated adapters on test, by the domains of one adapter."""
    kept: dict[int, list[float]] = {}
    for seed, name in product(table.seeds, table.names()):
        reached = table.reached(seed, name).items()
        kept.setdefault(len(name), []).extend(
            one.test / table.alone(seed, domain).test for domain, one in reached
        )
    return [f"{fmean(shares):.3f} ({min(shares):.3f})" for shares in kept.values()]


def all_tasks(vectors: int) -> None:
    """Print the fewest adapters of every task, and how close the strategies come."""
    tables = [OracleTable.read(file) for file in sorted(ORACLES.glob("*.json"))]
    found = {one.task: {name: cells for name, *cells in share_rows(one)} for one in tables}
    asked = {one.task: list(random_requirements(one, vectors, 0)) for one in tables}
    optimal = {
        one.task: {name: share for name, share, *_ in strategy_rows(one, asked[one.task])}
        for one in tables
    }
    sizes = range(1, 1 + max(len(one.domains) for one in tables))
    most = f"adapters (worst share on test) at {SHARES[-1]:.0%}"
    for title, columns, rows in (
        ("Fewest adapters (worst share on test)", ("task", *(f"{one:.0%}" for one in SHARES)),
         [[task, *of["fewest"]] for task, of in found.items()]),
        (most, ("strategy", *found),
         [[name, *(of[name][-1] for of in found.values())] for name in ("fewest", *STRATEGIES)]),
        ("Requirements at random for which a strategy finds the fewest", ("strategy", *found),
         [[name, *(of[name] for of in optimal.values())] for name in STRATEGIES]),
        ("Mean (least) share of the dedicated adapters on test, by domains in one adapter",
         ("task", *map(str, sizes)),
         [[one.task, *size_rows(one), *[""] * (len(sizes) - len(one.domains))] for one in tables]),
    ):  # fmt: skip
        print("\n".join([f"## {title}", *markdown_table(columns, rows)]), flush=True)


def train(given: argparse.Namespace) -> None:
    """Train the groups; write their table, or print the bound that the small ones prove."""
    from tests.bench.valora_train.trials import Trial, prepared, run_trials

    settings, domains = prepared(given.overrides)
    names = sorted(item.settings.name for item in domains)
    sizes = range(1, (given.largest or len(names)) + 1)
    groups = [group for size in sizes for group in combinations(names, size)]
    trials = [Trial("head_only", (name,), seed) for seed in given.seeds for name in names]
    trials += [Trial("joint", group, seed) for seed in given.seeds for group in groups]
    results = run_trials(settings, domains, trials, given.processes)
    spec = {item.settings.name: item.settings.domain().task.spec for item in domains}
    table = OracleTable(settings.task.name, names, {name: spec[name].largest for name in names})
    table.teacher = {
        item.settings.name: Measured(item.teacher("val"), item.teacher("test"))
        for item in domains
        if item.teacher("val") is not None and item.teacher("test") is not None
    }
    for row in results:
        found = {name: Measured(**one) for name, one in row["accuracy"].items()}
        if row["method"] == "head_only":
            table.head_only.setdefault(row["seed"], {}).update(found)
        else:
            table.groups.setdefault(row["seed"], {})[frozenset(found)] = found
    if not given.largest:
        table.write(given.table)
        return
    for seed, asked in asked_of(settings, table).items():
        floors, *_ = floors_of(table, asked, seed)
        groups = [group for group in table.groups[seed] if group <= set(floors)]
        kept = [
            [n for n, one in table.reached(seed, group).items() if one.val >= floors[n]]
            for group in groups
        ]
        failed = [g for g, of in zip(groups, kept, strict=True) if len(of) < len(g)]
        print(f"seed {seed}: at least {lower_bound(list(floors), failed, kept)} adapters")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="settings of valora-train, such as task=vqa")
    parser.add_argument("--table", type=Path, help="file of the table")
    parser.add_argument("--vectors", type=int, default=2000, help="random vectors of requirements")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--largest", type=int, default=0, help="domains of the largest groups")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    if not given.overrides:
        all_tasks(given.vectors)
        return
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        settings = from_config(compose("config", overrides=given.overrides))
    given.table = given.table or ORACLES / f"{settings.task.name}.json"
    if given.train:
        train(given)
    if given.largest:
        return
    table = OracleTable.read(given.table)
    asked = list(random_requirements(table, given.vectors, 0))
    for columns, rows in (
        (("seed", "adapters", "packing", "kept on test"),
         fewest_rows(table, asked_of(settings, table))),
        (("strategy", "at the optimum", "most above", "attempts"), strategy_rows(table, asked)),
        (("packing", *(f"at {share:.0%}" for share in SHARES)), share_rows(table)),
    ):  # fmt: skip
        print("\n".join(markdown_table(columns, rows)), end="\n\n")


if __name__ == "__main__":
    main()
