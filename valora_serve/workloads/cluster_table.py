"""The tables of simulated replicas: one row a simulation, and one row a replica of each."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table as RichTable

    from valora_serve.workloads.cluster import ClusterReport

Row = dict[str, Any]


def cluster_row(report: ClusterReport) -> Row:
    """Return the results of all replicas together, and those of each under `per_replica`."""
    return {
        **asdict(report.total),
        "busy": sum(report.busy) / len(report.busy),
        "balance": report.balance,
        "fairness": report.fairness,
        "migrations": report.migrations,
        "per_replica": [
            {**asdict(one), "busy": busy}
            for one, busy in zip(report.replicas, report.busy, strict=True)
        ],
    }


BOTH: tuple[tuple[str, Callable[[Row], str]], ...] = (
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
TOTAL: tuple[tuple[str, Callable[[Row], str]], ...] = (
    *BOTH,
    ("balance", lambda r: f"{r['balance']:.3f}"),
    ("fairness", lambda r: f"{r['fairness']:.3f}"),
    ("moved", lambda r: str(r["migrations"])),
)
NOTE = (
    "Balance, fairness: Jain's index of the replicas' busy time and of the adapters' mean time to "
    "first token (1: all equal). Moved: requests that went to another replica later."
)
CASE = ("rate", "skew", "policy", "router")


def tables(rows: Sequence[Row], title: str) -> list[RichTable]:
    """Return the table of all simulations and the table of their replicas.

    Args:
        rows: Results, with `rate`, `skew`, `policy`, `router` and `replicas`.
        title: Title of the first table.
    """
    from rich.table import Table

    alone = {key: row for row in rows if row["replicas"] == 1 for key in [_case(row)]}
    total, each = (
        Table(title=text, title_justify="left") for text in (title, "Each replica of the above")
    )
    for table, last in ((total, "× one"), (each, "replica")):
        table.add_column("replicas", justify="right")
        table.add_column("router")
        table.add_column("policy")
        for name in ("rate", "skew", last):
            table.add_column(name, justify="right")
    for name, _ in TOTAL:
        total.add_column(name, justify="right")
    for name, _ in BOTH:
        each.add_column(name, justify="right")
    for row in rows:
        rate = "-" if row["rate"] is None else f"{row['rate']:g}"
        head = [str(row["replicas"]), row["router"], row["policy"], rate, f"{row['skew']:.2g}"]
        one = alone.get(_case(row))
        times = "-" if one is None else f"{row['throughput'] / one['throughput']:.3f}"
        total.add_row(*head, times, *(text(row) for _, text in TOTAL))
        each.add_section()
        for number, replica in enumerate(row["per_replica"]):
            first = head if not number else [""] * len(head)
            each.add_row(*first, str(number), *(text(replica) for _, text in BOTH))
    return [total, each]


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in CASE)
