"""``valora-sim``: compares policies, and routers of replicas, on a simulated workload."""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.console import Console
from rich.table import Table

from valora_data.errors import ValoraError
from valora_serve.orchestrator.cost_model import CostModel
from valora_serve.orchestrator.decision import DecisionTrace, PolicySettings
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.routing import ROUTERS
from valora_serve.workloads import traces
from valora_serve.workloads.cluster import WAYS, make_dispatch, simulate_cluster
from valora_serve.workloads.simulator import SimSettings, SimulationError, simulate

Row = dict[str, Any]

RANK = 64  # of the adapters that are generated
MEASURED = Path(__file__).with_name("costs")
SYSTEMS = {
    "dlora": ("dlora", "einsum"),
    "punica": ("unmerge_only", "bgmv"),
    "slora": ("slora", "static"),
    "valora": ("valora", "atmm"),
    "ours": ("cost", "atmm"),
}
"""The papers' systems: policy, and operator whose costs on an H200 with a 7B are in `MEASURED`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if something is wrong, with a message on standard error."""
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        rows = list(_rows(options))
        _print(rows, options)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    except ValoraError as error:
        wrong = str(error)
    except OSError as error:
        wrong = (
            f"{error.filename or 'a file'} cannot be written ({error.strerror}): make room or name "
            "another file"
        )
    else:
        return 0
    print(f"valora-sim: {wrong}", file=sys.stderr)
    return 1


class _Help(argparse.ArgumentDefaultsHelpFormatter):  # without defaults that say nothing
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="valora-sim",
        description="Simulate a workload under several policies, with predicted step times, on one "
        "machine or on replicas behind a router.",
        formatter_class=_Help,
    )
    machine = SimSettings()
    add = parser.add_argument_group("workload").add_argument
    add("--workload", choices=sorted(traces.GENERATORS), default="poisson", help="generator")
    add("--trace", type=Path, help="replay this file instead: .jsonl, or .csv as Azure's traces")
    add("--rates", nargs="+", type=float, default=[10.0], help="requests/s (video: streams)")
    add("--skews", nargs="+", type=float, default=[0.6], help="shares of the most popular adapter")
    add("--adapters", type=int, default=16, help="number of adapters")
    add("--duration", type=float, default=30.0, help="seconds of arrivals")
    add("--requests", type=int, default=400, help="at_once: number of requests")
    add("--answer-limit", type=int, metavar="N", help="tokens that policies expect of each answer")
    add("--latency-limit", type=float, help="latency limit of every request in seconds")
    add("--seed", type=int, default=0, help="random seed")

    add = parser.add_argument_group("policies").add_argument
    add("--policies", nargs="+", metavar="NAME[=COSTS]",
        help=f"some of {', '.join(POLICIES)} (default: all, with replicas: cost), and files of "
        "measured costs, such as another operator's")  # fmt: skip
    add("--systems", nargs="+", choices=SYSTEMS, metavar="NAME",
        help=f"some of {', '.join(SYSTEMS)}, each with the costs of its operator")  # fmt: skip
    add("--early-abort", action="store_true", help="drop what would be late, as S-LoRA does")
    add("--shares", nargs="*", metavar="ADAPTER=N", help="keep shares of adapters (1 unless named)")
    add("--slo", type=float, default=6.0, help="limit of the time to first token in seconds")

    add = parser.add_argument_group("machine").add_argument
    add("--costs", type=Path, help="measured costs, as an engine keeps them (default: an H200's)")
    add("--lora-cost", type=float, default=1.0, help="factor on the cost of LoRA terms")
    add("--max-requests", type=int, default=machine.max_requests, help="most running requests")
    add("--pages", type=int, default=machine.pages, help="pages of unified memory, 16 tokens each")
    add("--slots", type=int, default=machine.slots, help="most adapters on the device")

    add = parser.add_argument_group("replicas, each a machine as above").add_argument
    add("--replicas", nargs="+", type=int, metavar="N", default=[1], help="numbers to compare")
    routers = ", ".join([*ROUTERS, *WAYS])
    add("--router", nargs="+", metavar="NAME", help=f"some of {routers} (default: affinity)")
    add("--per-replica", action="store_true", help="rates and requests are those of a replica")

    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, help="write the results to this file")
    add("--decision-trace", type=Path, help="write the decisions of a single run to this file")
    return parser


