"""What a training depends on, as JSON values: stages are named by hashes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_train.settings import as_dict
from valora_train.stage import digest

if TYPE_CHECKING:
    from valora_train.settings import DomainSettings, Settings

# Settings that came later: runs that leave them alone keep the hashes of their stages.
LATER: dict[tuple[str, str], Any] = {
    ("model", "quantize"): None, ("model", "precision"): "float32", ("heads", "options"): {},
    ("heads", "objectness"): "presence", ("train", "steps_per_new"): None,
}  # fmt: skip
# Nothing that is trained depends on these.
SHOWN = ("checkpoint_seconds", "validations", "validation_samples", "validation_share")


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
        "name": domain.name,
        "task": str(domain.task),
        "prompt": domain.prompt,
        "labels": domain.labels,
        "mirror": domain.mirrors,
        "video": domain.video,
    }
