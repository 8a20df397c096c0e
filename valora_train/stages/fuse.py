"""Stage `fuse`: domains go into adapters, one attempt after the other (VaLoRA §4.2.1).

Everything that a decision leaves behind is on disk before the next attempt begins, so a fusion that
is killed at any moment goes on from there and decides the same. Output: `fusion.json` (what was
decided, reached and promised), `adapters/<name>` (PEFT) and `heads/<domain>.safetensors`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from valora_data import shards
from valora_data.contract.bundle import base_folder, base_hash, read_bundle
from valora_data.contract.heads import write_head
from valora_data.schema import Split
from valora_train.errors import UnreachableError
from valora_train.fusion.decision import Decision, Verdict
from valora_train.fusion.parent import FUSION, SNAPSHOTS, STATE, Parent, find_parent, load_parent
from valora_train.fusion.plan import FusionPlan, order_domains
from valora_train.fusion.strategies.base import Probe, Probes
from valora_train.fusion.strategies.registry import make_strategy
from valora_train.fusion.trainer import DomainData, Trainer
from valora_train.model.lmm import Lmm
from valora_train.reporting import pictures
from valora_train.reporting.progress import stopwatch
from valora_train.reporting.report import counted
from valora_train.reporting.tracking import NoTracker, Tracker
from valora_train.settings import as_dict
from valora_train.stage import Stage, digest, read_json, write_json
from valora_train.stages.distill import TAUGHT, teacher_accuracy
from valora_train.tasks import make_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from valora_train.fusion.decision import Attempt
    from valora_train.model.team import Team
    from valora_train.reporting.progress import Display
    from valora_train.reporting.tracking import AttemptRun
    from valora_train.settings import DomainSettings, Settings
    from valora_train.tasks import Evaluation

SHOWN = 12  # images on a contact sheet


@dataclass(frozen=True)
class DomainInputs:
    """A domain with the outputs of the stages before.

    Attributes:
        settings: The domain.
        data: Output of stage `data`.
        distilled: Output of stage `distill`.
    """

    settings: DomainSettings
    data: Path
    distilled: Path

    @property
    def required(self) -> float:
        """Accuracy to keep, in absolute terms; of the teacher's on validation, if relative."""
        if not self.settings.relative:
            return self.settings.required
        accuracy = teacher_accuracy(self.distilled, Split.VAL)
        return self.settings.required * (1.0 if accuracy is None else accuracy)


def fuse_stage(settings: Settings, domains: Sequence[DomainInputs]) -> Stage:
    """The stage that packs these domains."""
    inputs = {"base": base_hash(settings.model.id)}
    for domain in domains:
        inputs[f"{domain.settings.name}/data"] = digest(domain.data)
        inputs[f"{domain.settings.name}/distilled"] = digest(domain.distilled)
    facts = {
        "model": settings.model,
        "fusion": settings.fusion,
        "heads": settings.heads,
        "train": settings.train,
    }
    values: dict[str, Any] = {key: as_dict(value) for key, value in facts.items()}
    values["domains"] = [
        {
            "name": item.settings.name,
            "task": str(item.settings.task),
            "prompt": item.settings.prompt,
            "labels": item.settings.labels,
            "required": item.required,
            "mirror": item.settings.mirror,
            "video": item.settings.video,
        }
        for item in domains
    ]
    values["fusion"].pop("parent")
    if settings.fusion.parent is not None:
        inputs["parent"] = find_parent(Path(settings.fusion.parent), Path(settings.paths.work)).name
    return Stage(f"fuse-{settings.task.name}", 3, values, inputs, resumable=True)


def parent_of(settings: Settings, domains: Sequence[DomainInputs], stage: Stage) -> Parent | None:
    """The fusion that this one goes on from, None if it begins anew."""
    if settings.fusion.parent is None:
        return None
    bundle = Path(settings.fusion.parent)
    folder = find_parent(bundle, Path(settings.paths.work))
    required = {item.settings.name: item.required for item in domains}
    version = read_bundle(bundle).version
    return load_parent(folder, version, stage, required, settings.fusion.margin)


def unchanged_parent(
    settings: Settings, domains: Sequence[DomainInputs], stage: Stage
) -> Path | None:
    """The fusion to go on from, if it is already what is asked for."""
    parent = parent_of(settings, domains, stage)
    if parent is None:
        return None
    before = parent.result["domains"]
    asked = {item.settings.name: item.required for item in domains}
    same = set(parent.domains) == set(before) == set(asked)
    if same and all(before[name]["required"] == asked[name] for name in asked):
        return parent.folder
    return None


