"""A fusion strategy of another package, chosen by its name; and a name that does not exist."""

import pytest

from valora_train.errors import SettingsError
from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.strategies.base import Probe
from valora_train.fusion.strategies.registry import make_strategy

EMPTIEST_FIRST = """
from valora_train.fusion.strategies.base import Strategy


class EmptiestFirst(Strategy):
    rehearse = True

    def candidates(self, domain, adapters, history, probes):
        if probes[domain].shortfall > 0.5:
            return []  # so far from its requirement, it gets an adapter of its own
        return sorted(adapters, key=lambda name: len(adapters[name]))


extension = EmptiestFirst
"""


def test_a_strategy_of_another_package_packs_a_simulated_fusion(installed):
    installed("valora.strategies", "emptiest_first", EMPTIEST_FIRST)
    required = dict.fromkeys(["a", "b", "hard", "c"], 0.5)
    probes = {name: Probe(0.5, -0.1 if name == "hard" else 0.4) for name in required}
    requirements = {name: Requirement(least) for name, least in required.items()}
    plan = FusionPlan(requirements, make_strategy("emptiest_first"), probes=probes)
    tried = []
    while (attempt := plan.next()) is not None:
        tried.append((*attempt.new, attempt.adapter, attempt.rehearse))
        plan.tell(dict.fromkeys(attempt.domains, 0.9))
    assert tried == [
        ("a", "adapter-1", False), ("b", "adapter-1", True),
        ("hard", "adapter-2", False), ("c", "adapter-2", True),
    ]  # fmt: skip
    assert plan.packing == {"adapter-1": ("a", "b"), "adapter-2": ("hard", "c")}
    known = "affinity, emptiest_first, first_fit, joint, paper, rehearsal"
    with pytest.raises(SettingsError, match=f"unknown fusion strategy 'best': .* {known}"):
        make_strategy("best")
