"""The resume cache: attempts of earlier fusions of the same data, which a new one would repeat.

A fusion whose requirements, margin, order or domains changed makes the same attempts as the earlier
one up to the first decision that differs. Those are taken over instead of being trained again.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from valora_train.fusion.packing import dedicated_of
from valora_train.fusion.parent import training_inputs
from valora_train.fusion.reported import HEAD_ONLY
from valora_train.fusion.state import SNAPSHOTS, STATE, attempt_facts, snapshot_file
from valora_train.stage import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from valora_train.fusion.packing import DedicatedAdapter
    from valora_train.fusion.plan import FusionPlan
    from valora_train.fusion.state import FusionState
    from valora_train.stage import Stage

MADE_OF = "made_of.json"


class Earlier:
    """The unfinished and finished fusions beside a new one that trained with the same settings.

    The folder of the new one gets a file that says what it is made of.
    """

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
    ) -> int:
        """Take over, and count, the attempts that the new fusion would repeat.

        Args:
            new_plan: Makes the plan of the new fusion before its first attempt.
            state: State of the new fusion, in which nothing was attempted.
            dedicated: The dedicated adapters that the new fusion takes (see `Packing`).
        """
        best: tuple[int, dict[str, str], Path] = (0, {}, state.folder)
        for folder in self._folders:
            saved = _read(folder / STATE)
            known, place = saved.get("snapshots", {}), folder / SNAPSHOTS
            for count in range(self._usable(folder, saved), best[0], -1):
                snapshots = _replay(new_plan(), saved, count, dedicated or {})
                # Only the latest snapshots are kept.
                if snapshots is not None and all(
                    known.get(adapter) == file and (place / file).is_file()
                    for adapter, file in snapshots.items()
                ):
                    best = (count, snapshots, folder)
                    break
        count, snapshots, folder = best
        saved = _read(folder / STATE) if count else {}
        try:
            for file in snapshots.values():
                shutil.copyfile(folder / SNAPSHOTS / file, state.folder / SNAPSHOTS / file)
        except FileNotFoundError:  # another process goes on with that fusion
            return 0
        if count:
            state.snapshots.update(snapshots)
            state.told = saved["told"][:count]
            state.seconds = saved["seconds"][:count]
            state.attempts = saved["attempts"][:count]
            state.save()
        return count

    def _usable(self, folder: Path, saved: dict[str, Any]) -> int:
        """Number of attempts before the first one with a domain that is missing or changed."""
        attempts, told = saved.get("attempts", []), saved.get("told", [])
        if len(attempts) != len(told):  # written by an earlier version
            return 0
        same = self._same_domains(folder, "trained")
        changed = (number for number, reached in enumerate(told) if not set(reached) <= same)
        return next(changed, len(told))


def _replay(
    plan: FusionPlan, saved: dict[str, Any], count: int, dedicated: Mapping[str, DedicatedAdapter]
) -> dict[str, str] | None:
    """The snapshots that a plan needs after `count` attempts; None if it would make others."""
    snapshots = {}
    for facts, reached in zip(saved["attempts"][:count], saved["told"], strict=False):
        if (attempt := plan.next()) is None:
            return None
        alone = dedicated_of(attempt, dedicated)
        if attempt_facts(attempt, alone.key if alone else None) != {"dedicated": None, **facts}:
            return None
        if plan.tell(reached).kept:
            snapshots[attempt.adapter] = snapshot_file(attempt.adapter, attempt.number)
    return {adapter: file for adapter, file in snapshots.items() if adapter in plan.packing}


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none, or another process is about to move it."""
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
