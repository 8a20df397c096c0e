"""Runs the attempts of a fusion: trains, judges, then commits or rolls back, on disk first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from valora_data.schema import Split
from valora_train.errors import UnreachableError
from valora_train.fusion.decision import Attempt, AttemptDecision
from valora_train.fusion.parent import Parent
from valora_train.fusion.plan import FusionPlan, order_domains
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.state import FusionState, attempt_facts, of_domains
from valora_train.fusion.strategies.base import Probe
from valora_train.fusion.strategies.registry import make_strategy
from valora_train.fusion.trainer import DivergedError, OnStep, Trainer
from valora_train.model.distributed import agree
from valora_train.settings import FusionSettings
from valora_train.stage import Span, timed
from valora_train.tasks.base import Evaluation


@dataclass(frozen=True, slots=True)
class DedicatedAdapter:
    """The adapter in which a domain was trained alone before the fusion."""

    key: str  # names its training among all others
    read: Callable[[], Mapping[str, Tensor]]  # reads its snapshot


def dedicated_of(
    attempt: Attempt, dedicated: Mapping[str, DedicatedAdapter]
) -> DedicatedAdapter | None:
    """The adapter that an attempt takes instead of training, if its domain is alone in it."""
    return dedicated.get(attempt.domains[0]) if len(attempt.domains) == 1 else None


@dataclass(frozen=True)
class Outcome:
    """What came out of an attempt."""

    decision: AttemptDecision
    evaluations: Mapping[str, Evaluation]  # on validation, of all its domains; none if it diverged
    seconds: float  # of training, evaluation and snapshot
    span: Span  # of what this process did
    spans: tuple[Span, ...] = ()  # inside: training, and the evaluation of each domain


def make_plan(
    settings: FusionSettings,
    requirements: Mapping[str, Requirement],
    head_only: Mapping[str, Mapping[str, float]],
    seed: int,
    parent: Parent | None,
) -> FusionPlan:
    """The plan of a fusion, which may extend another one, before its first attempt."""
    probes = {
        name: Probe(requirement.required, head_only[name]["val"])
        for name, requirement in requirements.items()
    }
    order = order_domains(list(requirements), settings.order, seed, probes)
    return FusionPlan(
        {name: requirements[name] for name in order}, make_strategy(settings.strategy),
        probes=probes, head_only=settings.head_only, **(parent.placed if parent else {}),
    )  # fmt: skip


def check_reachable(
    unreachable: Mapping[str, float],
    requirements: Mapping[str, Requirement],
    met: Sequence[str],
    waiting: Sequence[str] = (),
) -> None:
    """Refuse a fusion, finished or not, in which a domain misses its requirement even alone."""
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


@dataclass
class Packing:
    """The attempts of a fusion; a domain alone takes its dedicated adapter, if it has one."""

    plan: FusionPlan
    trainer: Trainer
    state: FusionState
    seed: int
    parent: Parent | None = None  # the fusion to extend
    dedicated: Mapping[str, DedicatedAdapter] | None = None  # by domain
    taken: set[int] = field(default_factory=set)  # numbers of attempts that took one of these
    # On validation, of domains in the adapters that hold them; what this process committed.
    evaluated: dict[str, Evaluation] = field(default_factory=dict)

    def resume(self) -> int:
        """Replay the decisions on disk, load the adapters that they left, and count them."""
        decisions = [self.plan.tell(accuracy) for accuracy in self.state.accuracies]
        # An earlier version kept no facts of attempts.
        for decision, facts in zip(decisions, self.state.attempts, strict=False):
            if facts.get("dedicated"):
                self.taken.add(decision.attempt.number)
        for adapter in self.state.snapshots:
            self.load(adapter)
        return len(decisions)

    def load(self, adapter: str) -> None:
        """Make an adapter resident, from its own snapshot or from the fusion that is extended."""
        if adapter not in self.trainer.adapters:
            if adapter in self.state.snapshots:
                snapshot = self.state.read_snapshot(adapter)
            else:
                assert self.parent is not None, "else an attempt has trained it"
                snapshot = self.parent.snapshot(adapter)
            # Domains may have left the adapter since.
            self.trainer.restore(adapter, of_domains(snapshot, self.plan.packing[adapter]))

    def run(self, attempt: Attempt, on_step: OnStep = lambda *_: None) -> Outcome:
        """Train and judge what `FusionPlan.next` returned, then commit it or roll it back."""
        began, start = time.time_ns(), time.monotonic()
        trainer, adapter = self.trainer, attempt.adapter
        # Everything random in an attempt follows from these two numbers and from the snapshot.
        seed = self.seed * 1_000 + attempt.number
        alone = dedicated_of(attempt, self.dedicated or {})
        if attempt.held:
            self.load(adapter)
            before = trainer.snapshot(adapter)
        elif alone is None:
            trainer.open(adapter, seed)
        else:
            trainer.restore(adapter, alone.read())
            self.taken.add(attempt.number)
        evaluations: dict[str, Evaluation] = {}
        spans: list[Span] = []
        try:
            if alone is None:
                with timed(spans, "train"):
                    trainer.train(
                        adapter, attempt.new, held=attempt.held, rehearse=attempt.rehearse,
                        seed=seed, on_step=on_step, checkpoint=self.state.checkpoint,
                    )  # fmt: skip
            for name in attempt.domains:
                with timed(spans, f"evaluate {name}"):
                    evaluations[name] = trainer.evaluate(adapter, name, Split.VAL)
            reached = {name: evaluation.accuracy for name, evaluation in evaluations.items()}
        except DivergedError:
            reached = dict.fromkeys(attempt.domains, math.nan)
        decision = self.plan.tell(agree(reached))
        if decision.kept:
            # Evaluating has calibrated the heads.
            kept = of_domains(trainer.snapshot(adapter), decision.kept)
            self.state.write_snapshot(adapter, attempt.number, kept)
            self.evaluated |= {name: evaluations[name] for name in decision.kept}
            if decision.left_out:
                trainer.restore(adapter, kept)
            self._take_out(set(attempt.moved) & set(decision.kept), adapter)
        elif attempt.held:
            trainer.restore(adapter, before)
        else:
            trainer.close(adapter)
        seconds = self.state.checkpoint.spent + time.monotonic() - start
        return Outcome(
            decision, evaluations, seconds, Span(attempt.name, began, time.time_ns()), tuple(spans)
        )

    def _take_out(self, moved: Collection[str], adapter: str) -> None:
        """Take domains out of the adapters that held them, and drop adapters that hold nothing."""
        packing = self.plan.packing
        for other in set(self.trainer.adapters) - {adapter} if moved else ():
            if other not in packing:
                self.trainer.close(other)
                self.state.snapshots.pop(other, None)
            elif set(self.trainer.heads(other)) & set(moved):
                left = of_domains(self.trainer.snapshot(other), packing[other])
                self.trainer.restore(other, left)

    def record(self, outcome: Outcome) -> None:
        """Write a decision to disk; without this, the attempt is repeated after a restart."""
        attempt = outcome.decision.attempt
        alone = dedicated_of(attempt, self.dedicated or {})
        self.state.accuracies.append(dict(outcome.decision.accuracy))
        self.state.seconds.append(outcome.seconds)
        self.state.attempts.append(attempt_facts(attempt, alone.key if alone else None))
        self.state.save()
        self.state.checkpoint.discard()
        self.state.discard_old_snapshots()