def build_fusion(
    settings: Settings,
    domains: Sequence[DomainInputs],
    stage: Stage,
    folder: Path,
    display: Display,
    team: Team,
) -> None:
    """Fill the stage's folder, going on from what is in it.

    Where several processes train together, each fills a folder of its own, and that of the leader
    counts.

    Raises:
        UnreachableError: If a domain misses its requirement even alone and the policy is `fail`.
    """
    if (folder / FUSION).is_file():  # killed after its last act
        return
    _make_deterministic(settings.train.threads)
    fusion = _Fusion(settings, domains, folder, display, team, parent_of(settings, domains, stage))
    name = f"{settings.task.name} · {settings.fusion.strategy} · seed {settings.train.seed}"
    tracker: Tracker = NoTracker()
    if team.leads:
        with FileLock(Path(settings.paths.work) / "mlflow.lock"):  # one makes the database
            tracker = Tracker(settings.paths.tracking, f"valora/{settings.task.name}", stage.key)
    note = f"Packs {', '.join(item.settings.name for item in domains)} into the fewest adapters."
    fusion.remember(tracker.start(name, as_dict(settings), note, fusion.mlflow_run_id))
    try:
        for item in domains:
            who = item.settings.name
            tracker.input(f"{who} (taught)", digest(item.distilled), item.distilled, "training")
            tracker.input(f"{who} (labelled)", digest(item.data), item.data, "validation, test")
        fusion.run(tracker)
    except UnreachableError as error:
        tracker.finish("FAILED", str(error))
        raise
    except BaseException:
        tracker.finish("KILLED")
        raise


def _make_deterministic(threads: int) -> None:
    """Make the same seed give the same packing: sums depend on how many threads share them."""
    torch.set_num_threads(threads or os.cpu_count() or 1)
    torch.use_deterministic_algorithms(True, warn_only=True)


