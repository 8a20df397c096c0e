"""Stage `fuse`: domains go into adapters, one attempt after the other (VaLoRA §4.2.1).

Every decision is on disk before the next attempt starts, so a fusion that is killed at any moment
is resumed with the same decisions. Output: `fusion.json` (what was decided, reached and promised),
`adapters/<name>` (in PEFT's format), `heads/<domain>.safetensors` and `pictures/<domain>.png`; the
same of every domain without LoRA in `head_only/`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data import shards
from valora_data.contract.base_model import base_hash, processor_hash
from valora_data.contract.bundle import read_bundle
from valora_data.schema import Split
from valora_train.fusion.earlier import Earlier
from valora_train.fusion.facts import domain_facts, training_facts
from valora_train.fusion.history import History
from valora_train.fusion.loading import LazyMapping, load_domain, make_deterministic
from valora_train.fusion.packing import Packing, check_reachable, make_plan
from valora_train.fusion.parent import Parent, find_parent, load_parent
from valora_train.fusion.promises import HEAD_ONLY, Promises, fusion_result
from valora_train.fusion.requirement import (
    CONTRACT,
    Requirement,
    contract_of,
    dedicated_requirement,
)
from valora_train.fusion.state import FUSION, FusionState
from valora_train.fusion.trainer import Trainer
from valora_train.fusion.validation import weak_teacher
from valora_train.model.lmm import Lmm
from valora_train.reporting.fusion_report import FusionReport
from valora_train.reporting.mlflow_store import store_lock
from valora_train.reporting.progress import stopwatch
from valora_train.reporting.tracking import Tracker, end_stale_runs
from valora_train.settings import as_dict
from valora_train.stage import Stage, digest, intact, read_json, write_json
from valora_train.stages.distill import (
    TAUGHT,
    teacher_accuracy,
    teacher_figures,
    teacher_speed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_data.schema import Sample
    from valora_train.fusion.packing import DedicatedAdapter
    from valora_train.fusion.plan import FusionPlan
    from valora_train.fusion.samples import DomainData
    from valora_train.model.team import Team
    from valora_train.reporting.progress import Display
    from valora_train.settings import DomainSettings, Settings


@dataclass(frozen=True)
class DomainInputs:
    """A domain with the outputs of the stages before.

    Attributes:
        settings: The domain.
        data: Output of stage `data`.
        distilled: Output of stage `distill`.
        dedicated: Accuracy in an adapter of its own, on validation and test, and the share of it
            that the domain must keep; None where its contract counts.
        adapter: That adapter.
    """

    settings: DomainSettings
    data: Path
    distilled: Path
    dedicated: tuple[float, float, float] | None = None
    adapter: DedicatedAdapter | None = None

    def requirement(self, margin: float = 0.0) -> Requirement:
        """What the domain must reach.

        Args:
            margin: Asked for on top on the validation split (`fusion.margin`).

        Raises:
            SettingsError: If a share is asked of a teacher that reaches nothing, or whose accuracy
                is unknown.
        """
        if self.dedicated is not None:
            return dedicated_requirement(*self.dedicated, margin)
        return contract_of(self.settings).requirement(
            self.settings.name, margin, self.teacher(Split.VAL), self.teacher(Split.TEST)
        )

    @property
    def contract(self) -> dict[str, float | None]:
        """The contract in the bundle."""
        if self.dedicated is not None:
            return {"required": None, "of_teacher": None, "of_dedicated": self.dedicated[2]}
        return contract_of(self.settings).as_json()

    def teacher(self, split: Split) -> float | None:
        """The teacher's accuracy on a split; None where there is no teacher or no truth."""
        return teacher_accuracy(self.distilled, split)


