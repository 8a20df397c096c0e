"""Stage `oracle`: every subset of the domains is trained jointly in a fresh adapter.

Results lie in `trials/` beside the stages, one line each, and are never computed again: an oracle
that was killed continues, and one with more seeds or one domain more trains only what is new.
Output: `oracle.json`, the table (`valora_train.fusion.oracle`), or `groups.json` where
`oracle.largest` leaves groups out.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.contract.files import expanded
from valora_data.schema import Split
from valora_data.wording import plural
from valora_train.errors import SettingsError
from valora_train.fusion.exact import lower_bound
from valora_train.fusion.facts import domain_facts, trial_facts
from valora_train.fusion.oracle import Measured, OracleTable
from valora_train.fusion.requirement import dedicated_requirement
from valora_train.fusion.state import FUSION
from valora_train.processes import trial_processes
from valora_train.reporting.progress import stopwatch
from valora_train.stage import Stage, digest, intact, read_json, write_json
from valora_train.stages.distill import TAUGHT, teacher_accuracy
from valora_train.trials.inputs import DomainFacts, TrialInputs, pack_inputs
from valora_train.trials.oracle import HEAD_ONLY, oracle_trials
from valora_train.trials.pool import run_trials
from valora_train.trials.store import RESULTS, Trial, TrialStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from valora_train.fusion.exact import Bound
    from valora_train.fusion.requirement import Requirement
    from valora_train.reporting.progress import Display
    from valora_train.settings import FusionSettings, Settings
    from valora_train.stages.fuse import DomainInputs
    from valora_train.trials.pool import Progress

TRIALS = "trials"
"""Folder, beside those of the stages, of the results of all trials."""
TABLE = "oracle.json"
GROUPS = "groups.json"
SPLITS = (TAUGHT, str(Split.VAL), str(Split.TEST))
NOTES = 20
"""Lines about the progress of a command, where the output is not a terminal."""


def trial_inputs(settings: Settings, domains: Sequence[DomainInputs]) -> TrialInputs:
    """What trials of some domains need.

    Args:
        settings: All settings.
        domains: The domains, with the outputs of the stages before.
    """
    chosen = {item.settings.name: item.settings for item in domains}
    return TrialInputs(
        replace(settings, domains=chosen, task=replace(settings.task, only=[])),
        trial_facts(settings),
        {
            item.settings.name: DomainFacts(
                domain_facts(item.settings) | {part: digest(_part(item, part)) for part in SPLITS},
                item.requirement(settings.fusion.margin),
                _teacher(item),
                {part: str(_part(item, part).absolute()) for part in SPLITS},
            )
            for item in domains
        },
        Path(settings.paths.work).absolute(),
    )


def _part(item: DomainInputs, part: str) -> Path:
    return (item.distilled if part == TAUGHT else item.data) / part


def _teacher(item: DomainInputs) -> dict[str, float]:
    reached = {
        str(split): teacher_accuracy(item.distilled, split) for split in (Split.VAL, Split.TEST)
    }
    return {split: accuracy for split, accuracy in reached.items() if accuracy is not None}


def made_of(inputs: TrialInputs) -> dict[str, Any]:
    """What the accuracies of an oracle table depend on besides group and seed."""
    facts = dict(inputs.training)
    return facts | {f"domain {name}": dict(item.facts) for name, item in inputs.domains.items()}


def oracle_stage(settings: Settings, inputs: TrialInputs) -> Stage:
    """The stage that trains every subset of the domains."""
    values = {"seeds": settings.oracle.seeds, "largest": settings.oracle.largest}
    values |= {"made_of": made_of(inputs)}
    return Stage(f"oracle-{settings.task.name}", 1, values, {}, resumable=True)


def is_partial(settings: Settings, inputs: TrialInputs) -> bool:
    """Whether `oracle.largest` leaves groups of domains out."""
    return 0 < settings.oracle.largest < len(inputs.domains)


def pack(settings: Settings, inputs: TrialInputs) -> str:
    """Write inputs for another machine.

    Args:
        settings: All settings: the folder (`oracle.pack`), and what is to be trained there.
        inputs: The inputs.

    Returns:
        What to do there, for people.
    """
    file = pack_inputs(inputs, expanded(str(settings.oracle.pack)))
    if settings.command == "compare":
        asked = " --compare"
    else:
        asked = f" --seeds {' '.join(map(str, settings.oracle.seeds))}"
        if settings.oracle.largest:
            asked += f" --largest {settings.oracle.largest}"
    return (
        f"{file.parent}: copy it to the other machine, run `python -m valora_train.trials "
        f"FOLDER{asked}` there, and take over what it finds with oracle.results=FOLDER/{RESULTS}"
    )


def trial_store(settings: Settings) -> TrialStore:
    """The results of all trials."""
    return TrialStore(Path(settings.paths.work) / TRIALS)


def take_over(
    settings: Settings, inputs: TrialInputs, trials: Sequence[Trial], what: str, display: Display
) -> None:
    """Take over results of another machine (`oracle.results`), if there are any.

    Args:
        settings: All settings.
        inputs: Settings, domains and samples.
        trials: The trials that are needed.
        what: Name of the command, for the terminal.
        display: The terminal.

    Raises:
        SettingsError: If that file cannot be read, holds no results, or none of these trials.
    """
    if settings.oracle.results is None:
        return
    offered = trial_store(settings).take_over(expanded(settings.oracle.results))
    needed = {inputs.key(trial) for trial in trials}
    if not needed & offered:
        raise SettingsError(
            f"oracle.results={settings.oracle.results} holds {plural(len(offered), 'result')}, but "
            f"none of the {len(needed)} trainings that this {settings.command} needs: they are of "
            "other data, settings of training, seeds or another base model; name the results of "
            "these, or set it to null"
        )
    display.note(
        what,
        f"{len(needed & offered)} of {len(needed)} trainings are in {settings.oracle.results}",
    )


def run_with_progress(
    settings: Settings,
    inputs: TrialInputs,
    trials: Sequence[Trial],
    what: str,
    display: Display,
) -> list[dict[str, Any]]:
    """Run trials and show how far they are.

    Args:
        settings: All settings.
        inputs: Settings, domains and samples.
        trials: The trials.
        what: Name of the command, for the terminal.
        display: The terminal.

    Returns:
        The results, in the order of `trials`.
    """
    store = trial_store(settings)
    file = inputs.write(store.folder / f"inputs-{os.getpid()}.json")
    told = 0

    with display.work(what, f"{len(trials)} trainings") as on_step, stopwatch() as seconds:

        def on_done(trial: Trial, _: Mapping[str, Any], progress: Progress) -> None:
            nonlocal told
            on_step(progress.done, progress.count, math.nan)
            part = NOTES * progress.done // progress.count
            left = progress.seconds_left
            if part > told and left is not None:
                told = part
                display.note(
                    what,
                    f"{progress.done} of {progress.count} trainings after {seconds() / 60:.0f} "
                    f"min, about {left / 60:.0f} min left ({trial.name})",
                )

        try:
            return run_trials(
                file, trials, store, trial_processes(settings.oracle.processes), on_done
            )
        finally:
            file.unlink(missing_ok=True)


def build_oracle(settings: Settings, inputs: TrialInputs, folder: Path, display: Display) -> None:
    """Train what is missing, and write the table into the stage's folder."""
    seeds = settings.oracle.seeds
    trials = oracle_trials(list(inputs.domains), seeds, settings.oracle.largest)
    take_over(settings, inputs, trials, "oracle", display)
    results = run_with_progress(settings, inputs, trials, "oracle", display)
    if is_partial(settings, inputs):
        write_json(folder / GROUPS, _groups(inputs, seeds, results))
        return
    names = list(inputs.domains)
    largest = {name: inputs.domain(name).domain().task.spec.largest for name in names}
    table = OracleTable(settings.task.name, names, seeds, made_of(inputs), largest)
    table.teacher = {
        name: Measured(item.teacher["val"], item.teacher["test"])
        for name, item in inputs.domains.items()
        if {"val", "test"} <= set(item.teacher)
    }
    for result in results:
        reached = {name: _measured(found) for name, found in result["accuracy"].items()}
        if result["method"] == HEAD_ONLY:
            for name, pair in reached.items():
                table.put_head_only(result["seed"], name, pair)
        else:
            table.put(result["seed"], reached)
    table.require_complete()
    table.write(folder / TABLE)