class _Fusion:
    """One run of the stage: the plan, the trainer and what is on disk."""

    def __init__(
        self,
        settings: Settings,
        domains: Sequence[DomainInputs],
        folder: Path,
        display: Display,
        team: Team,
        parent: Parent | None,
    ) -> None:
        self._parent = parent
        self._team = team
        self._settings = settings
        self._inputs = {item.settings.name: item for item in domains}
        self._folder = folder
        self._display = display
        self._required = {name: item.required for name, item in self._inputs.items()}
        (folder / SNAPSHOTS).mkdir(exist_ok=True)
        state = folder / STATE
        self._state: dict[str, Any] = (
            read_json(state)
            if state.is_file()
            else {
                "head_only": parent.head_only if parent else {},
                "told": [],
                "seconds": [],
                "snapshots": {},
            }
        )
        with display.work("fuse", "loading the base model"):
            self._lmm = Lmm(settings.model, settings.train.lora, team)
        first_head = _first_head(settings.model.id)
        self._data = _Loaded(self._inputs, lambda name: self._load(self._inputs[name], first_head))
        self._trainer = Trainer(self._lmm, self._data, settings.train, team)

    @property
    def mlflow_run_id(self) -> str | None:
        """The run that an earlier process started for this fusion."""
        run: str | None = self._state.get("mlflow_run_id")
        return run

    def remember(self, run: str) -> None:
        """Keep the MLflow run for whoever continues."""
        self._state["mlflow_run_id"] = run
        self._save()

    def _load(self, item: DomainInputs, first_head: Tensor | None) -> DomainData:
        domain = replace(item.settings.domain(), required=item.required, relative=False)
        task = make_task(
            domain,
            self._settings.heads,
            self._lmm,
            video=item.settings.video,
            first_head=first_head,
        )
        with self._display.work("fuse", f"encoding images of {domain.name}"):
            return DomainData(
                task,
                shards.read(item.distilled / TAUGHT),
                {split: shards.read(item.data / split) for split in (Split.VAL, Split.TEST)},
                self._lmm,
                self._settings.train.flip and item.settings.mirror,
            )

    def run(self, tracker: Tracker) -> None:
        """Probe, pack, measure, write."""
        probes = self._probe()
        tracker.metrics({f"head_only/{name}": value for name, value in probes.items()})
        tracker.metrics(
            {
                f"{what}/{name}": accuracy
                for name, item in self._inputs.items()
                for what, split in (("teacher", Split.TEST), ("agreement", Split.UNLABELLED))
                if (accuracy := teacher_accuracy(item.distilled, split)) is not None
            }
        )
        plan = self._plan(probes)
        self._resume(plan)
        while (attempt := plan.next()) is not None:
            self._attempt(plan, attempt, tracker)
        self._finish(plan, tracker)

    def _probe(self) -> dict[str, float]:
        """What a head alone reaches on the frozen base, by domain."""
        for name in self._inputs:
            if name in self._state["head_only"]:
                continue
            with self._display.work("fuse", f"without LoRA: {name}"), stopwatch() as seconds:
                head = self._trainer.probe(name, self._settings.train.seed)
                val = self._trainer.evaluate(None, name, Split.VAL, head)
                test = self._trainer.evaluate(None, name, Split.TEST, head)
                reached = {"val": val.accuracy, "test": test.accuracy}
                self._state["head_only"][name] = self._team.agree(reached)
                self._save()
            misses = "" if val.accuracy >= self._required[name] else ", too little: needs LoRA"
            what = "base alone" if head is None else "head alone"
            self._display.done("fuse", f"{name}: {what} {val.accuracy:.3f}{misses}", seconds())
        return {name: float(value["val"]) for name, value in self._state["head_only"].items()}

    def _plan(self, reached: Mapping[str, float]) -> FusionPlan:
        fusion = self._settings.fusion
        probes: Probes = {name: Probe(self._required[name], reached[name]) for name in self._inputs}
        order = order_domains(list(self._inputs), fusion.order, self._settings.train.seed, probes)
        return FusionPlan(
            {name: self._required[name] for name in order},
            make_strategy(fusion.strategy),
            fusion.margin,
            keep_unreachable=fusion.unreachable == "keep",
            probes=probes,
            packed=self._parent.kept if self._parent else None,
            closed=self._parent.closed if self._parent else (),
            used=self._parent.used if self._parent else 0,
        )

    def _resume(self, plan: FusionPlan) -> None:
        """Tell the plan what it was told before, and bring the adapters back."""
        for accuracy in self._state["told"]:
            plan.tell(accuracy)
        for adapter in self._state["snapshots"]:
            self._bring(adapter)
        if self._state["told"]:
            self._display.done("fuse", f"continuing after attempt {len(self._state['told'])}")

    def _bring(self, adapter: str) -> None:
        """See to it that an adapter is there, as it was left or inherited."""
        if adapter in self._trainer.adapters:
            return
        if file := self._state["snapshots"].get(adapter):
            self._trainer.restore(adapter, load_file(self._folder / SNAPSHOTS / file))
        elif self._parent is not None:
            self._trainer.restore(adapter, self._parent.snapshot(adapter))

    def _attempt(self, plan: FusionPlan, attempt: Attempt, tracker: Tracker) -> None:
        trainer, adapter = self._trainer, attempt.adapter
        # Everything random in an attempt follows from these two numbers and from the snapshot.
        seed = self._settings.train.seed * 1_000 + attempt.number
        run = tracker.attempt(attempt, self._required)
        try:
            with self._display.work("fuse", attempt.name) as on_step, stopwatch() as seconds:
                if attempt.held:
                    self._bring(adapter)
                    before = trainer.snapshot(adapter)
                else:
                    trainer.open(adapter, seed)

                def step(number: int, steps: int, loss: float) -> None:
                    on_step(number, steps, loss)
                    run.loss(number, steps, loss)

                trainer.train(
                    adapter,
                    attempt.domain,
                    held=attempt.held,
                    rehearse=attempt.rehearse,
                    seed=seed,
                    on_step=step,
                )
                results = {
                    name: trainer.evaluate(adapter, name, Split.VAL) for name in attempt.domains
                }
            reached = {name: value.accuracy for name, value in results.items()}
            decision = plan.tell(self._team.agree(reached))
            if decision.verdict is Verdict.COMMITTED or (
                adapter in plan.packing and not attempt.held
            ):
                self._keep(adapter, attempt.number)
            elif attempt.held:
                trainer.restore(adapter, before)
            else:
                trainer.close(adapter)
            took = seconds()
            self._report(run, decision, results, took)
        except BaseException:
            run.abandon()
            raise
        # Tracked first, then on disk: an attempt that is cut off in between is repeated, and its
        # run replaced.
        self._state["told"].append(decision.accuracy)
        self._state["seconds"].append(took)
        self._save()
        self._forget_old_snapshots()
        tracker.summary(plan.decisions, self._state["seconds"], self._required)
        tracker.metrics(
            {f"accuracy/{name}": value for name, value in decision.accuracy.items()}
            | {f"required/{name}": self._required[name] for name in decision.accuracy},
            step=attempt.number,
        )

    def _keep(self, adapter: str, number: int) -> None:
        file = f"{adapter}-{number:02d}.safetensors"
        temporary = self._folder / SNAPSHOTS / f"{file}.tmp"
        save_file(self._trainer.snapshot(adapter), temporary)
        temporary.replace(temporary.with_suffix(""))
        self._state["snapshots"][adapter] = file

    def _forget_old_snapshots(self) -> None:
        for file in (self._folder / SNAPSHOTS).iterdir():
            if file.name not in self._state["snapshots"].values():
                file.unlink()

    def _report(
        self,
        run: AttemptRun,
        decision: Decision,
        results: Mapping[str, Evaluation],
        seconds: float,
    ) -> None:
        details: dict[str, float] = {}
        for name, result in results.items():
            details |= {f"{key}/{name}": value for key, value in result.details.items()}
        sheets = {name: self._sheet(name, result, Split.VAL) for name, result in results.items()}
        run.decided(decision, seconds, sheets, details)
        colour = {"committed": "green", "rolled back": "red", "unreachable": "magenta"}
        verdict = f"[{colour[decision.verdict]}]{decision.verdict}[/]"
        reached = ", ".join(f"{name} {value.accuracy:.3f}" for name, value in results.items())
        reason = f" ({decision.reason})" if decision.below else ""
        self._display.done("fuse", f"{decision.attempt.name} {verdict}{reason}: {reached}", seconds)

    def _sheet(self, name: str, result: Evaluation, split: Split) -> Any:
        samples = self._trainer.samples(name, split)[:SHOWN]
        if result.threshold is None:
            return pictures.answer_sheet(
                samples, [one.answer for one in result.said[:SHOWN]], self._data[name].task.domain
            )
        boxes = [one.answer.boxes for one in result.said[:SHOWN]]
        return pictures.contact_sheet(samples, boxes, result.threshold)

    def _save(self) -> None:
        write_json(self._folder / STATE, self._state)

    # --- the result ---------------------------------------------------------------------------

    def _finish(self, plan: FusionPlan, tracker: Tracker) -> None:
        if plan.unreachable and self._settings.fusion.unreachable == "fail":
            misses = ", ".join(
                f"{name} (reached {accuracy:.3f}, required {self._required[name]:.3f})"
                for name, accuracy in plan.unreachable.items()
            )
            raise UnreachableError(
                f"out of reach even in an adapter of its own: {misses}; lower the requirement, "
                "train longer (train.steps, train.lora.rank), or set fusion.unreachable=keep"
            )
        domains: dict[str, Any] = {}
        for adapter, names in plan.packing.items():
            if adapter not in self._state["snapshots"]:
                domains |= self._carry(adapter)
                continue
            self._bring(adapter)
            for name in names:
                with self._display.work("fuse", f"measuring {name} on test"):
                    val = self._trainer.evaluate(adapter, name, Split.VAL)
                    test = self._trainer.evaluate(adapter, name, Split.TEST)
                self._write_head(adapter, name)
                sheet = self._sheet(name, test, Split.TEST)
                (self._folder / "pictures").mkdir(exist_ok=True)
                sheet.save(self._folder / "pictures" / f"{name}.png")
                tracker.picture(sheet, f"pictures/{name}.png")
                domains[name] = self._promise(name, adapter, val, test)
            self._write_adapter(adapter)
        result = {
            "strategy": self._settings.fusion.strategy,
            "packing": plan.packing,
            "closed": plan.closed,
            "used": plan.used,
            "parent": self._parent
            and {
                "version": self._parent.version,
                "fusion_stage": self._parent.folder.name,
            },
            "unreachable": plan.unreachable,
            "domains": {name: domains[name] for name in self._inputs if name in domains},
            "attempts": [_plain(decision) for decision in plan.decisions],
            "seconds": self._state["seconds"],
            "mlflow_run_id": tracker.run_id,
        }
        tracker.metrics(
            {f"test/{name}": value["accuracy"]["test"] for name, value in domains.items()}
            | {
                "adapters": len(plan.packing),
                "attempts": len(plan.decisions),
                "rolled_back": sum(d.verdict is Verdict.ROLLED_BACK for d in plan.decisions),
                "fusion_seconds": sum(self._state["seconds"]),
            }
        )
        tracker.finish("FINISHED", _note(result))
        write_json(self._folder / FUSION, result)

    def _carry(self, adapter: str) -> dict[str, Any]:
        """Take over an adapter that nothing was tried on: files, figures and promises."""
        assert self._parent is not None, "every adapter of a new fusion has a snapshot"
        before = self._parent.folder
        shutil.copytree(before / "adapters" / adapter, self._folder / "adapters" / adapter,
                        dirs_exist_ok=True)  # fmt: skip
        state = self._parent.snapshot(adapter)
        save_file(state, self._folder / SNAPSHOTS / f"{adapter}-00.safetensors")
        self._state["snapshots"][adapter] = f"{adapter}-00.safetensors"
        self._save()
        carried = {}
        for name in self._parent.kept[adapter]:
            facts = dict(self._parent.result["domains"][name])
            files = [f"pictures/{name}.png"] + ([facts["head"]] if facts["head"] else [])
            for file in files:
                (self._folder / file).parent.mkdir(exist_ok=True)
                shutil.copyfile(before / file, self._folder / file)
            reached = min(facts["accuracy"]["val"], facts["accuracy"]["test"])
            facts["required"] = self._required[name]
            facts["status"] = "met" if reached >= facts["required"] else "missed"
            carried[name] = facts
        return carried

    def _promise(
        self, name: str, adapter: str, val: Evaluation, test: Evaluation
    ) -> dict[str, Any]:
        item = self._inputs[name]
        required = self._required[name]
        probe = self._state["head_only"][name]
        task, head = self._data[name].task, self._trainer.heads(adapter).get(name)
        return {
            "task": str(task.domain.task),
            "metric": task.domain.metric,
            "required": required,
            "accuracy": {
                "val": val.accuracy,
                "val_ci95": list(val.interval),
                "test": test.accuracy,
                "test_ci95": list(test.interval),
                **{f"test_{key}": value for key, value in test.details.items()},
                "head_only": probe["test"],
                "head_only_val": probe["val"],
                "teacher": teacher_accuracy(item.distilled, Split.TEST),
            },
            "status": "met" if min(val.accuracy, test.accuracy) >= required else "missed",
            "adapter": adapter,
            "head": None if head is None else f"heads/{name}.safetensors",
            "labels": item.settings.labels,
            "prompt": item.settings.prompt,
            "media": "video" if task.video else "images",
            **task.facts(head),
        }

    def _write_head(self, adapter: str, name: str) -> None:
        head: Any = self._trainer.heads(adapter).get(name)
        (self._folder / "heads").mkdir(exist_ok=True)
        if head is not None:
            stored = self._data[name].task.stored_head(head)
            write_head(self._folder / "heads" / f"{name}.safetensors", stored)

    def _write_adapter(self, adapter: str) -> None:
        self._lmm.save_adapter(
            adapter, self._folder / "adapters" / adapter, self._settings.model.id
        )


