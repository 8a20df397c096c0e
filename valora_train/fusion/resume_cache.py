"""Attempts of earlier fusions of the same data that a new one would repeat are taken over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from valora_train.fusion.packing import DedicatedAdapter, dedicated_of
from valora_train.fusion.parent import training_inputs
from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.state import (
    HEAD_ONLY,
    SAVED,
    SNAPSHOTS,
    STATE,
    FusionState,
    attempt_facts,
    snapshot_file,
)
from valora_train.stage import Stage, read_json, write_json

MADE_OF = "made_of.json"


class ResumeCache:
    """The fusions beside a new one that trained with the same settings."""

    def __init__(self, stage: Stage, work: Path, folder: Path) -> None:
        domains = training_inputs(stage.settings, stage.inputs)
        # No attempt sees the test split.
        trained = {
            name: (facts, {key: found[key] for key in found if key != f"{name}/test"})
            for name, (facts, found) in domains.items()
        }
        made_of: dict[str, Any] = {"version": stage.version}
        made_of |= {name: stage.inputs.get(name) for name in ("base", "processor", "parent")}
        made_of |= {name: stage.settings[name] for name in ("model", "heads", "train")}
        made_of |= {"domains": domains, "trained": trained}
        self._made_of = json.loads(json.dumps(made_of))
        write_json(folder / MADE_OF, self._made_of)
        mine = {stage.folder(work).name, stage.partial(work).name}
        apart = {"domains": None, "trained": None}  # domains are compared one by one
        self._folders = [
            item
            for item in sorted(work.glob(f"{stage.name}-*/"))
            if item.name not in mine and _read(item / MADE_OF) | apart == self._made_of | apart
        ]

    def _same_domains(self, folder: Path, what: str) -> set[str]:
        """Domains whose data and settings, besides their requirements, are the same."""
        theirs, ours = _read(folder / MADE_OF).get(what, {}), self._made_of[what]
        return {name for name in ours if theirs.get(name) == ours[name]}

    def take_head_only(self, state: FusionState) -> None:
        """Take over what domains reach without LoRA."""
        for folder in self._folders:
            known = _read(folder / STATE).get("head_only", {})
            for name in (self._same_domains(folder, "domains") & set(known)) - set(state.head_only):
                files = list((folder / HEAD_ONLY).glob(f"{name}.*"))
                if not {f"{name}.json", f"{name}.png"} <= {file.name for file in files}:
                    continue
                (state.folder / HEAD_ONLY).mkdir(exist_ok=True)
                try:
                    for file in files:
                        shutil.copyfile(file, state.folder / HEAD_ONLY / file.name)
                except FileNotFoundError:  # another process has finished that fusion
                    continue
                state.head_only[name] = known[name]
        state.save()

    def take_attempts(
        self,
        new_plan: Callable[[], FusionPlan],
        state: FusionState,
        dedicated: Mapping[str, DedicatedAdapter] | None = None,
    ) -> None:
        """Take over the attempts that the new fusion, which has made none yet, would repeat."""
        count, files, source, saved = 0, dict[str, str](), state.folder, dict[str, Any]()
        for folder in self._folders:
            found, place = _read(folder / STATE), folder / SNAPSHOTS
            known, same = found.get("snapshots", {}), self._same_domains(folder, "trained")
            for made, needed in enumerate(_replay(new_plan(), found, same, dedicated or {}), 1):
                # Only the latest snapshots are kept.
                if made > count and all(
                    known.get(adapter) == file and (place / file).is_file()
                    for adapter, file in needed.items()
                ):
                    count, files, source, saved = made, needed, place, found
        try:
            for file in files.values():
                shutil.copyfile(source / file, state.folder / SNAPSHOTS / file)
        except FileNotFoundError:  # another process goes on with that fusion
            return
        if count:
            state.snapshots.update(files)
            for ours in ("accuracies", "seconds", "attempts"):
                setattr(state, ours, saved[SAVED[ours]][:count])
            state.save()


def _replay(
    plan: FusionPlan,
    saved: Mapping[str, Any],
    same: AbstractSet[str],
    dedicated: Mapping[str, DedicatedAdapter],
) -> Iterator[dict[str, str]]:
    """The snapshots after each attempt of an earlier fusion that a plan would make as well."""
    snapshots: dict[str, str] = {}
    # An earlier version kept no facts of attempts.
    for facts, reached in zip(
        saved.get("attempts", ()), saved.get(SAVED["accuracies"], ()), strict=False
    ):
        if not same >= reached.keys() or (attempt := plan.next()) is None:
            return
        alone = dedicated_of(attempt, dedicated)
        if attempt_facts(attempt, alone.key if alone else None) != {"dedicated": None, **facts}:
            return
        if plan.tell(reached).kept:
            snapshots[attempt.adapter] = snapshot_file(attempt.adapter, attempt.number)
        snapshots = {name: file for name, file in snapshots.items() if name in plan.packing}
        yield snapshots


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none, or another process is about to move it."""
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
