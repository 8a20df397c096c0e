"""What a training depends on, as JSON values: stages and trials are named by hashes of it.

Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.contract.base_model import base_hash, processor_hash
from valora_train.settings import as_dict
from valora_train.stage import digest

if TYPE_CHECKING:
    from valora_train.settings import DomainSettings, Settings

TRIAL_THREADS = 1
"""CPU threads of a trial: its result depends on them, and must not depend on how many run."""
ELSEWHERE = (
    "device", "precision", "shard", "batch_size", "keep_features", "gradient_checkpointing"
)  # fmt: skip
"""Settings of the model that say how it is computed, not what: results of a GPU hold here, too."""


def training_facts(settings: Settings) -> dict[str, Any]:
    """The settings that the training of an adapter depends on, as JSON values."""
    facts = {"model": settings.model, "heads": settings.heads, "train": settings.train}
    values: dict[str, Any] = {key: as_dict(value) for key, value in facts.items()}
    # Stages of runs that leave these settings alone keep their hashes.
    if settings.model.quantize is None:
        del values["model"]["quantize"]
    if settings.model.precision == "float32":
        del values["model"]["precision"]
    if not settings.heads.options:
        del values["heads"]["options"]
    elif start := settings.heads.options.get("context", {}).get("start"):
        values["heads"]["options"]["context"]["start"] = digest(Path(start))
    if settings.heads.objectness == "presence":
        del values["heads"]["objectness"]
    if not settings.train.augment.views:
        del values["train"]["augment"]
    if settings.train.steps_per_new is None:
        del values["train"]["steps_per_new"]
    if settings.train.best_of == 1:
        del values["train"]["best_of"], values["train"]["patience"]
    for key in ("checkpoint_seconds", "validations", "validation_samples", "validation_share"):
        del values["train"][key]  # nothing that is trained depends on it
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


def trial_facts(settings: Settings) -> dict[str, Any]:
    """Everything but the domains that the result of a trial depends on, as JSON values.

    Args:
        settings: All settings.
    """
    facts = training_facts(settings)
    for key in ELSEWHERE:
        facts["model"].pop(key, None)
    facts["train"]["threads"] = TRIAL_THREADS
    if not settings.train.augment.views:  # augmented views depend on it; trials have their own
        del facts["train"]["seed"]
    facts["base"] = base_hash(settings.model.id)
    facts["processor"] = processor_hash(settings.model.id)
    return facts
