"""What LoRA on the vision tower costs the server: images encoded anew for each adapter."""

from __future__ import annotations

from itertools import product

from tests.bench.valora_serve.harness import FEW, metrics, table
from tests.bench.valora_serve.pictures import Pictures
from tests.bench.valora_serve.serve_models import TARGETS

ADAPTERS = 16
ASKING = (1, 4, 16)
"""Numbers of adapters that are asked about the same picture."""
CACHE = 4 << 30
"""Bytes that hold every encoded image of a run."""


def tower(bench):
    """Questions about the same pictures on several adapters, with and without LoRA on the tower.

    All adapters are asked about each of the pictures at once, and answer with `--answer` tokens.
    Without LoRA on tower and projector an image is encoded once for all of them.
    """
    arguments, given = bench.arguments, bench.targets
    pictures, rows = Pictures(bench, 24), []
    for targets in ("language", "all"):
        bench.stop()
        bench.targets = targets
        names = bench.start("slora", ADAPTERS, **(FEW | {"image_cache_bytes": CACHE}))
        bench.warm(names)
        for measured, asking in product((False, True), ASKING):
            shown = max(1, arguments.requests // asking)
            asked = [
                pictures.prepared(i, names[i % asking], [i // asking], words=16,
                                  output=arguments.answer, scene=f"{asking} {measured}")
                for i in range(shown * asking)
            ]  # fmt: skip
            before = bench.engine.images.encoded
            m = metrics(*bench.drive(asked), arguments.slo)
            if measured:
                encoded = (bench.engine.images.encoded - before) / shown
                rows.append([TARGETS[targets], asking, encoded, m["requests"], m["ttft"]])
                print(rows[-1], flush=True)
    bench.stop()
    bench.targets = given
    table(f"Pictures that several adapters are asked about, {bench.base}: "
          f"{arguments.requests} requests at once",
          ["LoRA on", "adapters a picture", "times encoded", "requests/s", "mean TTFT, ms"],
          rows)  # fmt: skip