def fuse_stage(settings: Settings, domains: Sequence[DomainInputs]) -> Stage:
    """The stage that packs the domains into adapters."""
    inputs = {
        "base": base_hash(settings.model.id),
        "processor": processor_hash(settings.model.id),
    }
    for domain in domains:
        name = domain.settings.name
        inputs[f"{name}/taught"] = digest(domain.distilled / TAUGHT)
        for split in (Split.VAL, Split.TEST):
            inputs[f"{name}/{split}"] = digest(domain.data / split)
        # Bundles say what the teacher reaches.
        inputs[f"{name}/teacher"] = json.dumps(teacher_figures(domain.distilled))
    values = training_facts(settings) | {"fusion": as_dict(settings.fusion)}
    values["domains"] = [domain_facts(item.settings) | _contract_facts(item) for item in domains]
    # Where the fusion continues is an input; what becomes of its result is decided afterwards.
    for key in ("parent", "unreachable", "processes"):
        del values["fusion"][key]
    del values["fusion"]["of_dedicated"]  # the domains' requirements follow from it
    if settings.fusion.parent is not None:
        inputs["parent"] = find_parent(Path(settings.fusion.parent), Path(settings.paths.work)).name
    return Stage(f"fuse-{settings.task.name}", 6, values, inputs, resumable=True)


def _contract_facts(item: DomainInputs) -> dict[str, Any]:
    """What the bar of a domain follows from, besides the margin, as JSON values."""
    values: dict[str, Any] = {"required": item.requirement().required}
    # The bar depends on more than the requirement.
    if item.dedicated is not None:
        values[CONTRACT] = {"dedicated": list(item.dedicated)}
    elif item.settings.of_teacher is not None:
        values[CONTRACT] = item.contract | {"teacher": item.teacher(Split.VAL)}
    return values


def parent_of(settings: Settings, domains: Sequence[DomainInputs], stage: Stage) -> Parent | None:
    """The fusion to extend, or None."""
    if settings.fusion.parent is None:
        return None
    bundle = Path(settings.fusion.parent)
    folder = find_parent(bundle, Path(settings.paths.work))
    version = read_bundle(bundle).version
    return load_parent(folder, version, stage, _requirements(settings, domains))


def _requirements(settings: Settings, domains: Sequence[DomainInputs]) -> dict[str, Requirement]:
    """What each domain must reach, by name."""
    return {item.settings.name: item.requirement(settings.fusion.margin) for item in domains}


def check_result(settings: Settings, domains: Sequence[DomainInputs], folder: Path) -> None:
    """Refuse a finished fusion in which a domain misses its requirement, if that is asked for.

    Args:
        settings: All settings.
        domains: The domains.
        folder: Output folder of the fusion.

    Raises:
        UnreachableError: If a domain is flagged and `fusion.unreachable` is `fail`.
    """
    if settings.fusion.unreachable == "fail":
        result = read_json(intact(folder / FUSION))
        flagged = result["unreachable"]
        met = [name for name in result["domains"] if name not in flagged]
        check_reachable(flagged, _requirements(settings, domains), met)


