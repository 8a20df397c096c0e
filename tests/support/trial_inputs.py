"""Inputs of trials on disk: a random LLaVA that finds coloured squares."""

from pathlib import Path

from tests.support.helpers import coloured_squares
from valora_data import shards
from valora_data.schema import Task
from valora_train.fusion.requirement import Requirement
from valora_train.settings import (
    DomainSettings,
    LoraSettings,
    ModelSettings,
    Settings,
    SourceSettings,
    TaskSettings,
    TrainSettings,
)
from valora_train.trials.inputs import INPUTS, DomainFacts, TrialInputs

COLOURS = {"sky": "blue", "apple": "red", "leaf": "green"}


def trial_inputs(folder: Path, base: Path, **train) -> Path:
    """Write three domains and the file of their inputs; returns the file."""
    lora = LoraSettings(rank=4, alpha=8)
    settings = Settings(
        task=TaskSettings(name="colours", type=Task.DETECTION),
        domains={
            name: DomainSettings(
                name=name,
                task=Task.DETECTION,
                labels=[name],
                prompt=f"detect {name}",
                source=SourceSettings(kind="shards", path=str(folder)),
            )
            for name in COLOURS
        },
        model=ModelSettings(id=str(base)),
        train=TrainSettings(
            **{"steps": 4, "steps_per_held": 2, "batch_size": 4, "probe_steps": 3, **train},
            lora=lora,
        ),
    )
    domains = {}
    for place, (name, colour) in enumerate(COLOURS.items()):
        samples = {}
        for part, count in {"taught": 8, "val": 6, "test": 5}.items():
            made = coloured_squares(count, 10 * place + len(part), name, colour)
            path = folder / name / part
            if not path.exists():
                shards.write(made, [name], path)
            samples[part] = f"{name}/{part}"
        facts = {"name": name, **{part: f"{name}{part}".ljust(16, "0") for part in samples}}
        requirement = Requirement(0.1 + 0.1 * place, 0.02)
        domains[name] = DomainFacts(facts, requirement, {}, samples)
    training = {"steps": settings.train.steps}
    return TrialInputs(settings, training, domains, folder).write(folder / INPUTS)