def _check(options: argparse.Namespace) -> None:
    for name in ("requests", "duration", "slo", "latency_limit", "rates"):
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not 0 < value < math.inf:
                raise SimulationError(f"{name}: expected more than 0, got {value}.")
    for name in ("lora_cost", "adapters", "seed"):
        value = getattr(options, name)
        if not 0 <= value < math.inf:
            raise SimulationError(f"{name}: expected 0 or more, got {value}.")
    options.costs = options.costs or MEASURED / "atmm.json"
    options.several = options.replicas != [1] or options.router is not None
    if options.several and options.decision_trace:
        raise SimulationError("--decision-trace is for one machine: leave out --replicas, --router")
    try:
        pairs = [one.rpartition("=") for one in options.shares or ()]
        options.share_of = {name: float(share) for name, _, share in pairs}
    except ValueError as error:
        raise SimulationError(f"--shares {options.shares}: write ADAPTER=NUMBER.") from error


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    settings = PolicySettings(
        early_abort=options.early_abort, slo=options.slo, fair=options.shares is not None,
        shares=options.share_of,
    )  # fmt: skip
    same = ("max_requests", "pages", "slots", "slo", "answer_limit")
    machine = SimSettings(**{name: getattr(options, name) for name in same})
    policies, ways = _policies(options), options.router or ["affinity"]
    for name in ways:  # an unknown one is refused before anything is simulated
        make_dispatch(name, options.seed)
    for replicas in options.replicas:
        cases = list(_cases(options, replicas if options.per_replica else 1))
        if options.decision_trace and len(cases) * len(policies) > 1:
            raise SimulationError("--decision-trace needs one policy, one rate and one skewness.")
        for (rate, skew, workload), (told, policy, costs), name in product(cases, policies, ways):
            row: Row = {"rate": rate, "skew": skew, "policy": told}
            make = partial(make_policy, policy, costs, settings)
            began = time.perf_counter()
            if options.several:
                way = make_dispatch(name, options.seed)
                found = simulate_cluster(workload, replicas, way, make, costs, machine)
                each = [
                    {**asdict(one), "busy": busy}
                    for one, busy in zip(found.replicas, found.busy, strict=True)
                ]
                row |= {"replicas": replicas, "router": name, "per_replica": each,
                        "busy": sum(found.busy) / replicas, "balance": found.balance,
                        "fairness": found.fairness, **asdict(found.total)}  # fmt: skip
            else:
                path = options.decision_trace
                with path.open("w", encoding="utf-8") if path else nullcontext() as file:
                    trace = DecisionTrace(file) if file is not None else None
                    row |= asdict(simulate(workload, make(), costs, machine, trace))
            yield {**row, "computed_in": time.perf_counter() - began}


def _policies(options: argparse.Namespace) -> list[tuple[str, str, CostModel]]:
    """What the tables call each policy, its name and its costs."""
    found, usual = [], ["cost"] if options.several else POLICIES
    systems = {name: SYSTEMS[name] for name in options.systems or ()}
    chosen = {f"{name}, {operator}": (policy, "=", f"{MEASURED}/{operator}.json")
              for name, (policy, operator) in systems.items()}  # fmt: skip
    chosen |= {given: given.partition("=") for given in options.policies or ()}
    for told, (name, _, file) in (chosen or {one: (one, "", "") for one in usual}).items():
        keeps = POLICIES[name].shares  # refuses an unknown one before anything is simulated
        if options.shares is not None and not keeps:
            if not chosen:
                continue
            raise SimulationError(f"--shares: policy {name} keeps no shares: leave one out.")
        costs = CostModel.read(Path(file or options.costs)).with_lora(options.lora_cost)
        found.append((told, name, costs))
    return found


def _cases(
    options: argparse.Namespace, times: int
) -> Iterator[tuple[float | None, float, traces.Workload]]:
    """Rate (None: not chosen), skewness (1: power law) and workload, `times` as large if made."""
    file: Path | None = options.trace
    if file is not None and file.suffix.lower() == ".jsonl":
        workload = traces.read(file)
        yield None, workload.share(), _limited(workload, options)
        return
    make = traces.GENERATORS[options.workload] if file is None else partial(traces.azure, file)
    taken = traces.options_of(make)
    for rate in options.rates if taken & {"rate", "streams"} else [None]:
        for skew in options.skews if "skew" in taken else [1.0]:
            given = vars(options) | {"skew": skew, "ranks": (RANK,), "rate": rate}
            given["requests"] *= times
            if rate is not None:
                given["rate"], given["streams"] = rate * times, int(rate * times)
            yield rate, skew, _limited(traces.generate(make, given), options)


def _limited(workload: traces.Workload, options: argparse.Namespace) -> traces.Workload:
    unknown = sorted(options.share_of.keys() - {*workload.adapters, "base"})
    if unknown:
        few = ", ".join(workload.adapters[:3])
        raise SimulationError(f"--shares: the workload has no adapter {unknown[0]!r}, but {few} …")
    if options.latency_limit is None:
        return workload
    return traces.with_latency_limit(workload, options.latency_limit)


