"""S-LoRA's Figures 5, 6 and 10 to 12 and VaLoRA's 23 on the simulator, with an H200's costs.

`python -m tests.bench.valora_serve.sim_slora` prints a table each. The workload is S-LoRA's
(§7.2): Gamma gaps, power-law adapters, lengths uniform in [8, 512], first token within 6 s. Rates
are higher than the paper's, as an H200 answers more than an A10G.
"""

import argparse
from itertools import product
from pathlib import Path

from tests.bench.valora_serve.harness import table
from valora_serve.orchestrator.cost_model import CostModel
from valora_serve.orchestrator.decision import PolicySettings
from valora_serve.orchestrator.policies.baselines import SLoraPolicy
from valora_serve.orchestrator.registry import POLICIES
from valora_serve.workloads import traces
from valora_serve.workloads.cli import MEASURED
from valora_serve.workloads.simulator import SimSettings, simulate

LIMIT = 6.0


class LastComeFirstServed(SLoraPolicy):
    """The newest request first, however long others wait."""

    def plan(self, view, waiting):
        return super().plan(view, waiting[::-1])


WAYS = {
    "S-LoRA, first come": (SLoraPolicy, {}),
    "S-LoRA, last come": (LastComeFirstServed, {"patience": float("inf")}),
    "S-LoRA, early abort": (SLoraPolicy, {"early_abort": True}),
    "cost": (POLICIES["cost"], {}),
    "cost, early abort": (POLICIES["cost"], {"early_abort": True}),
}


PAGES, SHARE = 13_000, 0.3
VARIANTS = {
    "S-LoRA": {},
    "padded products": {"lora": 10},
    "fixed pools": {"pages": int(PAGES * (1 - SHARE)), "slots": int(PAGES * SHARE) // 16,
                    "rank_pages": 0.0},
}  # fmt: skip
"""S-LoRA without one of its parts: LoRA costs ten times as much where ranks and lengths are padded
(`bench_operators`), and a part of the pages can hold nothing but adapters."""


def simulated(options, policy, settings, rate, *, lora=1, machine=None, **load):
    """Requests/s, mean first token in s, attainment and satisfaction."""
    load = {"adapters": options.adapters, "ranks": (64,), **load}
    workload = traces.slora(rate, options.duration, **load)
    costs = CostModel.read(options.costs).with_lora(lora)
    made = policy(costs, PolicySettings(slo=LIMIT, **settings))
    given = {"slots": options.slots, "pages": PAGES, **(machine or {})}
    found = simulate(workload, made, costs, SimSettings(slo=LIMIT, **given))
    return [found.throughput, found.first_token[0], found.attainment, found.satisfaction]


def at_once(options, name, adapters):
    """Requests/s of 400 that arrive at once, all adapters equally popular."""
    workload = traces.at_once(400, adapters=adapters, skew=None)
    costs = CostModel.read(options.costs)
    return simulate(workload, POLICIES[name](costs, PolicySettings()), costs).throughput


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--costs", type=Path, default=MEASURED / "atmm.json")
    parser.add_argument("--duration", type=float, default=120.0)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--slots", type=int, default=256, help="not of the variants")
    parser.add_argument("--rates", type=float, nargs="+", default=[24, 32, 40, 50])
    parser.add_argument("--rate", type=float, default=40, help="of Figures 10 to 12")
    options = parser.parse_args()
    head = ["requests/s", "mean first token, s", "attainment", "satisfaction"]
    table("S-LoRA, Figure 6: by rate", ["rate", "policy", *head], [
        [rate, name, *simulated(options, *way, rate)]
        for rate in options.rates for name, way in WAYS.items()
    ])  # fmt: skip
    table(f"S-LoRA, Figure 10: by variation of the gaps, rate {options.rate:g}",
          ["cv", "policy", *head], [
        [cv, name, *simulated(options, *way, options.rate, cv=cv)]
        for cv in (1, 2, 4) for name, way in WAYS.items()
    ])  # fmt: skip
    for number, what, values in ((11, "alpha", (0.1, 0.3, 0.6, 1.0)), (12, "cv", (1, 2, 4))):
        rows = []
        for size in (0, 8, 128):
            rows.append([size])
            for value in values:
                way = SLoraPolicy, {"clusters": size}
                speed, _, kept, _ = simulated(options, *way, options.rate, **{what: value})
                rows[-1].append(f"{speed:.2f}, {kept:.3f}")
        title = f"S-LoRA, Figure {number}: requests/s, attainment by size of clusters (0: none)"
        table(title, ["clusters", *(f"{what} {value:g}" for value in values)], rows)
    rows = []
    for count, (name, given) in product((5, 100, 1000), VARIANTS.items()):
        machine = {key: value for key, value in given.items() if key != "lora"}
        way, lora = (SLoraPolicy, {}), given.get("lora", 1)
        found = simulated(options, *way, options.rates[0], adapters=count, lora=lora,
                          machine=machine)  # fmt: skip
        rows.append([count, name, *found])
    table(f"S-LoRA, Figures 5 and 6: variants, rate {options.rates[0]:g}",
          ["adapters", "variant", *head], rows)  # fmt: skip
    counts = (5, 100, 1000)
    table("VaLoRA, Figure 23: requests/s of 400 at once by adapters", ["policy", *map(str, counts)],
          [[name, *(at_once(options, name, count) for count in counts)]
           for name in ("cost", "valora", "dlora", "unmerge_only", "merge_only")])  # fmt: skip


if __name__ == "__main__":
    main()
