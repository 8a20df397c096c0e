"""Stage `fuse`: domains go into adapters, one attempt after the other (VaLoRA §4.2.1).

Decisions are on disk before the next attempt, so that it is resumed with the same. Output:
`fusion.json`, `adapters/`, `heads/` and `pictures/`; domains without LoRA in `head_only/`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from valora_data import shards
from valora_data.contract.base_model import base_hash, processor_hash
from valora_data.schema import Split
from valora_train.errors import SettingsError
from valora_train.fusion.decision import HeadOnlyDecision, attempts_as_json
from valora_train.fusion.packing import DedicatedAdapter, Packing, check_reachable, make_plan
from valora_train.fusion.parent import Parent, find_parent, load_parent
from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.requirement import (
    CONTRACT,
    Requirement,
    contract_requirement,
    dedicated_requirement,
    weak_teacher,
)
from valora_train.fusion.resume_cache import ResumeCache
from valora_train.fusion.samples import (
    PSEUDO_LABELLED,
    DomainData,
    LazyDomains,
    make_deterministic,
    pretraining_head,
)
from valora_train.fusion.state import FUSION, HEAD_ONLY, FusionState, of_domains
from valora_train.fusion.trainer import DivergedError, Trainer
from valora_train.metrics.speed import measure_speed
from valora_train.model.distributed import agree
from valora_train.model.lmm import Lmm
from valora_train.reporting.fusion_report import FusionReport
from valora_train.reporting.progress import Display, stopwatch
from valora_train.settings import DomainSettings, Settings, as_dict
from valora_train.stage import Span, Stage, digest, intact, read_json, write_json
from valora_train.stages import distill
from valora_train.tasks.base import Evaluation
from valora_train.tasks.registry import load_head, make_task

# Settings that came later: runs that leave them alone keep the hashes of their stages.
LATER: dict[tuple[str, str], Any] = {
    ("model", "quantize"): None, ("model", "precision"): "float32", ("heads", "options"): {},
    ("heads", "objectness"): "presence", ("train", "steps_per_new"): None,
}  # fmt: skip
# Nothing that is trained depends on these.
SHOWN = ("checkpoint_seconds", "validations", "validation_samples", "validation_share")


@dataclass(frozen=True)
class DomainInputs:
    """A domain with the outputs of the stages before."""

    settings: DomainSettings
    data: Path  # output of stage `data`
    distilled: Path  # output of stage `distill`
    # Accuracy in an adapter of its own, on validation and test, and the share of it to keep; None
    # where its contract counts.
    dedicated: tuple[float, float, float] | None = None
    adapter: DedicatedAdapter | None = None  # its own
    teacher: Path | None = None  # output of stage `teach`; None where there is none

    def requirement(self, margin: float = 0.0) -> Requirement:
        """What the domain must reach; `margin` is asked for on top on the validation split."""
        if self.dedicated is not None:
            return dedicated_requirement(*self.dedicated, margin)
        val, test = (distill.teacher_accuracy(self.distilled, s) for s in (Split.VAL, Split.TEST))
        return contract_requirement(self.settings, margin, val, test)

    @property
    def contract(self) -> dict[str, float | None]:
        """The contract in the bundle."""
        if self.dedicated is not None:
            return {"required": None, "of_teacher": None, "of_dedicated": self.dedicated[2]}
        return {"required": self.settings.required, "of_teacher": self.settings.of_teacher}

    def stages(self) -> list[tuple[Path, str]]:
        """Outputs of the stages before, each with a note."""
        counts = [f"{len(shards.open_shard(self.data / split))} {split}" for split in Split]
        labelled = distill.describe_distilled(self.distilled).removeprefix(": ")
        return [(self.data, f"Samples: {', '.join(counts)}."), (self.distilled, f"{labelled}.")]

    def load(self, settings: Settings, lmm: Lmm) -> DomainData:
        """Its samples, encoded."""
        mine, train = self.settings, settings.train
        task = make_task(
            replace(mine.domain(), required=self.requirement().required_on_test), settings.heads,
            lmm, video=mine.video, first_head=pretraining_head(settings.model.id),
        )  # fmt: skip
        splits = {s: shards.read(intact(self.data / s)) for s in (Split.VAL, Split.TEST)}
        samples, mirror = shards.read(intact(self.distilled / PSEUDO_LABELLED)), mine.mirrors
        return DomainData(
            task, samples, splits, lmm, train.flip and mirror, train.augment, train.seed
        )


def training_facts(settings: Settings) -> dict[str, Any]:
    """The settings that the training of an adapter depends on, as JSON values."""
    facts = {"model": settings.model, "heads": settings.heads, "train": settings.train}
    values: dict[str, Any] = {key: as_dict(value) for key, value in facts.items()}
    if start := settings.heads.options.get("context", {}).get("start"):
        values["heads"]["options"]["context"]["start"] = digest(Path(start))
    for (group, key), default in LATER.items():
        if values[group][key] == default:
            del values[group][key]
    if not settings.train.augment.views:
        del values["train"]["augment"]
    if settings.train.best_of == 1:
        del values["train"]["best_of"], values["train"]["patience"]
    for key in SHOWN:
        del values["train"][key]
    return values


def domain_facts(domain: DomainSettings) -> dict[str, Any]:
    """The settings of a domain that the training of an adapter depends on, as JSON values."""
    return {
        "name": domain.name, "task": str(domain.task), "prompt": domain.prompt,
        "labels": domain.labels, "mirror": domain.mirrors, "video": domain.video,
    }  # fmt: skip


def fuse_stage(settings: Settings, domains: Sequence[DomainInputs]) -> Stage:
    """The stage that packs the domains into adapters."""
    base = settings.model.id
    inputs = {"base": base_hash(base), "processor": processor_hash(base)}
    values = training_facts(settings) | {"fusion": as_dict(settings.fusion), "domains": []}
    for item in domains:
        name = item.settings.name
        contract: dict[str, Any] = {"required": item.requirement().required}
        inputs[f"{name}/taught"] = digest(item.distilled / PSEUDO_LABELLED)
        for split in (Split.VAL, Split.TEST):
            inputs[f"{name}/{split}"] = digest(item.data / split)
        # Bundles say what the teacher reaches.
        inputs[f"{name}/teacher"] = json.dumps(distill.teacher_figures(item.distilled))
        # The target depends on more than the requirement.
        if item.dedicated is not None:
            contract[CONTRACT] = {"dedicated": list(item.dedicated)}
        elif item.settings.of_teacher is not None:
            reached = distill.teacher_accuracy(item.distilled, Split.VAL)
            contract[CONTRACT] = item.contract | {"teacher": reached}
        values["domains"].append(domain_facts(item.settings) | contract)
    # Where the fusion continues is an input, what becomes of its result is decided afterwards, and
    # the domains' requirements follow from `of_dedicated`.
    for key in ("parent", "unreachable", "processes", "of_dedicated"):
        del values["fusion"][key]
    if settings.fusion.parent is not None:
        inputs["parent"] = find_parent(Path(settings.fusion.parent), Path(settings.paths.work)).name
    return Stage(f"fuse-{settings.task.name}", 6, values, inputs, resumable=True)


def parent_of(settings: Settings, domains: Sequence[DomainInputs], stage: Stage) -> Parent | None:
    """The fusion to extend, or None."""
    if settings.fusion.parent is None:
        return None
    bundle, work = Path(settings.fusion.parent), Path(settings.paths.work)
    return load_parent(bundle, work, stage, _asked(settings, domains))


def _asked(settings: Settings, domains: Sequence[DomainInputs]) -> dict[str, Requirement]:
    """What each domain must reach, by name."""
    return {item.settings.name: item.requirement(settings.fusion.margin) for item in domains}


def check_result(settings: Settings, domains: Sequence[DomainInputs], folder: Path) -> None:
    """Refuse a finished fusion in which a domain misses its requirement, if that is asked for."""
    if settings.fusion.unreachable == "fail":
        result = read_json(intact(folder / FUSION))
        flagged = result["unreachable"]
        met = [name for name in result["domains"] if name not in flagged]
        check_reachable(flagged, _asked(settings, domains), met)


def unchanged_parent(
    settings: Settings, domains: Sequence[DomainInputs], stage: Stage
) -> Path | None:
    """Output of the fusion to extend, if it already holds just what is asked for; else None."""
    if (parent := parent_of(settings, domains, stage)) is None:
        return None
    before = {name: facts["required"] for name, facts in parent.result["domains"].items()}
    asked = {item.settings.name: item.requirement().required_on_test for item in domains}
    return parent.folder if before == asked and set(parent.domains) == set(asked) else None


class Fusion:
    """The fusion, resumed from its folder; each process of a team fills one of its own."""

    def __init__(
        self,
        settings: Settings,
        domains: Sequence[DomainInputs],
        stage: Stage,
        folder: Path,
        display: Display,
        accelerator: Accelerator,
        before: Sequence[Span] = (),
    ) -> None:
        make_deterministic(settings.train.threads)
        self.settings, self.display, self.accelerator = settings, display, accelerator
        self.folder, self.key, self.before = folder, stage.key, before  # stages that ran
        self.inputs = {item.settings.name: item for item in domains}
        self.requirements = _asked(settings, domains)
        self.parent = parent_of(settings, domains, stage)
        known = self.parent.head_only if self.parent else {}
        self.state = FusionState(folder, known, settings.train.checkpoint_seconds)
        self.resume_cache = ResumeCache(stage, Path(settings.paths.work), folder)
        if accelerator.num_processes == 1:  # several processes might not find the same
            self.resume_cache.take_head_only(self.state)
        with display.work("fuse", "loading the base model"):
            self.lmm = Lmm(settings.model, settings.train.lora)
        data = LazyDomains(self._load)
        self.trainer = Trainer(self.lmm, data, settings.train, accelerator)
        self.report = FusionReport(
            display, self.trainer,
            {name: requirement.required for name, requirement in self.requirements.items()},
            {name: (item.distilled, item.data) for name, item in self.inputs.items()},
        )  # fmt: skip
        self.domains: dict[str, dict[str, Any]] = {}  # what the bundle says of each
        self.speed: dict[str, dict[str, Any]] = {}  # images a second of each

    def _load(self, name: str) -> DomainData:
        with self.display.work("fuse", f"encoding images of {name}"):
            return self.inputs[name].load(self.settings, self.lmm)

    def run(self) -> None:
        """Measure, pack, measure on the test split, and write the result."""
        report, state = self.report, self.state
        running = report.running(self.settings, self.key, state, self.before)
        with running if self.accelerator.is_main_process else nullcontext():
            report.log_stages([one for item in self.inputs.values() for one in item.stages()])
            for name in self.inputs:
                if name not in state.head_only:
                    self._measure_alone(name)
            self._report_baselines()

            seed, known = self.settings.train.seed, state.head_only
            new_plan = partial(
                make_plan, self.settings.fusion, self.requirements, known, seed, self.parent
            )
            plan = new_plan()
            dedicated: dict[str, DedicatedAdapter] = {}
            if self.accelerator.num_processes == 1:  # they are on the leader's disk only
                dedicated = {n: item.adapter for n, item in self.inputs.items() if item.adapter}
                if not state.accuracies:
                    self.resume_cache.take_attempts(new_plan, state, dedicated)
            packing = Packing(plan, self.trainer, state, seed, self.parent, dedicated)
            report.records = lambda: attempts_as_json(
                plan.decisions, plan.packing, plan.head_only, packing.taken
            )
            for decision in plan.head_only.values():
                report.placed_without_adapter(decision, self.folder / HEAD_ONLY)
            if resumed := packing.resume():
                self.display.note("fuse", f"continuing after attempt {resumed}")
                report.resumed(plan.decisions, state.seconds)
                report.log_progress(plan)
            self._stop_if_unreachable(plan)
            while (attempt := plan.next()) is not None:
                with report.attempt(attempt) as on_step:
                    outcome = packing.run(attempt, on_step)
                    report.attempted(outcome)
                # Tracked first, then on disk: an attempt that is interrupted in between is
                # repeated, and its MLflow run replaced.
                packing.record(outcome)
                report.log_progress(plan)
                self._stop_if_unreachable(plan)

            self._measure_packing(plan, packing)
            result = self._result(plan, report.records())
            report.finish(result)
            write_json(self.folder / FUSION, result)

    def _stop_if_unreachable(self, plan: FusionPlan) -> None:
        """End the fusion at the first domain out of reach, if asked for; it can be continued."""
        if self.settings.fusion.unreachable == "fail":
            flagged = (self.parent.flagged if self.parent else {}) | plan.unreachable
            met = [name for name in self.requirements if name not in {*flagged, *plan.waiting}]
            check_reachable(flagged, self.requirements, met, plan.waiting)

    def _measure_alone(self, name: str) -> None:
        """Measure a domain without LoRA; its head, figures and picture go to `HEAD_ONLY`."""
        folder, trainer, asked = self.folder / HEAD_ONLY, self.trainer, self.requirements[name]
        folder.mkdir(exist_ok=True)
        training = self.report.training(f"without LoRA: {name}", f"/without LoRA/{name}")
        with training as on_step, stopwatch() as seconds:
            try:
                head = trainer.train_head_only(name, self.settings.train.seed, on_step)
            except DivergedError as error:
                raise SettingsError(
                    f"training the head of domain {name} alone diverged: its weights became "
                    "infinite or NaN; lower train.head_lr"
                ) from error
            val = trainer.evaluate(None, name, Split.VAL, head)
            test = trainer.evaluate(None, name, Split.TEST, head)
            reached = {"val": val.accuracy, "test": test.accuracy}
            if head is not None:
                trainer.task(name).write_head(head, folder / f"{name}.safetensors")
            facts = self._facts(name, None, head, val, test, reached)
            write_json(folder / f"{name}.json", facts)
            sheet = self.report.contact_sheet(name, test, Split.TEST)
            sheet.save(folder / f"{name}.png")
            self.state.head_only[name] = agree(reached)
            self.state.save()
        sign = "≥" if asked.met_by(val.accuracy) else "<"
        line = f"{name}: without LoRA {val.accuracy:.3f} {sign} {asked.text}"
        self.display.done("fuse", line, seconds())

    def _report_baselines(self) -> None:
        """Report what is known of the domains before the first attempt."""
        alone = {name: reached["val"] for name, reached in self.state.head_only.items()}
        val, test, unlabelled = (
            {n: distill.teacher_accuracy(item.distilled, split) for n, item in self.inputs.items()}
            for split in (Split.VAL, Split.TEST, Split.UNLABELLED)
        )
        for name, asked in self.requirements.items():
            if (text := weak_teacher(name, asked, alone[name], val[name])) is not None:
                self.display.note("fuse", text)
        self.report.log_baselines({"head_only": alone, "teacher": test, "agreement": unlabelled})

    def _measure_packing(self, plan: FusionPlan, packing: Packing) -> None:
        """Write adapters, heads, pictures and figures, which are measured on the test split."""
        folder, parent = self.folder, self.parent
        (folder / "pictures").mkdir(exist_ok=True)
        for decision in plan.head_only.values():
            self._place_without_adapter(decision)
            if not decision.met:  # the others were reported before the first attempt
                self.report.placed_without_adapter(decision, folder / HEAD_ONLY)
        for name in parent.unpacked if parent else ():
            self._carry_over(name)
        reasons = {name: decision.reason for decision in plan.decisions for name in decision.kept}
        for adapter, names in plan.packing.items():
            if parent is not None and adapter not in self.state.snapshots:
                # No attempt has trained it.
                mine = folder / "adapters" / adapter
                shutil.copytree(parent.folder / "adapters" / adapter, mine, dirs_exist_ok=True)
                self.state.write_snapshot(adapter, 0, of_domains(parent.snapshot(adapter), names))
                self.state.save()
                for name in names:
                    self._carry_over(name)
                continue
            packing.load(adapter)
            for name in names:
                reason = reasons.get(name, "as in the parent fusion")
                with self.display.work("fuse", f"measuring {name} on test"):
                    test = self._measure(adapter, name, reason, packing.evaluated.get(name))
                sheet = self.report.contact_sheet(name, test, Split.TEST)
                self.report.log_sheet(name, sheet)
                sheet.save(folder / "pictures" / f"{name}.png")
            self.lmm.adapters.save(adapter, folder / "adapters" / adapter, self.settings.model.id)
        for name in self.inputs.keys() & self.speed.keys():
            self.speed[name]["teacher"] = distill.teacher_speed(self.inputs[name].distilled) or None

    def _place_without_adapter(self, decision: HeadOnlyDecision) -> None:
        """Report what a domain reaches without LoRA, as `_measure_alone` found it."""
        name, found = decision.domain, self.folder / HEAD_ONLY
        facts = read_json(found / f"{name}.json")
        _copy(found / f"{name}.png", self.folder / f"pictures/{name}.png")
        if (file := _head_file(facts)) is not None:
            _copy(found / f"{name}.safetensors", self.folder / file)
        if (speed := facts.pop("speed", None)) is not None:
            self.speed[name] = speed
        else:
            path = None if file is None else self.folder / file
            self._measure_speed(None, name, load_head(self.trainer.task(name), path, self.lmm))
            # Fusions that take the figures over need not measure it.
            write_json(found / f"{name}.json", facts | {"speed": self.speed[name]})
        self._publish(name, facts | {"reason": decision.reason})

    def _carry_over(self, name: str) -> None:
        """Copy the head, the picture and the figures of a domain of the parent fusion."""
        assert self.parent is not None
        facts, theirs = self.parent.result["domains"][name], self.parent.folder
        for file in filter(None, (f"pictures/{name}.png", _head_file(facts))):
            _copy(theirs / file, self.folder / file)
        self._publish(name, facts)
        if (speed := self.parent.result.get("speed", {}).get(name)) is not None:
            self.speed[name] = speed

    def _measure(self, adapter: str, name: str, reason: str, val: Evaluation | None) -> Evaluation:
        """Measure a domain on test, and write its head, which validation has calibrated."""
        if val is None:
            val = self.trainer.evaluate(adapter, name, Split.VAL)
        test = self.trainer.evaluate(adapter, name, Split.TEST)
        head: Any = self.trainer.heads(adapter).get(name)
        facts = self._facts(name, adapter, head, val, test, self.state.head_only[name])
        if (file := _head_file(facts)) is not None:
            (self.folder / file).parent.mkdir(exist_ok=True)
            self.trainer.task(name).write_head(head, self.folder / file)
        self._publish(name, facts | {"reason": reason})
        self._measure_speed(adapter, name, head)
        return test

    def _measure_speed(self, adapter: str | None, name: str, head: Any) -> None:
        """Measure how fast base model, adapter and head answer; on every process of a team."""
        task, samples = self.trainer.task(name), self.trainer.samples(name, Split.TEST)
        self.lmm.adapters.activate(adapter)
        self.speed[name] = measure_speed(
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
        item, task = self.inputs[name], self.trainer.task(name)
        sample, media = self.trainer.samples(name, Split.TEST)[0], "images"
        if task.video:
            media = "video"
        elif not (task.remembers or sample.images):
            media = "text"
        accuracy = {
            "val": val.accuracy, "val_ci95": list(val.interval),
            "test": test.accuracy, "test_ci95": list(test.interval),
            **{f"test_{key}": value for key, value in test.details.items()},
            **({} if test.classes is None else test.classes.as_json()),
            "head_only": head_only["test"], "head_only_val": head_only["val"],
        }  # fmt: skip
        document = sample.document
        return {
            "task": str(task.domain.task), "metric": task.domain.metric, "accuracy": accuracy,
            "adapter": adapter, "labels": item.settings.labels, "prompt": item.settings.prompt,
            "media": media, **({"measured_by": document.measured_by} if document else {}),
            "head": None if head is None or task.remembers else f"heads/{name}.safetensors",
            **task.metadata(head),
        }  # fmt: skip

    def _publish(self, name: str, facts: Mapping[str, Any]) -> None:
        """Report a domain: its figures beside its teacher's, and what is asked of it now."""
        item, requirement = self.inputs[name], self.requirements[name]
        accuracy = facts["accuracy"] | distill.teacher_figures(item.distilled)
        self.domains[name] = {
            **facts, "accuracy": accuracy, CONTRACT: item.contract,
            "required": requirement.required_on_test, "bar": requirement.target,
            "status": "met" if requirement.kept_by(accuracy) else "missed",
        }  # fmt: skip

    def _result(self, plan: FusionPlan, attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The content of `fusion.json`: what was decided and reached."""
        parent, state, adapters = self.parent, self.state, self.folder / "adapters"
        return {
            "strategy": self.settings.fusion.strategy,
            "packing": plan.packing, "alone": plan.alone, "used": plan.used,
            "adapters": {name: adapter_facts(adapters / name) for name in plan.packing},
            "parent": parent and {"version": parent.version, "fusion_stage": parent.folder.name},
            "head_only": [*(parent.unpacked if parent else ()), *plan.head_only],
            "unreachable": (parent.flagged if parent else {}) | plan.unreachable,
            "domains": {name: self.domains[name] for name in self.inputs if name in self.domains},
            "speed": self.speed, "attempts": attempts, "seconds": state.seconds,
            "mlflow_run_id": state.mlflow_run_id,
        }  # fmt: skip


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(source, target)


def _head_file(facts: Mapping[str, Any]) -> str | None:
    """File of a domain's head, or of its memory, relative to the fusion; None if it has none."""
    file = facts["head"] or facts.get("context", {}).get("file")
    return None if file is None else str(file)


def adapter_facts(folder: Path) -> dict[str, Any]:
    """Rank and bytes of an adapter in PEFT's format."""
    config = read_json(folder / "adapter_config.json")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {"rank": config["r"], "bytes": size}
