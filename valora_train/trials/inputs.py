"""What trials need, as a file: settings, domains, and where their samples lie.

The file is all that a worker process reads, so trials also run on machines that have no Hydra, no
MLflow and no library of data sets (`pack_inputs` makes a folder for those).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from pydantic import ValidationError

from valora_data import packed, shards
from valora_train.configuration import validator
from valora_train.errors import SettingsError
from valora_train.fusion.requirement import Requirement
from valora_train.processes import worker_processes
from valora_train.settings import Settings, as_dict
from valora_train.stage import intact, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from valora_data.schema import Sample
    from valora_train.settings import DomainSettings
    from valora_train.trials.store import Trial

VERSION = 2
"""Raised whenever trials come out differently for the same inputs."""
INPUTS = "inputs.json"
SAMPLES = "samples"
DRAWING = "drawing.lock"


@dataclass(frozen=True)
class DomainFacts:
    """A domain as trials read it.

    Attributes:
        facts: Everything about the domain that its training depends on, content hashes of its
            samples included, as JSON values.
        requirement: What it must reach.
        teacher: Accuracy of its teacher by split; empty where there is none.
        samples: Folder of a shard, or packed shard, by name: `taught`, `val`, `test`.
    """

    facts: Mapping[str, Any]
    requirement: Requirement
    teacher: Mapping[str, float]
    samples: Mapping[str, str]


@dataclass(frozen=True)
class TrialInputs:
    """What trials need.

    Attributes:
        settings: All settings, with the chosen domains only.
        training: Everything but the domains that training depends on, as JSON values.
        domains: The domains by name, in order.
        folder: Folder that paths of samples are relative to.
    """

    settings: Settings
    training: Mapping[str, Any]
    domains: Mapping[str, DomainFacts]
    folder: Path

    def domain(self, name: str) -> DomainSettings:
        """Settings of a domain, by its name."""
        return next(one for one in self.settings.chosen() if one.name == name)

    def read(self, domain: str, part: str) -> list[Sample]:
        """The samples of a domain.

        Args:
            domain: Name of the domain.
            part: `taught`, `val` or `test`.
        """
        path = self.folder / self.domains[domain].samples[part]
        if path.suffix == packed.SUFFIX:
            return packed.read(path)
        return shards.read(intact(path))

    def key(self, trial: Trial) -> str:
        """Content hash of everything that the result of a trial depends on: 16 hex digits."""
        domains = [self.domains[name].facts for name in trial.domains]
        facts = [
            VERSION, self.training, domains, trial.method, dict(trial.options), trial.seed
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def identity(self) -> dict[str, Any]:
        """What the results of these inputs are results of: settings of training, and all data."""
        return {
            "version": VERSION,
            "training": dict(self.training),
            "domains": {name: dict(item.facts) for name, item in self.domains.items()},
        }

    def write(self, file: Path) -> Path:
        """Write these inputs.

        Args:
            file: The file; its folder is what relative paths of samples are relative to.

        Returns:
            The file.
        """
        content = {
            "version": VERSION,
            "settings": as_dict(self.settings),
            "training": dict(self.training),
            "domains": {
                name: {
                    "facts": dict(item.facts),
                    "requirement": _finite(asdict(item.requirement)),
                    "teacher": dict(item.teacher),
                    "samples": {part: str(path) for part, path in item.samples.items()},
                }
                for name, item in self.domains.items()
            },
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, content)
        return file


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what JSON has no number for, which are defaults."""
    return {key: value for key, value in values.items() if value != -math.inf}


def read_inputs(file: Path) -> TrialInputs:
    """Read the file of inputs.

    Args:
        file: The file, or the folder that holds it.

    Raises:
        SettingsError: If it is missing, damaged or of another version.
    """
    file = file / INPUTS if file.is_dir() else file
    try:
        content = read_json(file)
        if content["version"] != VERSION:
            raise SettingsError(
                f"{file} is of version {content['version']}, and this is a program for version "
                f"{VERSION}: write it again"
            )
        settings = validator().validate_python(content["settings"], extra="forbid")
        domains = {
            name: DomainFacts(
                item["facts"],
                Requirement(**item["requirement"]),
                item["teacher"],
                item["samples"],
            )
            for name, item in content["domains"].items()
        }
        return TrialInputs(settings, content["training"], domains, file.parent)
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise SettingsError(
            f"{file} is no readable file of inputs ({lines[0]}): write it again"
        ) from error


def pack_inputs(inputs: TrialInputs, folder: Path) -> Path:
    """Copy inputs with all samples into a folder that works on any machine.

    Images of built-in domains are left out: `complete_inputs` draws them there.

    Args:
        inputs: The inputs.
        folder: The folder; what is in it of an earlier call is kept if it is the same.

    Returns:
        The file of the inputs in the folder.
    """
    domains = {}
    for name, item in inputs.domains.items():
        samples = {}
        domain = inputs.domain(name)
        drawn = domain.data() if domain.source.format.drawn else None
        for part, path in item.samples.items():
            place = f"{SAMPLES}/{name}-{part}-{item.facts[part][:12]}{packed.SUFFIX}"
            source = inputs.folder / path
            if not (folder / place).exists():
                if source.suffix == packed.SUFFIX:
                    (folder / SAMPLES).mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, folder / place)
                else:
                    packed.pack(shards.open_shard(intact(source)), folder / place, drawn)
            samples[part] = place
        domains[name] = replace(item, samples=samples)
    return replace(inputs, domains=domains, folder=folder).write(folder / INPUTS)


def complete_inputs(inputs: TrialInputs, processes: int) -> int:
    """Draw the images that packed inputs leave out.

    Args:
        inputs: The inputs.
        processes: Processes that draw side by side.

    Returns:
        Number of files that had none.

    Raises:
        DataError: If a file is damaged, or this machine draws other pixels.
    """
    found = {
        inputs.folder / path for item in inputs.domains.values() for path in item.samples.values()
    }
    packs = sorted(file for file in found if file.suffix == packed.SUFFIX)
    if not any(map(packed.is_drawn, packs)):
        return 0
    with FileLock(inputs.folder / DRAWING):  # another command, for another GPU, may draw them
        files = [file for file in packs if packed.is_drawn(file)]
        if not files:
            return 0
        with worker_processes(min(processes, len(files)), "--processes", _nothing) as executor:
            return sum(executor.map(packed.complete, files))


def _nothing() -> None:
    """Begin a process that draws."""
