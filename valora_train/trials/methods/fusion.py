"""A whole fusion with a strategy, at given requirements."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from valora_train.fusion.packing import Packing, make_plan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.state import FusionState
from valora_train.model.team import Team
from valora_train.trials.methods.base import Found, Method

if TYPE_CHECKING:
    from collections.abc import Mapping

    from valora_train.settings import TrainSettings
    from valora_train.trials.bench import Bench
    from valora_train.trials.store import Trial

FUSION = "fusion"
REQUIRED = "required"
DEDICATED = "dedicated"


class Fusion(Method):
    """Packs the domains with a strategy, as stage `fuse` does.

    The option `fusion` holds the settings of the fusion that its decisions depend on, `required`
    the requirement of each domain: its accuracy, margin and largest value. With `dedicated`, an
    attempt at a domain alone takes the dedicated adapter of the same seed instead of training, as
    stage `fuse` does, where that adapter is kept.
    """

    def run(self, bench: Bench, trial: Trial) -> Found:
        """Measure the domains without LoRA, pack them, and measure what is packed."""
        trainer = bench.trainer
        settings = replace(
            bench.inputs.settings.fusion, **trial.options[FUSION], parent=None, unreachable="keep"
        )
        requirements = {name: Requirement(*trial.options[REQUIRED][name]) for name in trial.domains}
        accuracy: dict[str, Mapping[str, Any]] = {}
        for name in trial.domains:
            head = trainer.train_head_only(name, trial.seed)
            accuracy[name] = bench.measure(None, name, head)
        without = {name: {"val": found["val"] or 0.0} for name, found in accuracy.items()}
        # A trial that was killed continues with the decisions in its folder.
        state = FusionState(bench.scratch, without, bench.inputs.settings.train.checkpoint_seconds)
        plan = make_plan(settings, requirements, state.head_only, trial.seed, None)
        takes = trial.options.get(DEDICATED, False)
        dedicated = bench.dedicated(trial.domains, trial.seed) if takes else None
        packing = Packing(plan, trainer, state, trial.seed, Team(), None, dedicated)
        packing.resume()
        while (attempt := plan.next()) is not None:
            packing.record(packing.run(attempt, lambda *_: None))
        for adapter, names in plan.packing.items():
            packing.load(adapter)
            accuracy |= {name: bench.measure(adapter, name) for name in names}
        verdicts = [str(decision.verdict) for decision in plan.decisions]
        return Found(
            accuracy,
            plan.packing,
            attempts=len(verdicts),
            facts={"verdicts": verdicts, "unreachable": list(plan.unreachable)},
        )

    def steps(self, train: TrainSettings, domains: int) -> int:
        """Steps if every other attempt is rolled back; nobody knows beforehand."""
        return round(1.5 * sum(train.steps_for(1, held) for held in range(domains)))
