"""Mixture mode against switching, by the share of starving requests (VaLoRA Figure 20)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from tests.bench.valora_serve.harness import FEW, table
from valora_serve.orchestrator.registry import make_policy
from valora_serve.types import Mode

ROWS = 32
SHARES = (0.0625, 0.125, 0.25, 0.5, 0.75)
WAYS = ("mixture", "unmerged", "switching")


class Forced:
    """The batch of `unmerge_only`, in a way that is told.

    ``mixture`` keeps the first adapter merged with all rows in the batch, ``unmerged`` merges
    nothing, and ``switching`` merges it for its own rows and unmerges it for the others, in turns.
    """

    def __init__(self, engine, way):
        self._inner, self._way, self._own = make_policy("unmerge_only", engine.cost), way, True
        self.merged = None

    def decide(self, view):
        decision = self._inner.decide(view)
        if self._way == "unmerged" or self.merged not in view.resident:
            return decision
        known = {one.id: one.adapter for one in (*view.running, *view.waiting)}
        if self._way == "mixture" or any(one.prompt_left for one in view.running):
            return replace(decision, mode=Mode.MIXTURE, merged=self.merged)
        parts = [
            tuple(item for item in decision.batch if (known[item[0]] == self.merged) is own)
            for own in (True, False)
        ]
        self._own = not self._own if all(parts) else bool(parts[0])
        if self._own:
            return replace(decision, mode=Mode.MERGED, merged=self.merged, batch=parts[0], until=0)
        return replace(decision, mode=Mode.UNMERGED, merged=None, batch=parts[1], until=0)

    def finished(self, request_id):
        self._inner.finished(request_id)


def starving(bench):
    """Milliseconds in which each of 32 decoding requests gets a token."""
    names = bench.start("valora", 16, **FEW)
    bench.warm(names)
    engine, rows = bench.engine, []
    first = engine.registry.key(engine.store.resolve(names[0]).adapter)
    spent = {}
    # The first time captures what is missing, where there are graphs.
    for _, share, way in product(range(1 + (bench.device.type != "cpu")), SHARES, WAYS):
        engine.policy = Forced(engine, way)
        engine.policy.merged = first
        others = round(share * ROWS)
        took = {}
        for output in (1, 1 + bench.arguments.answer):
            asked = [
                bench.request(i, 64, output, names[1 + i % 15] if i < others else names[0])
                for i in range(ROWS)
            ]
            took[output] = bench.drive(asked)[1]
        least, most = sorted(took)
        spent[share, way] = 1e3 * (took[most] - took[least]) / (most - least)
    for share in SHARES:
        mixture, unmerged, turns = (spent[share, way] for way in WAYS)
        rows.append([f"{share:.0%}", mixture, unmerged, turns, mixture / turns])
    engine.merge_state.switch(Mode.UNMERGED, None)
    bench.policy("valora")
    table(f"A token for each of {ROWS} requests, ms, by the share of those not on the merged one",
          ["starving", "mixture", "all unmerged", "switching in turns", "mixture / switching"],
          rows)  # fmt: skip
