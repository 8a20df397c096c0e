"""Oracle tables made up for tests."""

from __future__ import annotations

import random

from tests.bench.valora_train.oracle_table import Measured, OracleTable


def made_up_table(domains, accuracy, head_only=0.0, seeds=(0,)):
    """A complete table; `accuracy` says what a domain reaches in a group, on both splits."""
    table = OracleTable("made_up", list(domains), dict.fromkeys(domains, 1.0))
    for seed in seeds:
        table.head_only[seed] = dict.fromkeys(domains, Measured(head_only, head_only))
        table.groups[seed] = {}
        for group in table.names():
            reached = {name: accuracy(name, group) for name in group}
            found = {name: Measured(value, value) for name, value in reached.items()}
            table.groups[seed][frozenset(group)] = found
    return table


def interference_table(domains, seed, strength=0.06, noise=0.005):
    """Every domain takes something from every other one that shares its adapter; few take much."""
    draw = random.Random(seed)
    alone = {name: draw.uniform(0.85, 0.98) for name in domains}
    takes = {
        (mine, other): draw.uniform(0, strength) * draw.random() ** 2
        for mine in domains
        for other in domains
        if mine != other
    }

    def accuracy(name, group):
        lost = sum(takes[name, other] for other in group if other != name)
        jitter = random.Random(f"{seed} {name} {sorted(group)}").gauss(0, noise)
        return min(max(alone[name] - lost + jitter, 0.0), 1.0)

    return made_up_table(domains, accuracy)


def conflict_table(domains, seed, share):
    """Some pairs of domains cannot share an adapter; everything else can."""
    draw = random.Random(seed)
    conflicts = {
        frozenset((one, other))
        for at, one in enumerate(domains)
        for other in domains[at + 1 :]
        if draw.random() < share
    }

    def accuracy(name, group):
        return 0.5 if any(frozenset((name, other)) in conflicts for other in group) else 0.9

    return made_up_table(domains, accuracy)
