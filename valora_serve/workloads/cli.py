"""`valora-sim`: policies beside each other on a replayed workload, as a table, JSON and a plot."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import ValoraError
from valora_serve.orchestrator.cost_model import H200_7B, CostModel
from valora_serve.orchestrator.decision import PolicySettings
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.orchestrator.trace import DecisionTrace
from valora_serve.workloads import traces
from valora_serve.workloads.simulator import SimSettings, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.table import Table as RichTable

    from valora_serve.workloads.simulator import Report
    from valora_serve.workloads.traces import Workload

WORKLOADS = ("retrieval", "video", "slora", "poisson", "at-once")
AT_ONCE = 400  # requests of the saturated workload, as in S-LoRA's Table 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        rows = list(_runs(options))
    except ValoraError as error:
        print(f"valora-sim: {error}", file=sys.stderr)
        return 1
    _table(rows, options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        try:
            _plot(rows, options.plot)
        except ImportError:
            print("valora-sim: --plot needs matplotlib; pip install matplotlib.", file=sys.stderr)
            return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="valora-sim",
        description="Replay a workload through the serving policies against the cost model.",
    )
    add = parser.add_argument
    add("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    add("--workload", choices=WORKLOADS, default="poisson", help="what to generate")
    add("--trace", type=Path, help="replay this file: .jsonl, or .csv as Azure's; no generator")
    add("--rates", nargs="+", type=float, default=[10.0], help="requests (or streams) per second")
    add("--skews", nargs="+", type=float, default=[0.6], help="share of the popular adapter")
    add("--adapters", type=int, default=16)
    add("--rank", type=int, default=64)
    add("--alpha", type=float, default=1.0, help="slora: exponent of the adapters' power law")
    add("--cv", type=float, default=1.0, help="slora: coefficient of variation of the gaps")
    add("--duration", type=float, default=30.0, help="seconds of arrivals")
    add("--requests", type=int, default=AT_ONCE, help="at-once: how many")
    add("--no-heads", action="store_true", help="video: generate instead of asking heads")
    add("--limit", type=float, help="latency limit of every request, seconds")
    add("--seed", type=int, default=0)
    add("--costs", type=Path, help="measured costs; without, the H200 estimate")
    add("--lora-cost", type=float, default=1.0, help="multiply what LoRA terms cost, to try out")
    add("--theta", type=float, default=PolicySettings().theta, help="starvation threshold, seconds")
    add("--clusters", type=int, default=0, help="adapter clustering (S-LoRA)")
    add("--no-groups", action="store_true", help="cost: as many at a time as fit, for throughput")
    add("--early-abort", action="store_true", help="admission control (S-LoRA)")
    add("--slo", type=float, default=6.0, help="seconds to the first token")
    add("--max-requests", type=int, default=SimSettings().max_requests)
    add("--pages", type=int, default=SimSettings().pages, help="of unified memory, 16 tokens each")
    add("--json", type=Path, help="write the results there")
    add("--plot", type=Path, help="draw the average token latency there (needs matplotlib)")
    add("--decisions", type=Path, help="write a line per step there; one policy and workload only")
    return parser


def _runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    costs = CostModel.read(options.costs) if options.costs else H200_7B
    costs = costs.with_lora(options.lora_cost)
    settings = PolicySettings(
        theta=options.theta,
        clusters=options.clusters,
        early_abort=options.early_abort,
        groups=not options.no_groups,
        slo=options.slo,
    )
    machine = SimSettings(max_requests=options.max_requests, pages=options.pages, slo=options.slo)
    cases = list(_workloads(options))
    if options.decisions and len(cases) * len(options.policies) > 1:
        raise traces.TraceError("--decisions needs one policy, one rate and one skewness.")
    for rate, skew, workload in cases:
        if options.limit is not None:
            limited = traces.with_limit(workload, options.limit)
        else:
            limited = workload
        for name in options.policies:
            policy = make_policy(name, costs, settings)
            began = time.perf_counter()
            if options.decisions:
                with options.decisions.open("w", encoding="utf-8") as file:
                    report = simulate(limited, policy, costs, machine, DecisionTrace(file))
            else:
                report = simulate(limited, policy, costs, machine)
            yield _row(rate, skew, name, report, time.perf_counter() - began)


def _row(
    rate: float | None, skew: float, policy: str, report: Report, seconds: float
) -> dict[str, Any]:
    return {
        "rate": rate,
        "skew": skew,
        "policy": policy,
        "computed_in": seconds,
        **asdict(report),
    }


def _workloads(options: argparse.Namespace) -> Iterator[tuple[float | None, float, Workload]]:
    """The cases: rate (None for all at once, or of a file), share of the popular adapter."""
    file: Path | None = options.trace
    if file is not None and file.suffix == ".jsonl":
        workload = traces.read(file)
        yield None, workload.share(), workload
        return
    at_once = options.workload == "at-once" and file is None
    common = {"adapters": options.adapters, "seed": options.seed}
    for rate in [math.nan] if at_once else options.rates:
        if options.workload == "slora" and file is None:
            yield (
                rate,
                options.alpha,
                traces.slora(
                    rate,
                    options.duration,
                    alpha=options.alpha,
                    cv=options.cv,
                    ranks=(options.rank,),
                    **common,
                ),
            )
            continue
        for skew in options.skews:
            arguments = {**common, "skew": skew}
            if file is not None:
                workload = traces.azure(file, rate=rate, rank=options.rank, **arguments)
            elif at_once:
                workload = traces.at_once(options.requests, ranks=(options.rank,), **arguments)
            elif options.workload == "video":
                workload = traces.video(
                    int(rate),
                    options.duration,
                    heads=not options.no_heads,
                    rank=options.rank,
                    **arguments,
                )
            else:
                make = traces.retrieval if options.workload == "retrieval" else traces.poisson
                workload = make(rate, options.duration, rank=options.rank, **arguments)
            yield None if at_once else rate, skew, workload


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("ms/token", lambda r: f"{r['token_latency'] * 1e3:.3f}"),
    ("req/s", lambda r: f"{r['throughput']:.2f}"),
    ("tok/s", lambda r: f"{r['token_throughput']:.0f}"),
    ("TTFT ms", lambda r: f"{r['first_token'][0] * 1e3:.0f}"),
    ("TTFT p99", lambda r: f"{r['first_token'][3] * 1e3:.0f}"),
    ("e2e p50 s", lambda r: f"{r['end_to_end'][1]:.2f}"),
    ("p95", lambda r: f"{r['end_to_end'][2]:.2f}"),
    ("p99", lambda r: f"{r['end_to_end'][3]:.2f}"),
    ("SLO", lambda r: f"{r['attainment']:.1%}"),
    ("aborted", lambda r: str(r["aborted"])),
    ("switches", lambda r: str(r["switches"])),
    ("merged/mixture", lambda r: f"{r['modes']['merged']:.0%}/{r['modes']['mixture']:.0%}"),
)


def _table(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    costs = options.costs or "the H200 estimate (not measured)"
    table = Table(title=f"Simulated, costs from {costs}", title_justify="left")
    table.add_column("rate", justify="right")
    table.add_column("skew", justify="right")
    table.add_column("policy")
    for title, _ in COLUMNS:
        table.add_column(title, justify="right")
    before = None
    for row in rows:
        case = row["rate"], row["skew"]
        if before not in (None, case):
            table.add_section()
        before = case
        rate = "-" if row["rate"] is None else f"{row['rate']:g}"
        cells = [text(row) for _, text in COLUMNS]
        table.add_row(rate, f"{row['skew']:.2g}", str(row["policy"]), *cells)
    # Output that is no terminal has no width of its own; cells must not be cut.
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)
    console.print(
        "ms/token: sum of end-to-end latencies over all input, image and output tokens.",
        style="dim",
    )
    if len({(row["rate"], row["skew"]) for row in rows}) > 1:
        console.print(_summary(rows))


def _summary(rows: Sequence[dict[str, Any]]) -> RichTable:
    """Geometric mean of the average token latency over the rates, by policy and skewness."""
    from rich.table import Table

    skews = list(dict.fromkeys(row["skew"] for row in rows))
    table = Table(title="ms/token, geometric mean over the rates", title_justify="left")
    table.add_column("policy")
    for skew in skews:
        table.add_column(f"{skew:.2g}", justify="right")
    table.add_column("all", justify="right")
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = []
        for skew in (*skews, None):
            chosen = [
                math.log(row["token_latency"] * 1e3)
                for row in rows
                if row["policy"] == policy and skew in (None, row["skew"])
            ]
            cells.append(f"{math.exp(sum(chosen) / len(chosen)):.3f}")
        table.add_row(policy, *cells)
    return table


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Average token latency over skewness, one panel per rate."""
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(row["rate"] for row in rows))
    figure = Figure(figsize=(4 * len(rates), 3.5), layout="constrained")
    panels = figure.subplots(1, len(rates), squeeze=False)[0]
    for panel, rate in zip(panels, rates, strict=True):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            points = [r for r in rows if r["rate"] == rate and r["policy"] == policy]
            panel.plot(
                [r["skew"] for r in points],
                [r["token_latency"] * 1e3 for r in points],
                marker="o",
                label=policy,
            )
        panel.set(
            title="all at once" if rate is None else f"{rate:g} requests/s",
            xlabel="share of the popular adapter",
            yscale="log",
        )
    panels[0].set_ylabel("average token latency, ms (simulated)")
    panels[0].legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
