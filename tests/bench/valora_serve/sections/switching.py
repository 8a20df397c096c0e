"""What the swift switch saves end to end (VaLoRA Figure 21)."""

from __future__ import annotations

from itertools import product

from tests.bench.valora_serve.harness import FEW, metrics, poisson, skewed, table

SWITCHING = ("merge_only", "valora", "dlora")
"""Policies that merge often."""


def switching(bench):
    """Average token latency with merges in one launch, and with merges matrix by matrix."""
    arguments = bench.arguments
    names = bench.start("valora", 16, **FEW)
    bench.warm(names)
    rate = arguments.rate[0]
    times = poisson(rate, arguments.window, 3)
    chosen = skewed(len(times), 4, 0.6, 4)
    asked = [bench.request(i, 256, arguments.answer, names[chosen[i]]) for i in range(len(times))]
    rows = []
    for policy, slow in product(SWITCHING, (False, True)):
        bench.lmm.linears.by_matrix = slow
        bench.policy(policy)
        before = bench.engine.stats().switches
        m = metrics(*bench.drive(asked, times), arguments.slo)
        first = m["atl"] if not slow else rows[-1][3]
        rows.append([policy, "by matrix" if slow else "swift",
                     bench.engine.stats().switches - before, m["atl"], m["atl"] / first,
                     m["ttft"], m["p99"]])  # fmt: skip
    bench.lmm.linears.by_matrix = False
    table(f"The switch end to end: {rate:g} requests/s, 60 % on one of 4 adapters of rank 64",
          ["policy", "switch", "switches", "average token latency, ms", "of swift",
           "mean TTFT, ms", "p99 latency, ms"], rows)  # fmt: skip
