"""The reported metrics of a fusion: every domain is measured once on the test split.

No decision has seen the test split, so the accuracies in the bundle are unbiased. Adapters and
heads are written next to the figures that were measured with them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
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
    from valora_train.fusion.requirement import Requirement
    from valora_train.fusion.state import FusionState
    from valora_train.fusion.trainer import OnFigures, Trainer
    from valora_train.model.lmm import Lmm
    from valora_train.settings import DomainSettings
    from valora_train.tasks.base import Evaluation

HEAD_ONLY = "head_only"
"""Folder of what domains reach without LoRA: figures, heads and pictures."""


@dataclass(frozen=True)
class Asked:
    """What is asked of a domain."""

    settings: DomainSettings
    requirement: Requirement
    contract: Mapping[str, float | None]  # what the requirement follows from, as in the bundle
    teacher: Mapping[str, Any]  # what its teacher reaches, see `stages.distill.teacher_figures`


@dataclass(frozen=True)
class Reported:
    """Measures domains on the test split and writes their heads."""

    asked: Mapping[str, Asked]
    trainer: Trainer
    lmm: Lmm
    state: FusionState
    domains: dict[str, dict[str, Any]] = field(default_factory=dict)  # what the bundle says of each
    speed: dict[str, dict[str, Any]] = field(default_factory=dict)  # images a second of each

    def measure_alone(
        self,
        domain: str,
        seed: int,
        on_step: Callable[[int, int, float], None] = lambda *_: None,
        on_figures: OnFigures = lambda *_: None,
    ) -> tuple[dict[str, float], Evaluation]:
        """Measure a domain on the frozen base model; its head and figures go to `HEAD_ONLY`.

        Returns:
            Accuracy on validation (`val`) and test (`test`), and the evaluation on test.

        Raises:
            SettingsError: If the training of the head diverges.
        """
        head = self.trainer.train_head_only(domain, seed, on_step, on_figures)
        if head is not None and not all(weight.isfinite().all() for weight in head.parameters()):
            raise SettingsError(
                f"training the head of domain {domain} alone diverged: its weights became infinite "
                "or NaN; lower train.head_lr"
            )
        val = self.trainer.evaluate(None, domain, Split.VAL, head)
        test = self.trainer.evaluate(None, domain, Split.TEST, head)
        reached = {"val": val.accuracy, "test": test.accuracy}
        folder = self.state.folder / HEAD_ONLY
        folder.mkdir(exist_ok=True)
        if head is not None:
            self.trainer.task(domain).write_head(head, folder / f"{domain}.safetensors")
        facts = self._facts(domain, None, head, val, test, reached)
        if self.asked[domain].requirement.met_by(val.accuracy):  # it may take no adapter
            facts["speed"] = self._measure_speed(None, domain, head)
        write_json(folder / f"{domain}.json", facts)
        return reached, test

    def place_without_adapter(self, decision: HeadOnlyDecision) -> None:
        """Report what a domain reaches without LoRA, as `measure_alone` found it."""
        name, folder = decision.domain, self.state.folder
        facts = read_json(folder / HEAD_ONLY / f"{name}.json")
        file = head_file(facts)
        _copy(folder / HEAD_ONLY / f"{name}.png", folder / f"pictures/{name}.png")
        if file is not None:
            _copy(folder / HEAD_ONLY / f"{name}.safetensors", folder / file)
        if "speed" not in facts:
            task = self.trainer.task(name)
            head = load_head(task, None if file is None else folder / file, self.lmm)
            facts["speed"] = self._measure_speed(None, name, head)
            write_json(folder / HEAD_ONLY / f"{name}.json", facts)  # for fusions that take it over
        self.speed[name] = facts.pop("speed")
        facts["accuracy"] |= self.asked[name].teacher
        facts |= self._asked_of(name, facts["accuracy"])
        self.domains[name] = facts | {"reason": decision.reason}

    def measure(
        self, adapter: str, domain: str, reason: str, val: Evaluation | None = None
    ) -> Evaluation:
        """Measure a domain of a loaded adapter on the test split, and write its head.

        Its head was calibrated by its evaluation on validation, which is repeated where it is None.
        """
        if val is None:
            val = self.trainer.evaluate(adapter, domain, Split.VAL)
        test = self.trainer.evaluate(adapter, domain, Split.TEST)
        head: Any = self.trainer.heads(adapter).get(domain)
        facts = self._facts(domain, adapter, head, val, test, self.state.head_only[domain])
        (self.state.folder / "heads").mkdir(exist_ok=True)
        if (file := head_file(facts)) is not None:
            (self.state.folder / file).parent.mkdir(exist_ok=True)
            self.trainer.task(domain).write_head(head, self.state.folder / file)
        self.domains[domain] = facts | {"reason": reason}
        self.speed[domain] = self._measure_speed(adapter, domain, head)
        return test

    def _measure_speed(self, adapter: str | None, domain: str, head: Any) -> dict[str, Any]:
        """Measure how fast base model, adapter and head answer; on every process of a team."""
        task, samples = self.trainer.task(domain), self.trainer.samples(domain, Split.TEST)
        self.lmm.adapters.activate(adapter)
        return measure_speed(
            lambda some: task.answer(head, self.lmm, some), samples, str(self.lmm.device),
            alone=not self.lmm.sharded,
        )  # fmt: skip

    def _facts(
        self,
        name: str,
        adapter: str | None,
        head: Any,
        val: Evaluation,
        test: Evaluation,
        head_only: Mapping[str, float],
    ) -> dict[str, Any]:
        """What the bundle says of a domain."""
        settings, task = self.asked[name].settings, self.trainer.task(name)
        accuracy = {
            "val": val.accuracy,
            "val_ci95": list(val.interval),
            "test": test.accuracy,
            "test_ci95": list(test.interval),
            **{f"test_{key}": value for key, value in test.details.items()},
            **({} if test.classes is None else test.classes.as_json()),
            "head_only": head_only["test"],
            "head_only_val": head_only["val"],
            **self.asked[name].teacher,
        }
        return {
            "task": str(task.domain.task),
            "metric": task.domain.metric,
            **self._asked_of(name, accuracy),
            "accuracy": accuracy,
            "adapter": adapter,
            "head": None if head is None or task.remembers else f"heads/{name}.safetensors",
            "labels": settings.labels,
            "prompt": settings.prompt,
            "media": "video" if task.video else "images",
            **task.metadata(head),
        }

    def _asked_of(self, name: str, accuracy: Mapping[str, Any]) -> dict[str, Any]:
        """What is asked of a domain on test, where that comes from, and whether it is kept."""
        asked = self.asked[name]
        return {
            "required": asked.requirement.promise,
            "bar": asked.requirement.bar,
            CONTRACT: asked.contract,
            "status": "met" if asked.requirement.kept_by(accuracy) else "missed",
        }

    def carry_over(self, adapter: str, domains: Sequence[str], parent: Parent) -> None:
        """Copy an adapter that no attempt has trained, with the figures of its domains."""
        mine = self.state.folder / "adapters" / adapter
        shutil.copytree(parent.folder / "adapters" / adapter, mine, dirs_exist_ok=True)
        self.state.write_snapshot(adapter, 0, of_domains(parent.snapshot(adapter), domains))
        self.state.save()
        for name in domains:
            self.carry_over_domain(name, parent)

    def carry_over_domain(self, name: str, parent: Parent) -> None:
        """Copy the head, the picture and the figures of a domain of an earlier fusion."""
        facts = dict(parent.result["domains"][name])
        for file in filter(None, (f"pictures/{name}.png", head_file(facts))):
            _copy(parent.folder / file, self.state.folder / file)
        facts["accuracy"] = facts["accuracy"] | self.asked[name].teacher
        self.domains[name] = facts | self._asked_of(name, facts["accuracy"])
        if (speed := parent.result.get("speed", {}).get(name)) is not None:
            self.speed[name] = speed


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(source, target)


def head_file(facts: Mapping[str, Any]) -> str | None:
    """File of a domain's head, or of its memory, relative to the fusion; None if it has none."""
    file = facts["head"] or facts.get("context", {}).get("file")
    return None if file is None else str(file)


def adapter_facts(folder: Path) -> dict[str, Any]:
    """Rank and bytes of an adapter in PEFT's format."""
    config = read_json(folder / "adapter_config.json")
    ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {"rank": max(ranks), "bytes": size}
