"""All domains of a picture in one pass, beside a pass for each."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from itertools import product

from tests.bench.valora_serve.harness import FEW, table
from tests.bench.valora_serve.pictures import Pictures
from tests.bench.valora_serve.serve_models import add_head

COUNTS, BATCHES = (1, 6, 12, 30), (1, 8)
REPEATS = 12


def domains(bench):
    """Milliseconds until all box heads of one adapter have answered about new pictures."""
    names = bench.start("valora", 1, **FEW)
    bench.warm(names)
    grid = bench.lmm.fixed_grid
    heads = [f"boxes-{number}" for number in range(max(COUNTS))]
    for number, name in enumerate(heads):
        add_head(bench.engine, name, names[0], ("one", "two"), seed=number, grid=grid)
    pictures = Pictures.of(bench)
    numbers = iter(range(10**6))  # no picture is known
    found = {}
    for together, count, batch in product((True, False), COUNTS, BATCHES):
        seconds = []
        for _ in range(REPEATS):
            asked = [
                [about(pictures, look, name) for name in heads[:count]]
                for look in (next(numbers) for _ in range(batch))
            ]
            start = time.perf_counter()
            for group in asked if together else zip(*asked, strict=True):
                states = []
                for one in group:
                    states.append(bench.engine.add(one, states if together else ()))
                if not together:
                    answer(bench.engine)
            answer(bench.engine)
            seconds.append(time.perf_counter() - start)
        found[together, count, batch] = 1e3 * statistics.median(seconds[2:])
        print(together, count, batch, found[together, count, batch], flush=True)
    one = {batch: found[True, 1, batch] for batch in BATCHES}
    table(f"All domains of a new picture, ms, {bench.base}: box heads on one adapter of rank 64",
          ["pictures at once", "domains", "one pass", "of one domain's", "a pass each"],
          [[batch, count, found[True, count, batch], found[True, count, batch] / one[batch],
            found[False, count, batch]] for batch, count in product(BATCHES, COUNTS)])  # fmt: skip


def about(pictures, look, name):
    """A domain's request about a picture, which is the same for every domain."""
    one = pictures.prepared(look, name, [look], scene="looks")
    return replace(one, request=replace(one.request, id=f"{look} {name}"))


def answer(engine):
    """Run until all requests are answered."""
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
