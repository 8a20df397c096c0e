"""``valora-sim``: compares policies, and routers of replicas, on a simulated workload."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import ValoraError
from valora_serve.orchestrator.cost_model import H200_7B, CostModel
from valora_serve.orchestrator.decision import PolicySettings
from valora_serve.orchestrator.registry import POLICIES, keeps_shares, make_policy
from valora_serve.orchestrator.trace import DecisionTrace
from valora_serve.routing.base import RouterSettings
from valora_serve.routing.registry import ROUTERS, make_router
from valora_serve.workloads import traces
from valora_serve.workloads.cluster import simulate_cluster
from valora_serve.workloads.cluster_table import NOTE, cluster_row, tables
from valora_serve.workloads.dispatch import WAYS, RouterDispatch
from valora_serve.workloads.simulator import SimSettings, SimulationError, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console
    from rich.table import Table as RichTable

    from valora_serve.workloads.dispatch import Dispatch
    from valora_serve.workloads.simulator import Report
    from valora_serve.workloads.traces import Workload


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command-line arguments; those of the process if None.

    Returns:
        Exit status: 1 if something is wrong, with a message on standard error.
    """
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        if _has_replicas(options):
            rows = list(_cluster_runs(options))
            _print_cluster(rows, options)
        else:
            rows = list(_runs(options))
            _print(rows, options)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        if options.plot:
            _plot(rows, options.plot)
    except ValoraError as error:
        print(f"valora-sim: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"valora-sim: {error.filename or 'a file'} cannot be written ({error.strerror}): make "
            "room or name another file",
            file=sys.stderr,
        )
        return 1
    except ImportError as error:
        name = str(error.name or "").partition(".")[0]
        print(f"valora-sim: --plot needs {name}: pip install {name}", file=sys.stderr)
        return 1
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse numbers that no workload or machine has.

    Raises:
        SimulationError: There are some.
    """
    for name in ("rank", "requests", "duration", "slo", "latency_limit", "rates", "cv"):
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not 0 < value < math.inf:
                raise SimulationError(f"{name}: expected more than 0, got {value}.")
    for name in ("lora_cost", "adapters"):
        value = getattr(options, name)
        if not 0 <= value < math.inf:
            raise SimulationError(f"{name}: expected 0 or more, got {value}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="valora-sim",
        description="Simulate a workload under several policies, with predicted step times, on one "
        "machine or on replicas behind a router.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    policy, machine = PolicySettings(), SimSettings()
    add = parser.add_argument_group("workload").add_argument
    add("--workload", choices=sorted(traces.GENERATORS), default="poisson", help="generator")
    add("--trace", type=Path, help="replay this file instead: .jsonl, or .csv as Azure's traces")
    add(
        "--rates",
        nargs="+",
        type=float,
        default=[10.0],
        help="requests per second (video: streams)",
    )
    add("--skews", nargs="+", type=float, default=[0.6], help="shares of the most popular adapter")
    add("--adapters", type=int, default=16, help="number of adapters")
    add("--rank", type=int, default=64, help="rank of the adapters")
    add("--alpha", type=float, default=1.0, help="slora: exponent of the adapters' power law")
    add("--cv", type=float, default=1.0, help="slora: coefficient of variation of the gaps")
    add("--duration", type=float, default=30.0, help="seconds of arrivals")
    add("--requests", type=int, default=400, help="at_once: number of requests")
    add("--heads", action=argparse.BooleanOptionalAction, default=True, help="video: use heads")
    add(
        "--answer-limit",
        type=int,
        metavar="N",
        help="answers end by themselves, and policies expect N tokens of each",
    )
    add("--latency-limit", type=float, help="latency limit of every request in seconds")
    add("--seed", type=int, default=0, help="random seed")

    add = parser.add_argument_group("policies").add_argument
    names = ", ".join(POLICIES)
    add(
        "--policies",
        nargs="+",
        metavar="NAME",
        help=f"some of {names} (default: all, with replicas: cost)",
    )
    add("--theta", type=float, default=policy.theta, help="valora: starvation threshold in seconds")
    add("--clusters", type=int, default=policy.clusters, help="S-LoRA's adapter clustering")
    add(
        "--early-abort",
        action="store_true",
        help="abort requests whose first token would come too late (S-LoRA's early abort)",
    )
    add(
        "--shares",
        nargs="*",
        metavar="ADAPTER=N",
        help="admit by what each adapter was served, divided by its share (1 unless named)",
    )
    add("--slo", type=float, default=policy.slo, help="limit of the time to first token in seconds")

    add = parser.add_argument_group("machine").add_argument
    add("--costs", type=Path, help="measured costs, instead of the estimate for an H200")
    add("--lora-cost", type=float, default=1.0, help="factor on the cost of LoRA terms")
    add("--max-requests", type=int, default=machine.max_requests, help="most running requests")
    add("--pages", type=int, default=machine.pages, help="pages of unified memory, 16 tokens each")

    add("--slots", type=int, default=machine.slots, help="most adapters on the device")

    router = RouterSettings()
    add = parser.add_argument_group("replicas, each a machine as above").add_argument
    add("--replicas", nargs="+", type=int, metavar="N", default=[1], help="numbers to compare")
    routers = ", ".join([*ROUTERS, *WAYS])
    add("--router", nargs="+", metavar="NAME", help=f"some of {routers} (default: affinity)")
    add("--load-bound", type=float, default=router.bound, help="affinity: most load over the mean")
    add("--slack", type=float, default=router.slack, help="affinity: load that is never too much")
    add(
        "--per-replica",
        action="store_true",
        help="rates and numbers of requests are those of a replica",
    )

    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, help="write the results to this file")
    add("--plot", type=Path, help="plot the average token latency to this file")
    add("--decision-trace", type=Path, help="write the decisions of a single run to this file")
    return parser


def _has_replicas(options: argparse.Namespace) -> bool:
    """Whether replicas are simulated; checks the options that go with them."""
    if options.replicas == [1] and options.router is None:
        return False
    for name, given in (("plot", options.plot), ("decision-trace", options.decision_trace)):
        if given:
            raise traces.TraceError(
                f"--{name} is for one machine: leave out --replicas and --router."
            )
    return True


def _machine(options: argparse.Namespace) -> tuple[CostModel, PolicySettings, SimSettings]:
    """Return costs, settings of the policies and the simulated machine."""
    costs = CostModel.read(options.costs) if options.costs else H200_7B
    settings = PolicySettings(
        theta=options.theta,
        clusters=options.clusters,
        early_abort=options.early_abort,
        slo=options.slo,
        fair=options.shares is not None,
        shares=_shares(options.shares or ()),
    )
    machine = SimSettings(
        max_requests=options.max_requests,
        pages=options.pages,
        slots=options.slots,
        slo=options.slo,
        answer_limit=options.answer_limit,
    )
    return costs.with_lora(options.lora_cost), settings, machine


def _shares(given: Sequence[str]) -> dict[str, float]:
    """Read the shares of adapters."""
    shares = {}
    for one in given:
        name, _, share = one.rpartition("=")
        try:
            shares[name] = float(share)
        except ValueError as error:
            raise traces.TraceError(f"--shares {one}: write ADAPTER=NUMBER.") from error
    return shares


def _policies(options: argparse.Namespace, default: Sequence[str]) -> Sequence[str]:
    """Return the names of the policies to simulate; with shares, those that keep them."""
    if options.shares is None:
        return options.policies or default
    for name in options.policies or ():
        if not keeps_shares(name):
            raise traces.TraceError(
                f"--shares: the policy {name} keeps no shares: leave one of the two out."
            )
    return options.policies or [name for name in default if keeps_shares(name)]


def _runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Simulate each workload under each policy; yields the rows of the table."""
    costs, settings, machine = _machine(options)
    policies = _policies(options, list(POLICIES))
    cases = list(_cases(options))
    if options.decision_trace and len(cases) * len(policies) > 1:
        raise traces.TraceError("--decision-trace needs one policy, one rate and one skewness.")
    for rate, skew, workload in cases:
        for name in policies:
            policy = make_policy(name, costs, settings)
            began = time.perf_counter()
            if options.decision_trace:
                with options.decision_trace.open("w", encoding="utf-8") as file:
                    report = simulate(workload, policy, costs, machine, DecisionTrace(file))
            else:
                report = simulate(workload, policy, costs, machine)
            yield _row(rate, skew, name, report, time.perf_counter() - began)


