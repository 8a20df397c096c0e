"""Extends an earlier fusion: unchanged domains keep their adapters, heads and figures.

A domain that changed or is gone leaves its adapter as it is, for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from valora_data.contract.bundle import read_bundle
from valora_train.errors import SettingsError
from valora_train.fusion.requirement import CONTRACT, Requirement
from valora_train.fusion.state import FUSION, STATE, of_domains, read_snapshot
from valora_train.settings import LoraSettings
from valora_train.stage import RECORD, Stage, read_json


@dataclass(frozen=True)
class Parent:
    """An earlier fusion that is extended."""

    folder: Path  # output of its stage
    version: int  # of its bundle
    kept: dict[str, tuple[str, ...]]  # adapters with their unchanged domains, oldest first
    unpacked: tuple[str, ...]  # unchanged domains that take no adapter
    flagged: dict[str, float]  # accuracy on validation of unchanged ones that miss their target
    result: dict[str, Any]  # content of its `fusion.json`

    @property
    def domains(self) -> tuple[str, ...]:
        """The unchanged domains."""
        return (*(name for names in self.kept.values() for name in names), *self.unpacked)

    @property
    def placed(self) -> dict[str, Any]:
        """What it leaves to the plan of a fusion that extends it."""
        result, known = self.result, self.result["domains"]
        return {
            "packed": self.kept, "unpacked": self.unpacked,
            "alone": {name: result["alone"].get(name, at) for name, at in self.flagged.items()},
            "reached": {name: float(known[name]["accuracy"]["val"]) for name in self.domains},
            "used": int(result["used"]),
        }  # fmt: skip

    @property
    def head_only(self) -> dict[str, dict[str, float]]:
        """Accuracy of the unchanged domains without LoRA (see `FusionState`)."""
        known = read_json(self.folder / STATE)["head_only"]
        return {name: known[name] for name in self.domains}

    def snapshot(self, adapter: str) -> dict[str, Tensor]:
        """Snapshot of an adapter with the heads of its unchanged domains."""
        file = read_json(self.folder / STATE)["snapshots"][adapter]
        return of_domains(read_snapshot(self.folder, file), self.kept[adapter])


def find_parent(bundle: Path, work: Path) -> Path:
    """The output folder, in the folder of all stages, of the fusion that a bundle came from."""
    name = read_bundle(bundle).manifest["lineage"]["fusion_stage"]
    if not (work / name / FUSION).is_file():
        text = f"the fusion that {bundle} was exported from is no longer in {work} ({name}): set"
        raise SettingsError(f"{text} fusion.parent=null to fuse all domains")
    return work / str(name)


def load_parent(
    bundle: Path, work: Path, stage: Stage, requirements: Mapping[str, Requirement]
) -> Parent:
    """Find the domains of an earlier fusion that a new stage with these requirements can keep."""
    folder = find_parent(bundle, work)
    record, result = read_json(folder / RECORD), read_json(folder / FUSION)
    theirs, ours = record["settings"], stage.settings
    lora = asdict(LoraSettings()) | theirs["train"]["lora"]
    same = {name: theirs[name] == ours[name] for name in ("model", "heads")}
    # The strategies `grow` of earlier versions raised ranks.
    ranks = {one["rank"] for one in result.get("adapters", {}).values()}
    same["train.lora"] = lora == ours["train"]["lora"] and ranks <= {lora["rank"]}
    if others := [name for name in same if not same[name]]:
        raise SettingsError(
            f"the bundle of fusion.parent was made with other settings of {', '.join(others)}: use "
            "the same ones, or set fusion.parent=null to fuse all domains"
        )
    then, now = training_inputs(theirs, record["inputs"]), training_inputs(ours, stage.inputs)

    def stays(name: str) -> bool:
        if name not in now or now[name] != then[name]:
            return False
        facts, requirement = result["domains"][name], requirements[name]
        same = requirement.required_on_test == facts["required"]  # with which it always stays
        return same or requirement.met_by(float(facts["accuracy"]["val"]))

    kept = {adapter: tuple(filter(stays, held)) for adapter, held in result["packing"].items()}
    kept = {adapter: held for adapter, held in kept.items() if held}
    unpacked = tuple(filter(stays, result.get("head_only", ())))
    unchanged = {*unpacked, *(name for names in kept.values() for name in names)}
    flagged = {
        name: accuracy
        for name, accuracy in result["unreachable"].items()
        if name in unchanged and not requirements[name].met_by(accuracy)
    }
    return Parent(folder, read_bundle(bundle).version, kept, unpacked, flagged, result)


def training_inputs(settings: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, Any]:
    """What the training of each domain depends on; its requirement does not matter."""
    found = {}
    for facts in settings["domains"]:
        name = facts["name"]
        data = [k for k in inputs if k.startswith(f"{name}/") and k != f"{name}/teacher"]
        others = {key: facts[key] for key in facts if key not in ("required", CONTRACT)}
        found[name] = (others, {key: inputs[key] for key in data})
    return found