HEAD = {"policy": "{policy}", "rate": "{told_rate}", "skew": "{skew:.2g}"}
ONE = HEAD | {
    "ms/token": "{ms_token:.3f}", "req/s": "{throughput:.2f}", "tok/s": "{token_throughput:.0f}",
    "TTFT ms": "{ttft[0]:.0f}", "TTFT p99": "{ttft[3]:.0f}", "e2e p50 s": "{end_to_end[1]:.2f}",
    "p95": "{end_to_end[2]:.2f}", "p99": "{end_to_end[3]:.2f}", "SLO": "{attainment:.1%}",
    "satisfied": "{satisfaction:.3f}", "aborted": "{aborted}", "switches": "{switches}",
    "merged/mixture": "{modes[merged]:.0%}/{modes[mixture]:.0%}",
}  # fmt: skip
ROUTED = {"replicas": "{replicas}", "router": "{router}", **HEAD}
REPLICA = {
    "requests": "{requests}", "req/s": "{throughput:.2f}", "tok/s": "{token_throughput:.0f}",
    "TTFT p50 ms": "{ttft[1]:.0f}", "TTFT p99 ms": "{ttft[3]:.0f}",
    "e2e p50 s": "{end_to_end[1]:.2f}", "e2e p99 s": "{end_to_end[3]:.2f}", "loads": "{loads}",
    "busy": "{busy:.0%}",
}  # fmt: skip
"""Columns of the tables, each with the format of its cell."""


def _told(row: Row) -> Row:
    """A row with what its cells show in other units."""
    return row | {
        "told_rate": "-" if row["rate"] is None else f"{row['rate']:g}",
        "ms_token": row["token_latency"] * 1e3,
        "ttft": [seconds * 1e3 for seconds in row["first_token"]],
    }


def _table(title: str, columns: Mapping[str, str], groups: Iterable[Iterable[Row]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in ("router", "policy") else "right")
    for group in groups:
        for row in group:
            table.add_row(*(cell.format_map(row) for cell in columns.values()))
        table.add_section()
    return table


def _print(rows: Sequence[Row], options: argparse.Namespace) -> None:
    # A pipe or a file has no width: no table is cut.
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False)
    source = "an H200" if options.costs.parent == MEASURED else options.costs
    title = f"Simulated, costs from {source}"
    if options.several:
        _print_replicas(rows, title, console)
        return
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["rate"], row["skew"]), []).append(_told(row))
    console.print(_table(title, ONE, groups.values()))
    if options.shares is not None:
        names = sorted({name for row in rows for name in row["served"]})
        shares = Table(
            "policy", *names, title="Share of tokens before the last arrival", title_justify="left"
        )
        for row in rows:
            served = max(1, sum(row["served"].values()))
            shares.add_row(
                row["policy"], *(f"{row['served'].get(n, 0) / served:.1%}" for n in names)
            )
        console.print(shares)
    said = "ms/token: sum of end-to-end latencies over all input, image and output tokens."
    console.print(said, style="dim")
    if len(groups) > 1:
        skews = [*dict.fromkeys(row["skew"] for row in rows), None]
        means = [
            {"policy": policy, "mean": [_mean(rows, policy, skew) for skew in skews]}
            for policy in dict.fromkeys(row["policy"] for row in rows)
        ]
        columns = {"all" if skew is None else f"{skew:g}": f"{{mean[{n}]:.3f}}"
                   for n, skew in enumerate(skews)}  # fmt: skip
        title = "ms/token, geometric mean over the rates"
        console.print(_table(title, {"policy": "{policy}", **columns}, [means]))


def _mean(rows: Sequence[Row], policy: str, skew: float | None) -> float:
    return geometric_mean(
        row["token_latency"] * 1e3 for row in rows
        if row["policy"] == policy and skew in (None, row["skew"])
    )  # fmt: skip


def _print_replicas(rows: Sequence[Row], title: str, console: Console) -> None:
    def case(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("rate", "skew", "policy", "router"))

    alone = {case(row): row["throughput"] for row in rows if row["replicas"] == 1}
    total, each = [], []
    for row in rows:
        one = alone.get(case(row))
        total.append(_told(row) | {"times": f"{row['throughput'] / one:.3f}" if one else "-"})
        each.append([_told({**row, **found, "number": number})
                     for number, found in enumerate(row["per_replica"])])  # fmt: skip
    more = {"balance": "{balance:.3f}", "fairness": "{fairness:.3f}"}
    console.print(_table(title, {**ROUTED, "× one": "{times}", **REPLICA, **more}, [total]))
    columns = {**ROUTED, "replica": "{number}", **REPLICA}
    console.print(_table("Each replica of the above", columns, each))
    console.print(
        "Balance, fairness: Jain's index of the replicas' busy time and of the adapters' mean "
        "time to first token (1: all equal).",
        style="dim",
    )


if __name__ == "__main__":
    sys.exit(main())
