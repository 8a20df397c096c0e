"""Runs the attempts of a fusion: trains, judges, then commits or rolls back.

After every attempt the decision and the adapter's snapshot are on disk before the next attempt
starts, and within an attempt there are checkpoints, so a fusion that is killed at any moment is
resumed with the same decisions.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from valora_data.schema import Split
from valora_train.errors import UnreachableError
from valora_train.fusion.plan import FusionPlan, order_domains
from valora_train.fusion.state import attempt_facts, of_domains
from valora_train.fusion.strategies.base import Probe, Probes
from valora_train.fusion.strategies.registry import make_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from valora_train.fusion.decision import Attempt, AttemptDecision
    from valora_train.fusion.parent import Parent
    from valora_train.fusion.requirement import Requirement
    from valora_train.fusion.state import FusionState
    from valora_train.fusion.trainer import OnFigures, Trainer
    from valora_train.model.team import Team
    from valora_train.settings import FusionSettings
    from valora_train.tasks.base import Evaluation


@dataclass(frozen=True, slots=True)
class DedicatedAdapter:
    """The adapter in which a domain was trained alone before the fusion.

    Attributes:
        key: What names its training among all others.
        read: Reads its snapshot.
    """

    key: str
    read: Callable[[], Mapping[str, Tensor]]


def dedicated_of(
    attempt: Attempt, dedicated: Mapping[str, DedicatedAdapter]
) -> DedicatedAdapter | None:
    """The adapter that an attempt takes instead of training, if its domain is alone in it.

    Args:
        attempt: The attempt.
        dedicated: The dedicated adapters by domain.
    """
    if len(attempt.domains) > 1:
        return None
    return dedicated.get(attempt.domains[0])


@dataclass(frozen=True)
class Outcome:
    """What came out of an attempt.

    Attributes:
        decision: The verdict of the plan.
        evaluations: Evaluation on the validation split of every domain of the attempt; empty if
            training diverged.
        seconds: Duration of training, evaluation and snapshot, in seconds.
    """

    decision: AttemptDecision
    evaluations: Mapping[str, Evaluation]
    seconds: float


def make_plan(
    settings: FusionSettings,
    requirements: Mapping[str, Requirement],
    head_only: Mapping[str, Mapping[str, float]],
    seed: int,
    parent: Parent | None,
) -> FusionPlan:
    """The plan of a fusion before its first attempt.

    Args:
        settings: Strategy, order, and whether domains may take no adapter.
        requirements: What each domain must reach, in the order of the configuration.
        head_only: Accuracy of each domain without LoRA (see `FusionState`).
        seed: Seed of a random order.
        parent: The fusion to extend, if any.
    """
    probes: Probes = {
        name: Probe(requirement.required, head_only[name]["val"])
        for name, requirement in requirements.items()
    }
    order = order_domains(list(requirements), settings.order, seed, probes)
    return FusionPlan(
        {name: requirements[name] for name in order},
        make_strategy(settings.strategy),
        probes=probes,
        head_only=settings.head_only,
        packed=parent.kept if parent else None,
        unpacked=parent.unpacked if parent else (),
        alone=parent.alone if parent else None,
        used=parent.used if parent else 0,
    )


def check_reachable(
    unreachable: Mapping[str, float],
    requirements: Mapping[str, Requirement],
    met: Sequence[str],
    waiting: Sequence[str] = (),
) -> None:
    """Refuse a fusion, finished or not, in which a domain misses its requirement.

    Args:
        unreachable: Accuracy on the validation split of the domains that miss their requirement
            even alone.
        requirements: What each domain must reach.
        met: The domains that reach it.
        waiting: The domains that were not tried yet.

    Raises:
        UnreachableError: If there is such a domain.
    """
    if not unreachable:
        return
    misses = ", ".join(
        f"{name} reached {accuracy:.3f} < {requirements[name].text}"
        for name, accuracy in unreachable.items()
    )
    kept = f"export the domains that met ({', '.join(met)})" if met else "export it all the same"
    rest = f" after trying the others ({', '.join(waiting)})" if waiting else ""
    raise UnreachableError(
        f"out of reach even in an adapter of its own: {misses}; lower the requirement, train "
        "longer (train.steps, train.lora.rank), or run again with fusion.unreachable=keep to "
        f"{kept}{rest}: what is trained is kept"
    )


class DivergedError(Exception):
    """Training made the loss or the weights infinite or NaN."""


def stop_if_diverged(on_step: Callable[[int, int, float], None]) -> Callable[..., None]:
    """A callback for training that ends it once the loss is no finite number."""

    def watch(step: int, steps: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise DivergedError
        on_step(step, steps, loss)

    return watch


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise if a weight became infinite or NaN in the last step."""
    for tensor in tensors.values():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DivergedError


