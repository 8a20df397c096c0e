"""Each part off, one at a time (VaLoRA Figure 24)."""

from __future__ import annotations

import numpy as np

import tests.bench.valora_kernels.operators  # noqa: F401 - registers those to compare with
from tests.bench.valora_serve.harness import metrics, poisson, skewed, table
from tests.bench.valora_serve.pictures import Pictures

ADAPTERS = 8
PARTS = {
    "none": {},
    "static": {"operator": "static"},
    "bgmv": {"operator": "bgmv"},
    "padded": {"operator": "padded"},
    "einsum": {"operator": "einsum"},
    "switch": {"switch": "by_matrix"},
    "mixture": {"mixture": False},
    "memory": {"adapter_share": 0.3},
    "prefixes": {"prefix_cache": False},
    "images": {"image_cache_bytes": 0, "prefix_cache": False},
}
"""What is taken away, as settings: nothing, ATMM (for another operator), or a part."""
ORDER = sorted(PARTS, key=lambda name: name not in ("none", "switch", "mixture"))
"""First what one engine can do."""
COMMON = {"prefix_cache": True, "max_requests": 32, "max_adapters": ADAPTERS}


def requests_of(bench, names, times, scene):
    """Questions about 24 pictures of a scene, most of them to the first adapter."""
    pictures = Pictures.of(bench)
    count = len(times)
    chosen = skewed(count, len(names), 0.6, 4)
    which = np.random.default_rng(5).zipf(1.5, count) % 24
    return [
        pictures.prepared(i, names[chosen[i]], [int(which[i])], words=64,
                          output=bench.arguments.answer, scene=scene)
        for i in range(count)
    ]  # fmt: skip


def ablation(bench):
    """Average token latency with each part off, one at a time.

    Pictures repeat, as in questions about the same scene, so that both caches matter. What needs
    no other kernels is switched off in an engine that is there.
    """
    arguments = bench.arguments
    times = poisson(arguments.rate[0], arguments.window, 3)
    rows, here = [], None
    for name in sorted(arguments.parts, key=ORDER.index):
        off = PARTS[name]
        options = {key: value for key, value in off.items() if key not in ("switch", "mixture")}
        options = COMMON | options
        if options != here:
            names = bench.start("valora", ADAPTERS, **options)
            bench.warm(names)
            here = options
        bench.lmm.linears.by_matrix = off.get("switch") == "by_matrix"
        bench.policy("valora", mixture=off.get("mixture", True))
        # Graphs that are missed are captured now. Every part begins with empty caches.
        bench.drive(requests_of(bench, names, times[: len(times) // 2], f"before {name}"))
        before = bench.engine.stats()
        m = metrics(*bench.drive(requests_of(bench, names, times, name), times), arguments.slo)
        bench.lmm.linears.by_matrix = False
        after = bench.engine.stats()
        first = rows[0][1] if rows else m["atl"]
        rows.append([name, m["atl"], m["atl"] / first, m["ttft"], m["between"],
                     after.switches - before.switches])  # fmt: skip
        print(rows[-1], flush=True)
    table(f"Each part off, {arguments.rate[0]:g} questions about pictures a second (`valora`)",
          ["off", "average token latency, ms", "of all parts", "mean TTFT, ms",
           "mean inter-token, ms", "switches"], rows)  # fmt: skip
