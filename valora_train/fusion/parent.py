"""Going on from an earlier fusion: what did not change stays, with its names, weights and figures.

A domain that is new or changed is added to what is there; one that is gone, or changed, leaves its
adapter, whose other domains are not touched by that: heads are their own, and the adapter stays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.contract.bundle import read_bundle
from valora_train.errors import SettingsError
from valora_train.stage import RECORD, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from valora_train.stage import Stage

FUSION = "fusion.json"
STATE = "state.json"
SNAPSHOTS = "snapshots"
SAME = ("model", "heads")
"""Groups of settings that must be those of the earlier fusion, beside the shape of adapters."""


@dataclass(frozen=True)
class Parent:
    """An earlier fusion.

    Attributes:
        folder: Output of its stage.
        version: Version of its bundle.
        kept: Adapters with those of their domains that stay, oldest first.
        result: What it decided, reached and promised.
    """

    folder: Path
    version: int
    kept: dict[str, tuple[str, ...]]
    result: dict[str, Any]

    @property
    def used(self) -> int:
        """Adapters that were ever named."""
        return int(self.result["used"])

    @property
    def closed(self) -> list[str]:
        """Adapters that nothing may join."""
        return [name for name in self.result["closed"] if name in self.kept]

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains that stay."""
        return tuple(name for names in self.kept.values() for name in names)

    @property
    def head_only(self) -> dict[str, Any]:
        """What the domains that stay reach without LoRA."""
        known = read_json(self.folder / STATE)["head_only"]
        return {name: known[name] for name in self.domains}

    def snapshot(self, adapter: str) -> dict[str, Tensor]:
        """An adapter with the heads of its domains that stay."""
        from safetensors.torch import load_file

        file = read_json(self.folder / STATE)["snapshots"][adapter]
        names = "|".join(map(re.escape, self.kept[adapter])) or "$"
        state = load_file(self.folder / SNAPSHOTS / file)
        mine = re.compile(rf"(lora|random)/|head/({names})/|optimizer/[^/]+/(({names})/|[^/]+$)")
        return {key: value for key, value in state.items() if mine.match(key)}


def find_parent(bundle: Path, work: Path) -> Path:
    """The output of the stage that a bundle was exported from.

    Raises:
        BundleError: If it is no bundle.
        SettingsError: If that output is gone.
    """
    name = read_bundle(bundle).manifest["lineage"]["fusion_stage"]
    if not (work / name / FUSION).is_file():
        raise SettingsError(
            f"the fusion that {bundle} came from is not in {work} any more ({name}): set "
            "fusion.parent=null to fuse anew"
        )
    return work / str(name)


def load_parent(
    folder: Path,
    version: int,
    stage: Stage,
    required: Mapping[str, float],
    margin: float,
) -> Parent:
    """See what of an earlier fusion stays in a new one.

    Args:
        folder: Output of the earlier stage.
        version: Version of its bundle.
        stage: The new stage.
        required: Accuracy that each domain of the new one must keep.
        margin: Added to it when deciding.

    Raises:
        SettingsError: If it was made for another model or shape of adapters.
    """
    record = read_json(folder / RECORD)
    result = read_json(folder / FUSION)
    for name, theirs, ours in (
        *((key, record["settings"][key], stage.settings[key]) for key in SAME),
        ("train.lora", record["settings"]["train"]["lora"], stage.settings["train"]["lora"]),
    ):
        if theirs != ours:
            raise SettingsError(
                f"the bundle to go on from was made with other settings of {name}: use the same, "
                "or set fusion.parent=null to fuse anew"
            )
    then, now = (_facts(each["settings"], each["inputs"]) for each in (
        record, {"settings": stage.settings, "inputs": stage.inputs}))  # fmt: skip
    kept = {}
    for adapter, names in result["packing"].items():
        staying = tuple(
            name
            for name in names
            if name in now
            and now[name] == then[name]
            and _meets(result["domains"][name], required[name], margin)
        )
        if staying:
            kept[adapter] = staying
    return Parent(folder, version, kept, result)


def _facts(settings: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, Any]:
    """What a domain's training depends on, by domain; how much is required does not matter."""
    return {
        facts["name"]: (
            {key: value for key, value in facts.items() if key != "required"},
            inputs[f"{facts['name']}/data"],
            inputs[f"{facts['name']}/distilled"],
        )
        for facts in settings["domains"]
    }


def _meets(facts: Mapping[str, Any], required: float, margin: float) -> bool:
    """Whether a domain as it is would be kept; one that was flagged stays flagged."""
    accuracy = float(facts["accuracy"]["val"])
    return accuracy >= required + margin or required == facts["required"]
