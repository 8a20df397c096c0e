"""Extends an earlier fusion: unchanged domains keep their adapters, heads and figures.

New domains, and domains that changed, are packed anew beside them. A domain that was removed or
changed leaves its adapter; the other domains of that adapter are not affected, because the
adapter's weights stay as they are and every domain has a head of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.contract.bundle import read_bundle
from valora_train.errors import SettingsError
from valora_train.fusion.requirement import CONTRACT
from valora_train.fusion.state import FUSION, STATE, of_domains, read_snapshot
from valora_train.settings import LoraSettings
from valora_train.stage import RECORD, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from valora_train.fusion.requirement import Requirement
    from valora_train.stage import Stage

MUST_MATCH = ("model", "heads")
"""Groups of settings that must equal those of the earlier fusion, besides the LoRA settings."""


@dataclass(frozen=True)
class Parent:
    """An earlier fusion that is extended.

    Attributes:
        folder: Output folder of its stage.
        version: Version of its bundle.
        kept: Adapters with their unchanged domains, oldest first.
        unpacked: The unchanged domains that take no adapter.
        flagged: Accuracy on validation of the unchanged domains that miss their requirement.
        result: Content of its `fusion.json`.
    """

    folder: Path
    version: int
    kept: dict[str, tuple[str, ...]]
    unpacked: tuple[str, ...]
    flagged: dict[str, float]
    result: dict[str, Any]

    @property
    def used(self) -> int:
        """Number of adapters that were ever named."""
        return int(self.result["used"])

    @property
    def alone(self) -> dict[str, float]:
        """What the flagged domains reached in an adapter of their own."""
        # Before domains could share the adapter of a flagged one, it kept what it reached alone.
        alone = self.result.get("alone", {})
        return {name: alone.get(name, accuracy) for name, accuracy in self.flagged.items()}

    @property
    def domains(self) -> tuple[str, ...]:
        """The unchanged domains."""
        packed = (name for names in self.kept.values() for name in names)
        return (*packed, *self.unpacked)

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
    """The output folder of the fusion that a bundle was exported from.

    Args:
        bundle: Folder of the bundle.
        work: Folder of all stages.

    Raises:
        BundleError: If the folder holds no bundle.
        SettingsError: If the fusion's output is no longer there.
    """
    name = read_bundle(bundle).manifest["lineage"]["fusion_stage"]
    if not (work / name / FUSION).is_file():
        raise SettingsError(
            f"the fusion that {bundle} was exported from is no longer in {work} ({name}): set "
            "fusion.parent=null to fuse all domains"
        )
    return work / str(name)


def load_parent(
    folder: Path,
    version: int,
    stage: Stage,
    requirements: Mapping[str, Requirement],
) -> Parent:
    """Find the domains of an earlier fusion that a new fusion can keep.

    Args:
        folder: Output folder of the earlier fusion.
        version: Version of its bundle.
        stage: The new stage.
        requirements: What each domain of the new fusion must reach.

    Raises:
        SettingsError: If the earlier fusion used another model or other LoRA or head settings.
    """
    record = read_json(folder / RECORD)
    result = read_json(folder / FUSION)
    for name, theirs, ours in (
        *((key, record["settings"][key], stage.settings[key]) for key in MUST_MATCH),
        (
            "train.lora",
            dataclasses.asdict(LoraSettings()) | record["settings"]["train"]["lora"],
            stage.settings["train"]["lora"],
        ),
    ):
        if theirs != ours:
            raise SettingsError(
                f"the bundle of fusion.parent was made with other settings of {name}: use the same "
                "ones, or set fusion.parent=null to fuse all domains"
            )
    then = training_inputs(record["settings"], record["inputs"])
    now = training_inputs(stage.settings, stage.inputs)
    facts = result["domains"]

    def stays(name: str) -> bool:
        return name in now and now[name] == then[name] and _meets(facts[name], requirements[name])

    kept = {}
    for adapter, names in result["packing"].items():
        if staying := tuple(filter(stays, names)):
            kept[adapter] = staying
    unpacked = tuple(filter(stays, result.get("head_only", ())))
    unchanged = {*unpacked, *(name for names in kept.values() for name in names)}
    flagged = {
        name: accuracy
        for name, accuracy in result["unreachable"].items()
        if name in unchanged and not requirements[name].met_by(accuracy)
    }
    return Parent(folder, version, kept, unpacked, flagged, result)


def training_inputs(settings: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, Any]:
    """What the training of each domain depends on; its requirement does not matter."""
    return {
        facts["name"]: (
            {key: value for key, value in facts.items() if key not in ("required", CONTRACT)},
            {
                key: value
                for key, value in inputs.items()
                if key.startswith(f"{facts['name']}/") and not key.endswith("/teacher")
            },
        )
        for facts in settings["domains"]
    }


def _meets(facts: Mapping[str, Any], requirement: Requirement) -> bool:
    """Whether a domain would be committed as it is; with the same requirement it always is."""
    same: bool = requirement.promise == facts["required"]
    return same or requirement.met_by(float(facts["accuracy"]["val"]))
