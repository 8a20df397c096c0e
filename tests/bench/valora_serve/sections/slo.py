"""SLO attainment and user satisfaction over the rate (S-LoRA Figures 6, 7, 9 to 12)."""

from __future__ import annotations

import statistics

import numpy as np

from tests.bench.valora_serve.harness import table

SYSTEMS = {
    "S-LoRA, first come": ("slora", {}),
    "S-LoRA, early abort": ("slora", {"early_abort": True}),
    "cost": ("cost", {}),
}
"""Policy and its settings by name; early abort admits the newest first under overload."""


def satisfaction(seconds, limit):
    """S-LoRA's reward (`slora/utils/metric.py`): 1 − (t / limit)² below the limit, then 0."""
    return 1 - (seconds / limit) ** 2 if seconds < limit else 0.0


def slo(bench):
    """Shares of requests whose first token comes in time, by rate.

    S-LoRA's synthetic workload (§7.2): Gamma gaps (cv 1), power-law adapters (α = 0.3), lengths
    uniform in [8, 512] both ways. Requests run for `--window` seconds and the limit; who has no
    first token by then, or was given up, counts as missed.
    """
    arguments = bench.arguments
    names = bench.start("slora", 100, (64, 32, 16, 8), max_requests=64)
    bench.warm(names)
    attained, happy = {}, {}
    for rate in arguments.overload:
        g = np.random.default_rng(11)
        times = np.cumsum(g.gamma(1.0, 1 / rate, int(2 * rate * arguments.window) + 10))
        times = times[times < arguments.window]
        share = np.diff((np.arange(101) / 100) ** 0.3)
        chosen = g.choice(100, len(times), p=share)
        lengths = g.integers(8, 513, (len(times), 2))
        asked = [
            bench.request(i, *map(int, lengths[i]), names[chosen[i]]) for i in range(len(times))
        ]
        limit = arguments.limit
        for system, (policy, settings) in SYSTEMS.items():
            bench.policy(policy, slo=limit, **settings)
            bench.drive(asked, times, within=arguments.window + limit)
            waits = [float(bench.firsts.get(one.id, np.inf)) for one in asked]
            attained[system, rate] = statistics.mean(wait <= limit for wait in waits)
            happy[system, rate] = statistics.mean(satisfaction(wait, limit) for wait in waits)
            print(system, rate, attained[system, rate], happy[system, rate], flush=True)
    for title, values in (("SLO attainment", attained), ("User satisfaction", happy)):
        table(f"{title} by requests/s: 100 adapters, first token within {arguments.limit:g} s",
              ["system", *(f"{rate:g}" for rate in arguments.overload)],
              [[system, *(values[system, rate] for rate in arguments.overload)]
               for system in SYSTEMS])  # fmt: skip