def unchanged_parent(
    settings: Settings, domains: Sequence[DomainInputs], stage: Stage
) -> Path | None:
    """Output of the fusion to extend, if it already holds just what is asked for; else None."""
    parent = parent_of(settings, domains, stage)
    if parent is None:
        return None
    before = parent.result["domains"]
    asked = {item.settings.name: item.requirement().promise for item in domains}
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
    """Fill the stage's folder, resuming from what is in it.

    Where several processes train together, each fills a folder of its own; only the leader's
    becomes the output.

    Raises:
        UnreachableError: If a domain misses its requirement even alone and `fusion.unreachable` is
            `fail`.
    """
    if (folder / FUSION).is_file():  # killed after the last write
        return
    make_deterministic(settings.train.threads)
    parent = parent_of(settings, domains, stage)
    state = FusionState(
        folder, parent.head_only if parent else {}, settings.train.checkpoint_seconds
    )
    earlier = Earlier(stage, Path(settings.paths.work), folder)
    if team.size == 1:  # several processes might not find the same
        earlier.take_head_only(state)
    with display.work("fuse", "loading the base model"):
        lmm = Lmm(settings.model, settings.train.lora, team)
    trainer = Trainer(lmm, _load_lazily(settings, domains, lmm, display), settings.train, team)
    requirements = _requirements(settings, domains)
    required = {name: requirement.required for name, requirement in requirements.items()}
    tracker = _start_tracker(settings, domains, stage, state, team)
    data_sets = {item.settings.name: (item.distilled, item.data) for item in domains}
    report = FusionReport(tracker, display, trainer, required, data_sets)
    teachers = {item.settings.name: teacher_figures(item.distilled) for item in domains}
    promises = Promises(
        settings.model.id, {item.settings.name: item.settings for item in domains}, requirements,
        {item.settings.name: item.contract for item in domains}, teachers, trainer, lmm, state,
    )  # fmt: skip
    with report.running():
        _measure_baselines(settings, domains, requirements, promises, state, display, team, report)

        def new_plan() -> FusionPlan:
            return make_plan(
                settings.fusion, requirements, state.head_only, settings.train.seed, parent
            )

        plan = new_plan()
        history = _history(requirements, state, parent)
        dedicated: dict[str, DedicatedAdapter] = {}
        if team.size == 1:  # they are on the leader's disk only
            dedicated = {item.settings.name: item.adapter for item in domains if item.adapter}
            if not state.told:
                earlier.take_attempts(new_plan, state, dedicated)
        packing = Packing(plan, trainer, state, settings.train.seed, team, parent, dedicated)

        def told() -> list[dict[str, Any]]:
            return history.told(plan.decisions, plan.packing, plan.head_only, packing.taken)

        report.follow(told)
        for decision in plan.head_only.values():
            report.placed_without_adapter(decision, folder / HEAD_ONLY)
        report.resumed(packing.resume())
        if state.told:
            report.log_progress(plan, state)
        _stop_if_unreachable(settings, plan, requirements, parent)
        while (attempt := plan.next()) is not None:
            with report.attempt(attempt) as shown:
                outcome = packing.run(attempt, shown.on_step, shown.on_figures)
                shown.finish(outcome)
            # Tracked first, then on disk: an attempt that is interrupted in between is repeated,
            # and its MLflow run replaced.
            packing.record(outcome)
            report.log_progress(plan, state)
            _stop_if_unreachable(settings, plan, requirements, parent)
        _measure_packing(plan, packing, promises, state, parent, report)
        for item in domains:
            if (speed := promises.speed.get(item.settings.name)) is not None:
                speed["teacher"] = teacher_speed(item.distilled) or None
        result = fusion_result(settings.fusion.strategy, plan, promises, state, parent, told())
        report.finish(result)
        write_json(folder / FUSION, result)


def _stop_if_unreachable(
    settings: Settings,
    plan: FusionPlan,
    requirements: Mapping[str, Requirement],
    parent: Parent | None,
) -> None:
    """End the fusion at the first domain that is out of reach, if `fusion.unreachable` is `fail`.

    The attempts so far stay on disk: the same fusion continues with `fusion.unreachable=keep`.

    Raises:
        UnreachableError: If a domain is out of reach.
    """
    if settings.fusion.unreachable != "fail":
        return
    flagged = (parent.flagged if parent else {}) | plan.unreachable
    met = [name for name in requirements if name not in {*flagged, *plan.waiting}]
    check_reachable(flagged, requirements, met, plan.waiting)


def _start_tracker(
    settings: Settings,
    domains: Sequence[DomainInputs],
    stage: Stage,
    state: FusionState,
    team: Team,
) -> Tracker | None:
    """Start or continue the fusion's MLflow run, on the leader, and remember it on disk."""
    if not team.leads:
        return None
    with store_lock(settings.paths.work):
        end_stale_runs(settings.paths.tracking, settings.paths.work)
        tracker = Tracker(settings.paths.tracking, f"valora/{settings.task.name}", stage.key)
    name = f"{settings.task.name} · {settings.fusion.strategy} · seed {settings.train.seed}"
    note = f"Packs {', '.join(item.settings.name for item in domains)} into the fewest adapters."
    chosen = {item.settings.name: item.settings for item in domains}
    config = as_dict(replace(settings, domains=chosen))
    state.mlflow_run_id = tracker.start(name, config, note, state.mlflow_run_id)
    state.save()
    return tracker


