"""dLoRA's balancing of replicas, as a baseline: placement, dispatch and migration.

After dLoRA (Wu et al., OSDI 2024, §5) and its published code (LLMServe/dLoRA-artifact): adapters
are placed on replicas, and a request goes to the cheapest one of its adapter. Every ten seconds an
integer program moves requests, with their keys and values, and adapters between two replicas.

`python -m tests.bench.valora_serve.dlora_migration --replicas 4 --router affinity dlora …` is
`valora-sim` with one more router, `dlora`; it needs SciPy.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter, defaultdict
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from valora_serve.workloads.cli import main
from valora_serve.workloads.cluster import WAYS, Dispatch
from valora_serve.workloads.traces import BASE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from valora_serve.workloads.simulator import Machine, SimulatedRequest

MOVE_SECONDS = 0.05  # of a request and its keys and values, as the published program assumes
DEFAULT_SECONDS = 5.0  # of a request whose adapter has answered none yet
MERGED_COST = 0.6  # of a batch of one adapter, against a batch of several
FULL = 0.9  # share of a replica's pages from which it moves requests for their memory
THRESHOLD = 16  # requests above the mean from which a replica moves some
GIB = 1 << 30
SWAP_PAGES = 32 * GIB / (16 * (1 << 19))  # pages a second over PCIe, at 0.5 MiB a token

Flow = dict[tuple[str | None, int, int], int]  # requests of an adapter, from and to a replica


def insert(machine: Machine, view: SimulatedRequest) -> None:
    """Continue a request that another machine began; its keys and values come with it."""
    if view.running:
        # A step of one prompt token reads the keys and values and computes the next token, as a
        # decode step does.
        view.prompt_left = max(1, view.prompt_left)
        view.pages = machine._pages(view.kv_tokens + view.prompt_left)
        view.held, view.running, view.served = 0, False, None
    machine._enter(view)


class DLoraDispatch(Dispatch):
    """Placement, dispatch and periodic migration of dLoRA."""

    interval = 10.0

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._placed: list[set[str]] = []  # adapters of each replica
        self._capacity: list[int] = []
        self._asked: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()  # events of one moment keep their order
        self._until = -math.inf  # the next arrival
        self.migrations = 0

    def at(self, time: float, act: Callable[[float], None]) -> None:
        """Plan something for a time in seconds, to which all replicas are advanced before."""
        heapq.heappush(self._events, (time, next(self._order), act))

    def advance(self, machines: Sequence[Machine], until: float) -> None:
        if self._until == -math.inf:
            self.start(machines)
        self._until = until
        while self._events and self._events[0][0] < until:
            time, _, act = heapq.heappop(self._events)
            super().advance(machines, time)
            act(time)
        super().advance(machines, until)

    def start(self, machines: Sequence[Machine]) -> None:
        """Plan the rounds of moves, every `interval` seconds."""

        def migrate(time: float) -> None:
            for key, source, target in self.moves(machines, time):
                old, new = machines[source], machines[target]
                view = old.remove(key)
                self.owner[int(key)] = target
                self.migrations += 1
                # What the machine computes now is computed before the request leaves.
                there = max(time, old.now) + MOVE_SECONDS
                self.at(there, lambda _, new=new, view=view: insert(new, view))
            if self._events or self._until < math.inf or any(m.views for m in machines):
                self.at(time + self.interval, migrate)

        self.at(machines[0].arrivals[0] + self.interval, migrate)

    def _place(self, machines: Sequence[Machine]) -> None:
        """Place every adapter on one replica, in turn, and one adapter on all of them."""
        adapters = machines[0].workload.adapters
        self._placed = [set(adapters[n :: len(machines)]) for n in range(len(machines))]
        if adapters:
            everywhere = self._random.choice(adapters)
            for placed in self._placed:
                placed.add(everywhere)
        self._capacity = [len(placed) for placed in self._placed]

    def choose(self, adapter: str | None, machines: Sequence[Machine], time: float) -> int:
        """Choose the replica with the least cost among those of the adapter."""
        if not self._placed:
            self._place(machines)
        load = [machine.outstanding(time) for machine in machines]
        everywhere = range(len(machines))
        if adapter is None:
            return min(everywhere, key=load.__getitem__)
        self._asked[adapter] += 1
        homes = [n for n in everywhere if adapter in self._placed[n]]
        if not homes:
            homes = [min(everywhere, key=load.__getitem__)]
            self._placed[homes[0]].add(adapter)
        return min(homes, key=lambda n: (_cost(machines[n]), load[n]))

    def moves(self, machines: Sequence[Machine], time: float) -> list[tuple[str, int, int]]:
        """Balance two replicas, if one has far more to do than the mean or no memory left."""
        if not self._placed:
            return []
        pair = _pair(machines)
        if pair is None:
            return []
        groups: Any = defaultdict(list)
        for n in pair:
            for view in machines[n].views.values():
                groups[view.adapter, n].append(view)
        pages = {
            key: float(np.mean([view.held + view.pages for view in views]))
            for key, views in groups.items()
        }
        names = sorted(self._placed[pair[0]] | self._placed[pair[1]]
                       | {adapter for adapter, _ in groups if adapter is not None})  # fmt: skip
        solved = solve(
            names,
            pair,
            {key: len(views) for key, views in groups.items()},
            pages,
            _seconds(machines[0], time),
            {n: self._capacity[n] for n in pair},
            {n: machines[n].settings.pages for n in pair},
        )
        if solved is None:
            return []
        flow, placed = solved
        for n in pair:
            self._placed[n] = placed[n]
        self._fill()
        found = []
        for (adapter, source, target), number in sorted(flow.items(), key=str):
            # Those that came last have computed the least.
            views = sorted(groups[adapter, source], key=lambda r: (-r.arrival, r.id))
            found += [(view.id, source, target) for view in views[:number]]
        return found

    def _fill(self) -> None:
        """Place more copies while there is room, of what is asked for most per copy."""
        copies = Counter(adapter for placed in self._placed for adapter in placed)
        while True:
            room = [limit - len(p) for limit, p in zip(self._capacity, self._placed, strict=True)]
            most = max(range(len(room)), key=room.__getitem__)
            wanted = [a for a in self._asked if a not in self._placed[most]]
            if room[most] <= 0 or not wanted:
                return
            best = max(wanted, key=lambda a: (self._asked[a] / (copies[a] + 1e-7), a))
            self._placed[most].add(best)
            copies[best] += 1


def _cost(machine: Machine) -> float:
    """Predict a replica's cost in batches: full batches of one adapter, and the rest together."""
    size = machine.settings.max_requests
    counts = Counter(view.adapter for view in machine.views.values()).values()
    merged = sum(number // size for number in counts)
    return merged * MERGED_COST + sum(number % size for number in counts) // size


def _pair(machines: Sequence[Machine]) -> tuple[int, int] | None:
    """Choose the two replicas to balance: by memory where one is full, otherwise by requests."""
    if len(machines) < 2:
        return None
    everywhere = range(len(machines))
    used = [sum(v.held + v.pages for v in m.views.values()) for m in machines]
    most, least = max(everywhere, key=used.__getitem__), min(everywhere, key=used.__getitem__)
    full = [FULL * machine.settings.pages for machine in machines]
    if used[most] >= full[most] and used[least] < full[least]:
        return min(most, least), max(most, least)
    load = [len(machine.views) for machine in machines]
    most, least = max(everywhere, key=load.__getitem__), min(everywhere, key=load.__getitem__)
    mean = sum(load) / len(load)
    if load[most] - mean < THRESHOLD or load[least] >= mean:
        return None
    return min(most, least), max(most, least)


def _seconds(machine: Machine, time: float) -> dict[str | None, float]:
    """Mean seconds from the first token to the end, by adapter, of what is answered so far."""
    w = machine.workload
    spent = machine.end - machine.first
    known = machine.end <= time  # False for NaN
    numbers = w.adapter[known] - BASE
    total = np.bincount(numbers, spent[known], len(w.adapters) + 1)
    answered = np.bincount(numbers, minlength=len(w.adapters) + 1)
    names: list[str | None] = [None, *w.adapters]
    return {
        name: float(total[i] / answered[i]) if answered[i] else DEFAULT_SECONDS
        for i, name in enumerate(names)
    }


def solve(
    names: Sequence[str],
    pair: tuple[int, int],
    counts: Mapping[tuple[str | None, int], int],
    pages: Mapping[tuple[str | None, int], float],
    seconds: Mapping[str | None, float],
    capacity: Mapping[int, int],
    memory: Mapping[int, int],
) -> tuple[Flow, dict[int, set[str]]] | None:
    """Solve dLoRA's integer program for two replicas.

    It minimises the time of the replica that needs the longest: the seconds of its requests, of the
    moves to it, and of swapping the pages that its memory does not hold, with `capacity` adapters
    on each. Requests of one adapter on one replica are alike, so that their number is a variable,
    where the published code has one for each request. Counts and mean pages of requests are by
    adapter (None: base model) and replica. Returns moves and placement; None if there are none.
    """
    kinds = sorted(counts, key=str)
    stays = [(key, target) for key in kinds for target in pair]  # variables: requests
    places = [(name, target) for name in names for target in pair]  # variables: 0 or 1
    x = {item: i for i, item in enumerate(stays)}
    y = {item: len(stays) + i for i, item in enumerate(places)}
    swap = {target: len(stays) + len(places) + i for i, target in enumerate(pair)}
    longest = len(stays) + len(places) + len(pair)

    rows: list[tuple[dict[int, float], float, float]] = []  # coefficients, least, most
    for key in kinds:
        rows.append(({x[key, n]: 1.0 for n in pair}, counts[key], counts[key]))
    for name in names:
        of_name = [key for key in kinds if key[0] == name]
        number = sum(counts[key] for key in of_name)
        for n in pair:
            if of_name:
                sums = {x[key, n]: 1.0 for key in of_name}
                rows.append(({**sums, y[name, n]: -number}, -math.inf, 0.0))
    for n in pair:
        rows.append(({y[name, n]: 1.0 for name in names}, -math.inf, float(capacity[n])))
        held = {x[key, n]: pages[key] / SWAP_PAGES for key in kinds}
        rows.append(({**held, swap[n]: -1.0}, -math.inf, memory[n] / SWAP_PAGES))
        spent = {
            x[key, n]: seconds[key[0]] + (MOVE_SECONDS if key[1] != n else 0.0) for key in kinds
        }
        rows.append(({**spent, swap[n]: 1.0, longest: -1.0}, -math.inf, 0.0))
    matrix = lil_matrix((len(rows), longest + 1))
    for i, (row, _, _) in enumerate(rows):
        for j, value in row.items():
            matrix[i, j] = value
    whole, upper = np.zeros(longest + 1), np.full(longest + 1, np.inf)
    whole[len(stays) : len(stays) + len(places)] = 1
    upper[len(stays) : len(stays) + len(places)] = 1
    goal = np.zeros(longest + 1)
    goal[longest] = 1
    found: Any = milp(
        goal,
        integrality=whole,
        bounds=Bounds(0, upper),
        constraints=LinearConstraint(
            matrix.tocsr(), [row[1] for row in rows], [row[2] for row in rows]
        ),
        # Not a limit on time, with which the result would depend on the machine.
        options={"mip_rel_gap": 0.02, "node_limit": 500},
    )
    if found.x is None:
        return None
    flow: Flow = {}
    for key in kinds:
        target = pair[1] if key[1] == pair[0] else pair[0]
        number = round(float(found.x[x[key, target]]))
        if number:
            flow[key[0], key[1], target] = number
    placed = {n: {name for name in names if found.x[y[name, n]] > 0.5} for n in pair}
    return flow, placed


WAYS["dlora"] = DLoraDispatch

if __name__ == "__main__":
    sys.exit(main())
