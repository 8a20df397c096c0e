"""A policy of another package beside the built-in ones."""

from valora_serve.engine.settings import EngineSettings
from valora_serve.orchestrator.cost_model import H200_7B
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.types import Mode
from valora_serve.workloads import traces
from valora_serve.workloads.cli import main
from valora_serve.workloads.simulator import simulate

NEWEST_FIRST = """
from valora_serve.orchestrator.base import BasePolicy
from valora_serve.orchestrator.batching import BatchPlan
from valora_serve.types import Mode


class NewestFirst(BasePolicy):
    modes = frozenset({Mode.UNMERGED})

    def plan(self, view, waiting):
        return BatchPlan(Mode.UNMERGED, None, view.running, waiting[::-1], "newest first")


extension = NewestFirst
"""


def test_a_policy_of_another_package(installed, capsys, tmp_path):
    installed("valora.policies", "newest", NEWEST_FIRST)
    assert "newest" in POLICIES and POLICIES["newest"].modes == {Mode.UNMERGED}
    assert EngineSettings(policy="newest").policy == "newest"
    work = traces.poisson(60, 3, seed=1)
    report = simulate(work, make_policy("newest", H200_7B), H200_7B)
    assert report.finished == len(work) and report.modes["unmerged"] == 1
    trace = tmp_path / "decisions.txt"
    assert main(["--policies", "newest", "--duration", "2", "--decision-trace", str(trace)]) == 0
    assert "newest" in capsys.readouterr().out
    assert "newest first" in trace.read_text()
