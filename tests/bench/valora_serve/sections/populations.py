"""Throughput by number of adapters for each policy (VaLoRA Figure 23)."""

from __future__ import annotations

import numpy as np

from tests.bench.valora_serve.harness import metrics, table


def populations(bench):
    """Requests at once on uniformly popular adapters, which come from host memory.

    A policy that computes one adapter at a time would take minutes with thousands: what has not
    ended after `--window` seconds is left out, and the throughput is that until then.
    """
    arguments = bench.arguments
    total, counts = min(arguments.requests, 160), arguments.counts
    lengths = np.random.default_rng(7).integers(8, 257, (total, 2))
    rates = {}
    for n in counts:
        names = bench.start("cost", n, (8,), slots=256, max_adapters=256, max_requests=256)
        bench.warm(names[:64])
        chosen = np.random.default_rng(8).integers(0, n, total)
        asked = [bench.request(i, *map(int, lengths[i]), names[chosen[i]]) for i in range(total)]
        bench.drive(asked)
        for policy in arguments.policies:
            bench.policy(policy)
            done, wall = bench.drive(asked, within=arguments.window)
            rates[policy, n] = metrics(done, wall)["requests"] if done else 0.0
            print(policy, n, f"{len(done)} of {total}, {rates[policy, n]:.1f}/s", flush=True)
    table(f"Requests/s by number of adapters of rank 8: {total} at once",
          ["policy", *map(str, counts), "last / first"],
          [[p, *(rates[p, n] for n in counts),
            rates[p, counts[-1]] / rates[p, counts[0]] if rates[p, counts[0]] else None]
           for p in arguments.policies])  # fmt: skip