def _measure_baselines(
    settings: Settings,
    domains: Sequence[DomainInputs],
    requirements: Mapping[str, Requirement],
    promises: Promises,
    state: FusionState,
    display: Display,
    team: Team,
    report: FusionReport,
) -> None:
    """Measure every domain without LoRA, unless that is on disk, and log what is known so far."""
    for item in domains:
        name = item.settings.name
        if name in state.head_only:
            continue
        with report.head_only(name) as shown, stopwatch() as seconds:
            reached, test = promises.measure_alone(
                name, settings.train.seed, shown.on_step, shown.on_figures
            )
            sheet = report.contact_sheet(name, test, Split.TEST)
            sheet.save(state.folder / HEAD_ONLY / f"{name}.png")
            state.head_only[name] = team.agree(reached)
            state.save()
        report.head_only_measured(name, reached["val"], requirements[name], seconds())
    for item in domains:
        name = item.settings.name
        alone, taught = state.head_only[name]["val"], item.teacher(Split.VAL)
        if (text := weak_teacher(name, requirements[name], alone, taught)) is not None:
            display.note("fuse", text)
    report.log_baselines(
        {
            "head_only": {name: reached["val"] for name, reached in state.head_only.items()},
            "teacher": {item.settings.name: item.teacher(Split.TEST) for item in domains},
            "agreement": {item.settings.name: item.teacher(Split.UNLABELLED) for item in domains},
        }
    )


def _history(
    requirements: Mapping[str, Requirement], state: FusionState, parent: Parent | None
) -> History:
    """Tells what attempts change, beginning with what is known before the first one."""
    start = {name: reached["val"] for name, reached in state.head_only.items()}
    if parent is None:
        return History(requirements, start)
    known = parent.result["domains"]
    start |= {name: known[name]["accuracy"]["val"] for name in parent.domains}
    return History(requirements, start, parent.alone)


def _measure_packing(
    plan: FusionPlan,
    packing: Packing,
    promises: Promises,
    state: FusionState,
    parent: Parent | None,
    report: FusionReport,
) -> None:
    """Write adapters, heads, pictures and promises, which are measured on the test split."""
    for decision in plan.head_only.values():
        promises.place_without_adapter(decision)
        if not decision.met:  # the others were reported before the first attempt
            report.placed_without_adapter(decision, state.folder / HEAD_ONLY)
    if parent is not None:
        for name in parent.unpacked:
            promises.carry_over_domain(name, parent)
    reasons = {name: decision.reason for decision in plan.decisions for name in decision.kept}
    for adapter, names in plan.packing.items():
        if parent is not None and adapter not in state.snapshots:
            promises.carry_over(adapter, names, parent)
            continue
        packing.load(adapter)
        for name in names:
            with report.measuring(name):
                reason = reasons.get(name, "as in the parent fusion")
                test = promises.measure(adapter, name, reason, packing.evaluated.get(name))
            sheet = report.test_measured(name, test)
            (state.folder / "pictures").mkdir(exist_ok=True)
            sheet.save(state.folder / "pictures" / f"{name}.png")
        promises.write_adapter(adapter)


def _load_lazily(
    settings: Settings, domains: Sequence[DomainInputs], lmm: Lmm, display: Display
) -> Mapping[str, DomainData]:
    """The samples of the domains, encoded when they are first needed."""
    inputs = {item.settings.name: item for item in domains}

    def load(name: str) -> DomainData:
        item = inputs[name]

        def read(part: str) -> list[Sample]:
            folder = item.distilled if part == TAUGHT else item.data
            return shards.read(intact(folder / part))

        required = item.requirement().promise
        with display.work("fuse", f"encoding images of {name}"):
            return load_domain(settings, item.settings, required, lmm, read)

    return LazyMapping(inputs, load)