class Packing:
    """The attempts of a fusion.

    Args:
        plan: Decides what to try and judges it.
        trainer: Trains and evaluates.
        state: Files of the fusion on disk.
        seed: Seed of the fusion.
        team: The processes that train together.
        parent: The fusion to extend, if any.
        dedicated: Dedicated adapters by domain. An attempt at a domain alone takes its own instead
            of training the domain again.

    Attributes:
        taken: Numbers of the attempts so far that took a dedicated adapter.
        evaluated: Evaluation on the validation split of domains, in the adapters that hold them; of
            those that this process committed.
    """

    def __init__(
        self,
        plan: FusionPlan,
        trainer: Trainer,
        state: FusionState,
        seed: int,
        team: Team,
        parent: Parent | None,
        dedicated: Mapping[str, DedicatedAdapter] | None = None,
    ) -> None:
        self._plan = plan
        self._trainer = trainer
        self._state = state
        self._seed = seed
        self._team = team
        self._parent = parent
        self._dedicated = dedicated or {}
        self.taken: set[int] = set()
        self.evaluated: dict[str, Evaluation] = {}

    def resume(self) -> int:
        """Replay the decisions on disk and load the adapters that they left.

        Returns:
            Number of attempts that were replayed.
        """
        decisions = [self._plan.tell(accuracy) for accuracy in self._state.told]
        # An earlier version kept no facts of attempts.
        for decision, facts in zip(decisions, self._state.attempts, strict=False):
            if facts.get("dedicated"):
                self.taken.add(decision.attempt.number)
        for adapter in self._state.snapshots:
            self.load(adapter)
        return len(self._state.told)

    def load(self, adapter: str) -> None:
        """Make an adapter resident, from its own snapshot or from the fusion that is extended."""
        if adapter in self._trainer.adapters:
            return
        if adapter in self._state.snapshots:
            snapshot = self._state.read_snapshot(adapter)
        elif self._parent is not None:
            snapshot = self._parent.snapshot(adapter)
        else:
            return
        # Domains may have left the adapter since.
        self._trainer.restore(adapter, of_domains(snapshot, self._plan.packing[adapter]))

    def run(
        self,
        attempt: Attempt,
        on_step: Callable[[int, int, float], None],
        on_figures: OnFigures = lambda *_: None,
    ) -> Outcome:
        """Train and judge the plan's next attempt, then commit it or roll it back.

        Args:
            attempt: What `FusionPlan.next` returned.
            on_step: Called with step (from 1), number of steps, and loss.
            on_figures: Called with step and further figures by name, see `Trainer.train`.
        """
        start = time.monotonic()
        trainer, adapter = self._trainer, attempt.adapter
        # Everything random in an attempt follows from these two numbers and from the snapshot.
        seed = self._seed * 1_000 + attempt.number
        alone = dedicated_of(attempt, self._dedicated)
        if attempt.held:
            self.load(adapter)
            before = trainer.snapshot(adapter)
        elif alone is None:
            trainer.open(adapter, seed)
        else:
            trainer.restore(adapter, alone.read())
            self.taken.add(attempt.number)
        evaluations: dict[str, Evaluation] = {}
        try:
            if alone is None:
                trainer.train(
                    adapter,
                    attempt.new,
                    held=attempt.held,
                    rehearse=attempt.rehearse,
                    seed=seed,
                    on_step=stop_if_diverged(on_step),
                    on_figures=on_figures,
                    checkpoint=self._state.checkpoint,
                )
            trained = trainer.snapshot(adapter)
            check_finite(trained)
            for name in attempt.domains:
                evaluations[name] = trainer.evaluate(adapter, name, Split.VAL)
            reached = {name: evaluation.accuracy for name, evaluation in evaluations.items()}
        except DivergedError:
            reached = dict.fromkeys(attempt.domains, math.nan)
        decision = self._plan.tell(self._team.agree(reached))
        if decision.kept:
            # Evaluating has calibrated the heads.
            kept = of_domains(trainer.snapshot(adapter), decision.kept)
            self._state.write_snapshot(adapter, attempt.number, kept)
            self.evaluated |= {name: evaluations[name] for name in decision.kept}
            if decision.left_out:
                trainer.restore(adapter, kept)
            self._take_out(set(attempt.moved) & set(decision.kept), adapter)
        elif attempt.held:
            trainer.restore(adapter, before)
        else:
            trainer.close(adapter)
        seconds = self._state.checkpoint.spent + time.monotonic() - start
        return Outcome(decision, evaluations, seconds)

    def _take_out(self, moved: Iterable[str], adapter: str) -> None:
        """Take domains out of the adapters that held them, and drop adapters that hold nothing."""
        if not moved:
            return
        packing = self._plan.packing
        for other in set(self._trainer.adapters) - {adapter}:
            if other not in packing:
                self._trainer.close(other)
            elif set(self._trainer.heads(other)) & set(moved):
                self._trainer.restore(
                    other, of_domains(self._trainer.snapshot(other), packing[other])
                )
        self._state.forget(packing)

    def record(self, outcome: Outcome) -> None:
        """Write a decision to disk; without this, the attempt is repeated after a restart."""
        self._state.told.append(outcome.decision.accuracy)
        self._state.seconds.append(outcome.seconds)
        attempt = outcome.decision.attempt
        alone = dedicated_of(attempt, self._dedicated)
        self._state.attempts.append(attempt_facts(attempt, alone.key if alone else None))
        self._state.save()
        self._state.checkpoint.discard()
        self._state.discard_old_snapshots()