def _measured(found: Mapping[str, float | None]) -> Measured:
    """An accuracy pair; what diverged is NaN."""
    values = (found["val"], found["test"])
    return Measured(*(math.nan if value is None else value for value in values))


def _groups(
    inputs: TrialInputs, seeds: Sequence[int], results: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of `groups.json`: what the domains of each group reach."""
    rows = [
        {
            "seed": result["seed"],
            "head_only": result["method"] == HEAD_ONLY,
            "reached": {
                name: [found["val"], found["test"]] for name, found in result["accuracy"].items()
            },
        }
        for result in results
    ]
    return {
        "domains": list(inputs.domains),
        "seeds": list(seeds),
        "made_of": json.loads(json.dumps(made_of(inputs))),
        "groups": rows,
    }


def read_table(folder: Path) -> OracleTable | None:
    """The table of a finished stage; None if it holds only some groups."""
    if not (folder / TABLE).is_file():
        return None
    return OracleTable.read(intact(folder / TABLE))


def packing(fused: Path) -> list[list[str]]:
    """The domains of each adapter that keep their bars there.

    Args:
        fused: Output of a fusion; there may be none.
    """
    if not fused.is_dir():
        return []
    adapters: dict[str, list[str]] = {}
    for name, promised in read_json(intact(fused / FUSION))["domains"].items():
        if promised["adapter"] is not None and promised["accuracy"]["val"] >= promised["bar"]:
            adapters.setdefault(promised["adapter"], []).append(name)
    return list(adapters.values())


def bounds(
    folder: Path,
    contracts: Mapping[str, Requirement],
    fusion: FusionSettings,
    packings: Mapping[int, list[list[str]]],
) -> dict[int, Bound]:
    """The lower bound on adapters for each seed, from the groups that were trained.

    Args:
        folder: Output of the stage, with `groups.json`.
        contracts: What each domain must reach by its contract.
        fusion: Whether that is a share of what each reaches in an adapter of its own instead, the
            margin, and whether a domain that keeps its requirement without LoRA takes no adapter.
        packings: For some seeds, groups that a fusion packed, and that keep their bars.
    """
    content = read_json(intact(folder / GROUPS))
    found = {}
    for seed in content["seeds"]:
        rows = [row for row in content["groups"] if row["seed"] == seed]
        needed, failed, kept = _outcomes(rows, contracts, fusion)
        found[seed] = lower_bound(needed, failed, [*kept, *packings.get(seed, [])])
    return found


def _outcomes(
    rows: Sequence[Mapping[str, Any]], contracts: Mapping[str, Requirement], fusion: FusionSettings
) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """The domains that need an adapter, groups of them that fail, and groups that keep their bars.

    Domains that keep theirs beside one that falls below its own count as a group that does: the
    adapter may hold them, and the other one be held elsewhere.
    """

    def value(reached: Mapping[str, Any], name: str) -> float:
        found = reached[name][0]
        return math.nan if found is None else float(found)

    head_only = fusion.head_only
    without: dict[str, float] = {}
    alone: dict[str, float] = {}
    for row in rows:
        names = list(row["reached"])
        if row["head_only"]:
            without |= {name: value(row["reached"], name) for name in names}
        elif len(names) == 1:
            alone[names[0]] = value(row["reached"], names[0])
    floors = {}
    for name, contract in contracts.items():
        requirement = contract
        if fusion.of_dedicated is not None and not math.isnan(alone[name]):
            requirement = dedicated_requirement(
                alone[name], None, fusion.of_dedicated, fusion.margin
            )
        if head_only and requirement.met_by(without[name]):
            continue
        met = requirement.met_by(alone[name])
        # As in `exact_packing`: what reaches no more than without LoRA takes no adapter.
        if not met and (math.isnan(alone[name]) or (head_only and alone[name] <= without[name])):
            continue
        floors[name] = requirement.kept_from(None if met else alone[name])
    failed, kept = [], []
    for row in rows:
        reached = row["reached"]
        if not row["head_only"] and set(reached) <= set(floors):
            kept.append([name for name in reached if value(reached, name) >= floors[name]])
            if len(kept[-1]) < len(reached):
                failed.append(list(reached))
    return list(floors), failed, kept
