"""``valora-sim``: compares policies, and routers of replicas, on a simulated workload."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from valora_data.errors import ValoraError
from valora_serve.orchestrator.cost_model import H200_7B, CostModel
from valora_serve.orchestrator.decision import DecisionTrace, PolicySettings
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.routing.base import Router, RouterSettings
from valora_serve.routing.routers import ROUTERS
from valora_serve.workloads import traces
from valora_serve.workloads.cluster import WAYS, Dispatch, simulate_cluster
from valora_serve.workloads.simulator import SimSettings, SimulationError, simulate

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]

RANK = 64  # of the adapters that are generated


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="valora-sim",
        description="Simulate a workload under several policies, with predicted step times, on one "
        "machine or on replicas behind a router.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    machine = SimSettings()
    add = parser.add_argument_group("workload").add_argument
    add("--workload", choices=sorted(traces.GENERATORS), default="poisson", help="generator")
    add("--trace", type=Path, help="replay this file instead: .jsonl, or .csv as Azure's traces")
    add("--rates", nargs="+", type=float, default=[10.0],
        help="requests per second (video: streams)")  # fmt: skip
    add("--skews", nargs="+", type=float, default=[0.6], help="shares of the most popular adapter")
    add("--adapters", type=int, default=16, help="number of adapters")
    add("--duration", type=float, default=30.0, help="seconds of arrivals")
    add("--requests", type=int, default=400, help="at_once: number of requests")
    add("--answer-limit", type=int, metavar="N",
        help="answers end by themselves, and policies expect N tokens of each")  # fmt: skip
    add("--latency-limit", type=float, help="latency limit of every request in seconds")
    add("--seed", type=int, default=0, help="random seed")

    add = parser.add_argument_group("policies").add_argument
    add("--policies", nargs="+", metavar="NAME",
        help=f"some of {', '.join(POLICIES)} (default: all, with replicas: cost)")  # fmt: skip
    add("--early-abort", action="store_true",
        help="S-LoRA's early abort: requests whose first token would come too late")  # fmt: skip
    add("--shares", nargs="*", metavar="ADAPTER=N",
        help="admit by what each adapter was served, by its share (1 unless named)")  # fmt: skip
    add("--slo", type=float, default=6.0, help="limit of the time to first token in seconds")

    add = parser.add_argument_group("machine").add_argument
    add("--costs", type=Path, help="measured costs, instead of the estimate for an H200")
    add("--lora-cost", type=float, default=1.0, help="factor on the cost of LoRA terms")
    add("--max-requests", type=int, default=machine.max_requests, help="most running requests")
    add("--pages", type=int, default=machine.pages, help="pages of unified memory, 16 tokens each")
    add("--slots", type=int, default=machine.slots, help="most adapters on the device")

    add = parser.add_argument_group("replicas, each a machine as above").add_argument
    add("--replicas", nargs="+", type=int, metavar="N", default=[1], help="numbers to compare")
    routers = ", ".join([*ROUTERS, *WAYS])
    add("--router", nargs="+", metavar="NAME", help=f"some of {routers} (default: affinity)")
    add("--per-replica", action="store_true",
        help="rates and numbers of requests are those of a replica")  # fmt: skip

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
    for name in ("lora_cost", "adapters"):
        value = getattr(options, name)
        if not 0 <= value < math.inf:
            raise SimulationError(f"{name}: expected 0 or more, got {value}.")
    options.several = options.replicas != [1] or options.router is not None
    if options.several and options.decision_trace:
        raise SimulationError(
            "--decision-trace is for one machine: leave out --replicas and --router."
        )


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    costs = CostModel.read(options.costs) if options.costs else H200_7B
    costs = costs.with_lora(options.lora_cost)
    shares = _shares(options)
    settings = PolicySettings(
        early_abort=options.early_abort, slo=options.slo, fair=shares is not None,
        shares=shares or {},
    )  # fmt: skip
    machine = SimSettings(
        **{
            name: getattr(options, name)
            for name in ("max_requests", "pages", "slots", "slo", "answer_limit")
        }
    )
    policies, ways = _policies(options), _ways(options)
    for replicas in options.replicas:
        cases = list(_cases(options, replicas if options.per_replica else 1))
        if options.decision_trace and len(cases) * len(policies) > 1:
            raise SimulationError("--decision-trace needs one policy, one rate and one skewness.")
        for (rate, skew, workload), policy, name in product(cases, policies, ways):
            row: Row = {"rate": rate, "skew": skew, "policy": policy}
            make = partial(make_policy, policy, costs, settings)
            began = time.perf_counter()
            if options.several:
                found = simulate_cluster(workload, replicas, ways[name](), make, costs, machine)
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


def _policies(options: argparse.Namespace) -> list[str]:
    names = options.policies or (["cost"] if options.several else list(POLICIES))
    keep = [name for name in names if options.shares is None or POLICIES[name].shares]
    if options.policies and keep != names:
        wrong = next(name for name in names if name not in keep)
        raise SimulationError(
            f"--shares: the policy {wrong} keeps no shares: leave one of the two out."
        )
    return keep


def _ways(options: argparse.Namespace) -> dict[str, Callable[[], Dispatch]]:
    settings = RouterSettings(seed=options.seed)

    def routed(router: type[Router]) -> Dispatch:
        return Dispatch(router(settings))

    return {  # an unknown one is refused before anything is simulated
        name: partial(WAYS[name], options.seed) if name in WAYS else partial(routed, ROUTERS[name])
        for name in options.router or ["affinity"]
    }


def _shares(options: argparse.Namespace) -> dict[str, float] | None:
    try:
        pairs = [one.rpartition("=") for one in options.shares or ()]
        shares = {name: float(share) for name, _, share in pairs}
    except ValueError as error:
        raise SimulationError(f"--shares {options.shares}: write ADAPTER=NUMBER.") from error
    return None if options.shares is None else shares


def _cases(
    options: argparse.Namespace, times: int
) -> Iterator[tuple[float | None, float, traces.Workload]]:
    """Rate (None: not chosen), skewness (1: power law) and workload, `times` as large if made."""
    file: Path | None = options.trace
    if file is not None and file.suffix == ".jsonl":
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
    unknown = sorted((_shares(options) or {}).keys() - set(workload.adapters))
    if unknown:
        few = ", ".join(workload.adapters[:3])
        raise SimulationError(f"--shares: the workload has no adapter {unknown[0]!r}, but {few} …")
    if options.latency_limit is None:
        return workload
    return traces.with_latency_limit(workload, options.latency_limit)


HEAD: tuple[Column, ...] = (
    ("policy", lambda r: str(r["policy"])),
    ("rate", lambda r: "-" if r["rate"] is None else f"{r['rate']:g}"),
    ("skew", lambda r: f"{r['skew']:.2g}"),
)
ONE: tuple[Column, ...] = (
    ("ms/token", lambda r: f"{r['token_latency'] * 1e3:.3f}"),
    ("req/s", lambda r: f"{r['throughput']:.2f}"),
    ("tok/s", lambda r: f"{r['token_throughput']:.0f}"),
    ("TTFT ms", lambda r: f"{r['first_token'][0] * 1e3:.0f}"),
    ("TTFT p99", lambda r: f"{r['first_token'][3] * 1e3:.0f}"),
    ("e2e p50 s", lambda r: f"{r['end_to_end'][1]:.2f}"),
    ("p95", lambda r: f"{r['end_to_end'][2]:.2f}"),
    ("p99", lambda r: f"{r['end_to_end'][3]:.2f}"),
    ("SLO", lambda r: f"{r['attainment']:.1%}"),
    ("satisfied", lambda r: f"{r['satisfaction']:.3f}"),
    ("aborted", lambda r: str(r["aborted"])),
    ("switches", lambda r: str(r["switches"])),
    ("merged/mixture", lambda r: f"{r['modes']['merged']:.0%}/{r['modes']['mixture']:.0%}"),
)
REPLICA: tuple[Column, ...] = (
    ("requests", lambda r: str(r["requests"])),
    ("req/s", lambda r: f"{r['throughput']:.2f}"),
    ("tok/s", lambda r: f"{r['token_throughput']:.0f}"),
    ("TTFT p50 ms", lambda r: f"{r['first_token'][1] * 1e3:.0f}"),
    ("TTFT p99 ms", lambda r: f"{r['first_token'][3] * 1e3:.0f}"),
    ("e2e p50 s", lambda r: f"{r['end_to_end'][1]:.2f}"),
    ("e2e p99 s", lambda r: f"{r['end_to_end'][3]:.2f}"),
    ("loads", lambda r: str(r["loads"])),
    ("busy", lambda r: f"{r['busy']:.0%}"),
)
ROUTED: tuple[Column, ...] = (
    ("replicas", lambda r: str(r["replicas"])),
    ("router", lambda r: str(r["router"])),
    *HEAD,
)


def _table(title: str, columns: Sequence[Column], groups: Sequence[Sequence[Row]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name, _ in columns:
        table.add_column(name, justify="left" if name in ("router", "policy") else "right")
    for group in groups:
        for row in group:
            table.add_row(*(text(row) for _, text in columns))
        table.add_section()
    return table


def _print(rows: Sequence[Row], options: argparse.Namespace) -> None:
    console = Console()
    if not console.is_terminal:  # a pipe or a file has no width: no table is cut
        console = Console(width=200)
    title = f"Simulated, costs from {options.costs or 'the H200 estimate (not measured)'}"
    if options.several:
        alone = {_case(row): row["throughput"] for row in rows if row["replicas"] == 1}

        def times(row: Row) -> str:
            return f"{row['throughput'] / alone[_case(row)]:.3f}" if _case(row) in alone else "-"

        total: tuple[Column, ...] = (
            *ROUTED,
            ("× one", times),
            *REPLICA,
            ("balance", lambda r: f"{r['balance']:.3f}"),
            ("fairness", lambda r: f"{r['fairness']:.3f}"),
        )
        console.print(_table(title, total, [rows]))
        each = [[{**row, **one, "number": n} for n, one in enumerate(row["per_replica"])]
                for row in rows]  # fmt: skip
        columns = (*ROUTED, ("replica", lambda r: str(r["number"])), *REPLICA)
        console.print(_table("Each replica of the above", columns, each))
        console.print(
            "Balance, fairness: Jain's index of the replicas' busy time and of the adapters' mean "
            "time to first token (1: all equal).", style="dim",
        )  # fmt: skip
        return
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["rate"], row["skew"]), []).append(row)
    console.print(_table(title, (*HEAD, *ONE), list(groups.values())))
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
    console.print(
        "ms/token: sum of end-to-end latencies over all input, image and output tokens.",
        style="dim",
    )
    if len(groups) > 1:
        means = [{"policy": policy, "rows": [r for r in rows if r["policy"] == policy]}
                 for policy in dict.fromkeys(row["policy"] for row in rows)]  # fmt: skip
        skews = dict.fromkeys(row["skew"] for row in rows)
        by_skew = [(f"{skew:.2g}", partial(_mean, skew=skew)) for skew in skews]
        columns = (HEAD[0], *by_skew, ("all", partial(_mean, skew=None)))
        console.print(_table("ms/token, geometric mean over the rates", columns, [means]))


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("rate", "skew", "policy", "router"))


def _mean(row: Row, skew: float | None) -> str:
    chosen = [
        math.log(one["token_latency"] * 1e3) for one in row["rows"] if skew in (None, one["skew"])
    ]
    return f"{math.exp(sum(chosen) / len(chosen)):.3f}"


if __name__ == "__main__":
    sys.exit(main())