def _routed(name: str, settings: RouterSettings) -> Dispatch:
    return RouterDispatch(make_router(name, settings))


def _cluster_runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Simulate each workload on each number of replicas with each router."""
    costs, settings, machine = _machine(options)
    policies = _policies(options, ["cost"])
    asked = RouterSettings(bound=options.load_bound, slack=options.slack, seed=options.seed)
    ways: dict[str, Callable[[], Dispatch]] = {}
    for name in options.router or ["affinity"]:
        if name in WAYS:
            ways[name] = partial(WAYS[name], options.seed)
            continue
        make_router(name, asked)  # refuses an unknown one before anything is simulated
        ways[name] = partial(_routed, name, asked)
    for replicas in options.replicas:
        for rate, skew, workload in _cases(options, replicas if options.per_replica else 1):
            for policy in policies:
                for name, make in ways.items():
                    began = time.perf_counter()
                    report = simulate_cluster(
                        workload,
                        replicas,
                        make(),
                        partial(make_policy, policy, costs, settings),
                        costs,
                        machine,
                    )
                    yield {
                        "replicas": replicas,
                        "router": name,
                        "rate": rate,
                        "skew": skew,
                        "policy": policy,
                        "computed_in": time.perf_counter() - began,
                        **cluster_row(report),
                    }


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


def _cases(
    options: argparse.Namespace, times: int = 1
) -> Iterator[tuple[float | None, float, Workload]]:
    """Read or generate the workloads to simulate.

    Args:
        options: Options of the command.
        times: Factor on the rate or the number of requests; files are replayed as they are.

    Yields:
        The rate, the skewness and the workload. The rate is None for requests that arrive at once
        and for a file that says itself when they arrive; the skewness is α for power-law adapters.
    """
    file: Path | None = options.trace
    if file is not None and file.suffix == ".jsonl":
        workload = traces.read(file)
        yield None, workload.share(), _limited(workload, options)
        return
    make = traces.GENERATORS[options.workload] if file is None else partial(traces.azure, file)
    taken = traces.options_of(make)
    for rate in options.rates if taken & {"rate", "streams"} else [None]:
        for skew in options.skews if "skew" in taken else [options.alpha]:
            given = vars(options) | {"skew": skew, "ranks": (options.rank,)}
            given["requests"] *= times
            given["rate"] = rate
            if rate is not None:
                given["rate"] = rate * times
                given["streams"] = int(rate * times)
            yield rate, skew, _limited(traces.generate(make, given), options)


def _limited(workload: Workload, options: argparse.Namespace) -> Workload:
    unknown = sorted(_shares(options.shares or ()).keys() - set(workload.adapters))
    if unknown:
        few = ", ".join(workload.adapters[:3])
        raise traces.TraceError(
            f"--shares: the workload has no adapter {unknown[0]!r}, but {few} …"
        )
    if options.latency_limit is None:
        return workload
    return traces.with_latency_limit(workload, options.latency_limit)


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


def _title(options: argparse.Namespace) -> str:
    return f"Simulated, costs from {options.costs or 'the H200 estimate (not measured)'}"


def _console() -> Console:
    """A console on which no table is cut: a pipe or a file has no width."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=200)


def _print_cluster(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    console = _console()
    for table in tables(rows, _title(options)):
        console.print(table)
    console.print(NOTE, style="dim")


def _print(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the results as a table; with several cases, also their geometric means.

    With shares, also what each adapter was served.
    """
    from rich.table import Table

    table = Table(title=_title(options), title_justify="left")
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
    console = _console()
    console.print(table)
    if options.shares is not None:
        for row in rows:
            total = max(1, sum(row["served"].values()))
            parts = ", ".join(f"{a} {n / total:.1%}" for a, n in sorted(row["served"].items()))
            console.print(f"{row['policy']}: tokens before the last arrival: {parts}")
    console.print(
        "ms/token: sum of end-to-end latencies over all input, image and output tokens.",
        style="dim",
    )
    if len({(row["rate"], row["skew"]) for row in rows}) > 1:
        console.print(_summary(rows))


def _summary(rows: Sequence[dict[str, Any]]) -> RichTable:
    """Summarise the average token latency by policy and skewness: geometric mean over the rates."""
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
    """Plot the average token latency against the skewness, one panel per rate."""
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
