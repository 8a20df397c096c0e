"""The papers' systems as wholes, on VaLoRA's workloads (Figures 6, 14 and 22)."""

from __future__ import annotations

from itertools import product

import tests.bench.valora_kernels.operators  # noqa: F401 - registers those of the systems
from tests.bench.valora_serve.harness import FEW, metrics, table
from tests.bench.valora_serve.pictures import Pictures
from tests.bench.valora_serve.sections.multimodal import ADAPTERS, chunks, questions
from tests.bench.valora_serve.serve_models import add_head

SYSTEMS = {
    "dlora": ({"operator": "einsum"}, "dlora", False),
    "punica": ({"operator": "bgmv"}, "unmerge_only", False),
    "slora": ({"operator": "static"}, "slora", False),
    "valora": ({}, "valora", True),
    "ours": ({}, "cost", True),
}
"""Operator, policy, and whether heads answer about video.

dLoRA switches matrix by matrix. All share this engine's attention, pages and graphs, which Punica
and dLoRA have not; Punica's products are torch's, after its published gather.
"""
STREAMS = 4
SKEWED_RATE = 6.0
"""Requests a second of the comparison by skewness."""
PROMPTS = tuple(product((2, 4), (128, 1024)))


def systems(bench):
    """Latency on visual retrieval, by skewness too, on video, and what unmerged prompts cost."""
    labels = tuple(f"action {i}" for i in range(101))
    rows, extra, skews = [], {}, {}
    for name in bench.arguments.systems:
        options, policy, heads = SYSTEMS[name]
        fresh = bench.started is None or bench.started[2] != FEW | options
        names = bench.start("valora", ADAPTERS, **(FEW | options))
        if fresh:
            bench.warm(names)
            for i, adapter in enumerate(names):
                add_head(bench.engine, f"actions-{i}", adapter, labels, seed=i)
        pictures = Pictures.of(bench)
        extra.setdefault(options.get("operator", "ATMM"), unmerged(bench, names))
        bench.lmm.linears.by_matrix = name == "dlora"
        bench.policy(policy)
        for share in bench.arguments.shares:
            asked, times = questions(bench, pictures, names, SKEWED_RATE, share)
            skews[name, share] = metrics(*bench.drive(asked, times))["atl"]
            print(name, share, skews[name, share], flush=True)
        for rate in bench.arguments.picture_rates:
            asked, times = questions(bench, pictures, names, rate)
            bench.drive(asked[: len(asked) // 2])
            m = metrics(*bench.drive(asked, times), bench.arguments.slo)
            rows.append([name, f"retrieval, {rate:g}/s", m["atl"], m["ttft"], m["p99"]])
            print(rows[-1], flush=True)
        targets = [f"actions-{i}" for i in range(ADAPTERS)] if heads else names
        asked, times = chunks(bench, pictures, targets, STREAMS)
        bench.drive(asked[:STREAMS])
        m = metrics(*bench.drive(asked, times), bench.arguments.slo)
        rows.append([name, f"video, {STREAMS} streams", m["atl"], m["ttft"], m["p99"]])
        print(rows[-1], flush=True)
        bench.lmm.linears.by_matrix = False
    table(f"Systems, {bench.base}",
          ["system", "workload", "average token latency, ms", "mean TTFT, ms", "p99 latency, ms"],
          rows)  # fmt: skip
    beside(bench.base, rows)
    table(f"Average token latency, ms, at {SKEWED_RATE:g} questions/s by share of one adapter",
          ["system", *(f"{share:.0%}" for share in bench.arguments.shares)],
          [[name, *(skews[name, share] for share in bench.arguments.shares)]
           for name in bench.arguments.systems])  # fmt: skip
    table("Prompts of as many adapters, unmerged: ms beyond the base model's (share of it)",
          ["operator", *(f"{count} × {length}" for count, length in PROMPTS)],
          [[operator, *cells] for operator, cells in extra.items()])  # fmt: skip


def unmerged(bench, names):
    """What LoRA adds to prompts of two to four requests, each with an adapter of its own."""
    bench.policy("unmerge_only")
    cells = []
    for count, length in PROMPTS:
        base, own = (
            min(
                bench.drive([bench.request(100 * repeat + i, length, 1, model) for i, model in
                             enumerate(models)])[1]
                for repeat in range(6)
            )
            for models in ([None] * count, names[:count])
        )  # fmt: skip
        cells.append(f"{1e3 * (own - base):.3g} ({own / base - 1:.0%})")
    print(cells, flush=True)
    return cells


def beside(base, rows):
    """A row for each workload: latency by system, and how much less that of the last one is."""
    found = {(system, work): latency for system, work, latency, *_ in rows}
    systems, works = dict.fromkeys(row[0] for row in rows), dict.fromkeys(row[1] for row in rows)
    *others, last = systems
    table("Average token latency, ms (how much less the last one's is)",
          ["LMM", "workload", *systems],
          [[base, work,
            *(f"{found[one, work]:.3g} ({1 - found[last, work] / found[one, work]:.0%})"
              for one in others), f"{found[last, work]:.3g}"] for work in works])  # fmt: skip
