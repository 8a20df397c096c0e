"""What a fusion promises: every domain is measured once on the test split.

No decision has seen the test split, so the accuracies in the bundle are unbiased. Adapters and
heads are written next to the figures that were measured with them.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from valora_data.schema import Split
from valora_train.errors import SettingsError
from valora_train.fusion.requirement import CONTRACT
from valora_train.fusion.state import of_domains
from valora_train.metrics.speed import measure_speed
from valora_train.stage import read_json, write_json
from valora_train.tasks.registry import load_head

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from valora_train.fusion.decision import HeadOnlyDecision
    from valora_train.fusion.parent import Parent
    from valora_train.fusion.plan import FusionPlan
    from valora_train.fusion.requirement import Requirement
    from valora_train.fusion.state import FusionState
    from valora_train.fusion.trainer import OnFigures, Trainer
    from valora_train.model.lmm import Lmm
    from valora_train.settings import DomainSettings
    from valora_train.tasks.base import Evaluation


HEAD_ONLY = "head_only"
"""Folder of what domains reach without LoRA: figures, heads and pictures."""


class Promises:
    """Measures domains on the test split and writes their adapters and heads.

    Args:
        base: Id of the base model, which PEFT's adapter files name.
        domains: The domains, in the order of the configuration.
        requirements: What each domain must reach.
        contracts: What each requirement follows from, as in the bundle.
        teachers: What each domain's teacher reaches (see `stages.distill.teacher_figures`).
        trainer: Holds the adapters.
        lmm: The model; writes the adapters.
        state: Files of the fusion on disk.

    Attributes:
        speed: Images a second of each measured domain, by adapter and head together (see
            `metrics.speed.measure_speed`).
    """

    def __init__(
        self,
        base: str,
        domains: Mapping[str, DomainSettings],
        requirements: Mapping[str, Requirement],
        contracts: Mapping[str, Mapping[str, float | None]],
        teachers: Mapping[str, Mapping[str, Any]],
        trainer: Trainer,
        lmm: Lmm,
        state: FusionState,
    ) -> None:
        self._base = base
        self._domain_settings = domains
        self._requirements = requirements
        self._contracts = contracts
        self._teachers = teachers
        self._trainer = trainer
        self._lmm = lmm
        self._state = state
        self._folder = state.folder
        self._promised: dict[str, dict[str, Any]] = {}
        self.speed: dict[str, dict[str, Any]] = {}

    @property
    def domains(self) -> dict[str, dict[str, Any]]:
        """What the bundle says of each measured domain, in the order of the configuration."""
        return {n: self._promised[n] for n in self._requirements if n in self._promised}

    def measure_alone(
        self,
        domain: str,
        seed: int,
        on_step: Callable[[int, int, float], None] = lambda *_: None,
        on_figures: OnFigures = lambda *_: None,
    ) -> tuple[dict[str, float], Evaluation]:
        """Measure a domain on the frozen base model; its head and figures go to `head_only`.

        Args:
            domain: The domain.
            seed: Seed of its head.
            on_step: Called with step (from 1), number of steps, and loss of the head's training.
            on_figures: Called with step and further figures by name, see `Trainer.train`.

        Returns:
            Accuracy on validation (`val`) and test (`test`), and the evaluation on test.

        Raises:
            SettingsError: If the training of the head diverges.
        """
        head = self._trainer.train_head_only(domain, seed, on_step, on_figures)
        if head is not None and not all(weight.isfinite().all() for weight in head.parameters()):
            raise SettingsError(
                f"training the head of domain {domain} alone diverged: its weights became infinite "
                "or NaN; lower train.head_lr"
            )
        val = self._trainer.evaluate(None, domain, Split.VAL, head)
        test = self._trainer.evaluate(None, domain, Split.TEST, head)
        reached = {"val": val.accuracy, "test": test.accuracy}
        folder = self._folder / HEAD_ONLY
        folder.mkdir(exist_ok=True)
        if head is not None:
            self._trainer.task(domain).write_head(head, folder / f"{domain}.safetensors")
        promised = self._promise(domain, None, head, val, test, reached)
        if self._requirements[domain].met_by(val.accuracy):  # it may take no adapter
            promised["speed"] = self._measure_speed(None, domain, head)
        write_json(folder / f"{domain}.json", promised)
        return reached, test

    def place_without_adapter(self, decision: HeadOnlyDecision) -> None:
        """Promise what a domain reaches without LoRA, as `measure_alone` found it."""
        name = decision.domain
        folder = self._folder / HEAD_ONLY
        promised = read_json(folder / f"{name}.json")
        files = {f"{name}.png": f"pictures/{name}.png"}
        if (file := head_file(promised)) is not None:
            files[f"{name}.safetensors"] = file
        for source, target in files.items():
            (self._folder / target).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / source, self._folder / target)
        if "speed" not in promised:
            place = None if file is None else self._folder / file
            head = load_head(self._trainer.task(name), place, self._lmm)
            promised["speed"] = self._measure_speed(None, name, head)
            write_json(folder / f"{name}.json", promised)  # for fusions that take it over
        self.speed[name] = promised.pop("speed")
        promised["accuracy"] |= self._teachers[name]
        asked = self._asked(name, promised["accuracy"])
        self._promised[name] = promised | asked | {"reason": decision.reason}

    def measure(
        self, adapter: str, domain: str, reason: str, val: Evaluation | None = None
    ) -> Evaluation:
        """Measure a domain of a loaded adapter and write its head.

        Args:
            adapter: The adapter.
            domain: The domain.
            reason: Why the adapter holds the domain, for people.
            val: Its evaluation on the validation split, by which its head was calibrated; None to
                evaluate it.

        Returns:
            The evaluation on the test split.
        """
        if val is None:
            val = self._trainer.evaluate(adapter, domain, Split.VAL)
        test = self._trainer.evaluate(adapter, domain, Split.TEST)
        head: Any = self._trainer.heads(adapter).get(domain)
        (self._folder / "heads").mkdir(exist_ok=True)
        promised = self._promise(domain, adapter, head, val, test, self._state.head_only[domain])
        if (file := head_file(promised)) is not None:
            (self._folder / file).parent.mkdir(exist_ok=True)
            self._trainer.task(domain).write_head(head, self._folder / file)
        self._promised[domain] = {**promised, "reason": reason}
        self.speed[domain] = self._measure_speed(adapter, domain, head)
        return test

    def _measure_speed(self, adapter: str | None, domain: str, head: Any) -> dict[str, Any]:
        """Measure how fast base model, adapter and head answer; on every process of a team."""
        task, samples = self._trainer.task(domain), self._trainer.samples(domain, Split.TEST)
        self._lmm.adapters.activate(adapter)
        return measure_speed(
            lambda some: task.answer(head, self._lmm, some),
            samples,
            str(self._lmm.device),
            alone=not self._lmm.sharded,
        )

    def _promise(
        self,
        name: str,
        adapter: str | None,
        head: Any,
        val: Evaluation,
        test: Evaluation,
        head_only: Mapping[str, float],
    ) -> dict[str, Any]:
        settings, task = self._domain_settings[name], self._trainer.task(name)
        accuracy = {
            "val": val.accuracy,
            "val_ci95": list(val.interval),
            "test": test.accuracy,
            "test_ci95": list(test.interval),
            **{f"test_{key}": value for key, value in test.details.items()},
            **({} if test.classes is None else test.classes.as_json()),
            "head_only": head_only["test"],
            "head_only_val": head_only["val"],
            **self._teachers[name],
        }
        return {
            "task": str(task.domain.task),
            "metric": task.domain.metric,
            **self._asked(name, accuracy),
            "accuracy": accuracy,
            "adapter": adapter,
            "head": None if head is None or task.remembers else f"heads/{name}.safetensors",
            "labels": settings.labels,
            "prompt": settings.prompt,
            "media": "video" if task.video else "images",
            **task.metadata(head),
        }

    def _asked(self, name: str, accuracy: Mapping[str, Any]) -> dict[str, Any]:
        """What is promised of a domain, where that comes from, and whether it is kept."""
        requirement = self._requirements[name]
        return {
            "required": requirement.promise,
            "bar": requirement.bar,
            CONTRACT: self._contracts[name],
            "status": "met" if requirement.kept_by(accuracy) else "missed",
        }

    def write_adapter(self, adapter: str) -> None:
        """Write an adapter in PEFT's format."""
        self._lmm.adapters.save(adapter, self._folder / "adapters" / adapter, self._base)

    def carry_over(self, adapter: str, domains: Sequence[str], parent: Parent) -> None:
        """Copy an adapter that no attempt has trained, with the figures of its domains."""
        shutil.copytree(
            parent.folder / "adapters" / adapter,
            self._folder / "adapters" / adapter,
            dirs_exist_ok=True,
        )
        self._state.write_snapshot(adapter, 0, of_domains(parent.snapshot(adapter), domains))
        self._state.save()
        for name in domains:
            self.carry_over_domain(name, parent)

    def carry_over_domain(self, name: str, parent: Parent) -> None:
        """Copy the head, the picture and the figures of a domain of an earlier fusion."""
        facts = dict(parent.result["domains"][name])
        head = head_file(facts)
        for file in [f"pictures/{name}.png", *([] if head is None else [head])]:
            (self._folder / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(parent.folder / file, self._folder / file)
        facts["accuracy"] = facts["accuracy"] | self._teachers[name]
        self._promised[name] = facts | self._asked(name, facts["accuracy"])
        if (speed := parent.result.get("speed", {}).get(name)) is not None:
            self.speed[name] = speed


def head_file(promised: Mapping[str, Any]) -> str | None:
    """File of a domain's head, or of its memory, relative to the fusion; None if it has none.

    Args:
        promised: What the fusion says of the domain.
    """
    file = promised["head"] or promised.get("context", {}).get("file")
    return None if file is None else str(file)


def adapter_facts(folder: Path) -> dict[str, Any]:
    """Rank and bytes of an adapter in PEFT's format.

    Args:
        folder: Folder of the adapter.
    """
    config = read_json(folder / "adapter_config.json")
    ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {"rank": max(ranks), "bytes": size}


def fusion_result(
    strategy: str,
    plan: FusionPlan,
    promises: Promises,
    state: FusionState,
    parent: Parent | None,
    attempts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of `fusion.json`: what was decided, reached and promised.

    Args:
        strategy: Name of the strategy.
        plan: The finished plan.
        promises: The measured domains.
        state: Files of the fusion on disk.
        parent: The fusion that was extended, if any.
        attempts: The attempts with what they changed (see `fusion.history.History.told`).
    """
    flagged = parent.flagged if parent else {}
    return {
        "strategy": strategy,
        "packing": plan.packing,
        "adapters": {
            name: adapter_facts(state.folder / "adapters" / name) for name in plan.packing
        },
        "alone": plan.alone,
        "used": plan.used,
        "parent": parent and {"version": parent.version, "fusion_stage": parent.folder.name},
        "head_only": [*(parent.unpacked if parent else ()), *plan.head_only],
        "unreachable": flagged | plan.unreachable,
        "domains": promises.domains,
        "speed": promises.speed,
        "attempts": attempts,
        "seconds": state.seconds,
        "mlflow_run_id": state.mlflow_run_id,
    }