class _Loaded(Mapping[str, DomainData]):
    """Samples of domains, encoded when they are first asked for.

    Args:
        names: The domains.
        load: Loads one.
    """

    def __init__(self, names: Iterable[str], load: Callable[[str], DomainData]) -> None:
        self._names = tuple(names)
        self._load = load
        self._loaded: dict[str, DomainData] = {}

    def __getitem__(self, name: str) -> DomainData:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _first_head(base: str) -> Tensor | None:
    """The generic detection head that a base model may ship, (5, width + 1), bias last."""
    file = Path(base_folder(base)) / "detection_head.safetensors"
    if not file.is_file():
        return None
    parts = load_file(file)
    rows = [
        torch.cat([parts[f"{name}.weight"], parts[f"{name}.bias"][:, None]], dim=1)
        for name in ("objectness", "box")
    ]
    return torch.cat(rows).float()


def _plain(decision: Decision) -> dict[str, Any]:
    attempt = decision.attempt
    return {
        "number": attempt.number,
        "domain": attempt.domain,
        "adapter": attempt.adapter,
        "held": list(attempt.held),
        "accuracy": decision.accuracy,
        "verdict": str(decision.verdict),
        "below": list(decision.below),
        "reason": decision.reason,
    }


def _note(result: Mapping[str, Any]) -> str:
    """What the parent run's page says: the packing and the promises, in markdown."""
    lines = [
        f"**{counted(len(result['domains']), 'domain')} in "
        f"{counted(len(result['packing']), 'adapter')}** after "
        f"{counted(len(result['attempts']), 'attempt')} (strategy `{result['strategy']}`).",
        "",
        "| domain | adapter | required | validation | test | head alone | teacher |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, facts in result["domains"].items():
        accuracy = facts["accuracy"]
        teacher = "–" if accuracy["teacher"] is None else f"{accuracy['teacher']:.3f}"
        lines.append(
            f"| {name} | {facts['adapter']} | {facts['required']:.2f} | {accuracy['val']:.3f} | "
            f"{accuracy['test']:.3f} | {accuracy['head_only']:.3f} | {teacher} |"
        )
    return "\n".join(lines)
