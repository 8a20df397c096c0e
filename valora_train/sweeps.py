"""Sweeps: `valora-train -m …` tries all combinations, with `hydra/sweeper=optuna` it searches.

Hydra's own plug-in for Optuna needs a version of it that this environment's libraries have left
behind, so that the sweeper is written here, on Optuna's ask-and-tell interface.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, RangeSweep, Transformer
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from valora_train.errors import SettingsError
from valora_train.launchers import ray_launcher, submitit_launcher
from valora_train.launchers.base import AllJobs
from valora_train.launchers.ray_launcher import RayLauncher, RaySettings
from valora_train.launchers.submitit_launcher import SubmititLauncher, SubmititSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hydra.core.override_parser.types import Override
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

GRID = "hydra_plugins.valora.GridSweeper"
TARGET = "hydra_plugins.valora.OptunaSweeper"
"""Name of the sweeper in Hydra's configuration; it takes plug-ins from that package only."""
SWEEP = "_VALORA_SWEEP"
"""Environment variable that names the sweep; the processes of a launcher inherit it. (Names that
begin with VALORA_ are options of valora-serve.)"""
FIGURES = ("worst_margin", "accuracy", "adapters", "attempts", "met", "minutes")
"""What a job returns, see `valora_train.reporting.sweep.figures_of`."""


@dataclass
class OptunaSettings:
    """Settings of `hydra/sweeper=optuna`.

    Attributes:
        trials: Number of jobs.
        side_by_side: Jobs that a launcher such as joblib runs at once.
        objective: Figure of a job that is optimised, one of `FIGURES`.
        direction: `maximize` or `minimize`.
        seed: Seed of the search; null for another one each time.
        storage: Optuna's storage, such as ``sqlite:///optuna.db``, where a search goes on later;
            null for none.
        study: Name of the search in the storage.
    """

    _target_: str = TARGET
    trials: int = 20
    side_by_side: int = 1
    objective: str = FIGURES[0]
    direction: str = "maximize"
    seed: int | None = 0
    storage: str | None = None
    study: str | None = None


class GridSweeper(Sweeper):
    """Tries all combinations; when all jobs have ended it tells which of them failed.

    Args:
        max_batch_size: Most jobs that are handed to the launcher at a time; null for all.
        params: Overrides of every sweep.
    """

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None) -> None:
        # Hydra runs the module once more when it looks for plug-ins: not before that.
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        self._basic = BasicSweeper(max_batch_size, params)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra hands over before a sweep."""
        self._basic.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        assert self._basic.launcher is not None
        self._basic.launcher = AllJobs(self._basic.launcher)

    def sweep(self, arguments: list[str]) -> Any:
        """Run the jobs.

        Args:
            arguments: The overrides of the command line.

        Raises:
            SweepError: Jobs failed.
        """
        return self._basic.sweep(arguments)


class OptunaSweeper(Sweeper):
    """Chooses the settings of each job by what the jobs before it returned.

    Args:
        trials: Number of jobs.
        side_by_side: Jobs at once.
        objective: Figure of a job that is optimised.
        direction: `maximize` or `minimize`.
        seed: Seed of the search.
        storage: Optuna's storage.
        study: Name of the search.
    """

    def __init__(
        self,
        trials: int,
        side_by_side: int,
        objective: str,
        direction: str,
        seed: int | None,
        storage: str | None,
        study: str | None,
    ) -> None:
        self._trials, self._side_by_side = trials, side_by_side
        self._objective, self._direction = objective, direction
        self._seed, self._storage, self._study = seed, storage, study

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra hands over before a sweep."""
        self.hydra_context, self.config = hydra_context, config
        self._launcher = AllJobs(
            Plugins.instance().instantiate_launcher(
                hydra_context=hydra_context, task_function=task_function, config=config
            )
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the jobs.

        Args:
            arguments: The overrides of the command line; those with several values are searched.

        Raises:
            SettingsError: If nothing is left to search, a setting of the sweeper is out of range,
                or Optuna is not installed.
        """
        _check("objective", self._objective, FIGURES)
        _check("direction", self._direction, ("maximize", "minimize"))
        for name, least in (("trials", self._trials), ("side_by_side", self._side_by_side)):
            if least < 1:
                raise SettingsError(f"hydra.sweeper.{name} must be at least 1, got {least}")
        optuna = _optuna()
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        fixed, searched = split_overrides(parser.parse_overrides(arguments))
        if not searched:
            raise SettingsError(
                "a sweep with Optuna needs a setting to search: write train.lr=interval(1e-3,1e-2) "
                "or train.lora.rank=4,8,16"
            )
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            study_name=self._study,
            storage=self._storage,
            sampler=optuna.samplers.TPESampler(seed=self._seed),
            direction=self._direction,
            load_if_exists=True,
        )
        number = 0
        while number < self._trials:
            asked = [
                study.ask(searched) for _ in range(min(self._side_by_side, self._trials - number))
            ]
            jobs = [
                [*fixed, *(f"{key}={value}" for key, value in trial.params.items())]
                for trial in asked
            ]
            returned = self._launcher.launch(jobs, initial_job_idx=number)
            for trial, job in zip(asked, returned, strict=True):
                value = (job.return_value or {}).get(self._objective)
                if value is None:
                    raise SettingsError(
                        f"a job with this command returns no {self._objective} to optimise: sweep "
                        "with command=fuse or command=export"
                    )
                study.tell(trial, value)
            number += len(asked)
        best = study.best_trial
        said = " ".join(f"{key}={value}" for key, value in best.params.items())
        print(f"best {self._objective} of {len(study.trials)} jobs: {best.value:.4g} with {said}")


def split_overrides(overrides: Sequence[Override]) -> tuple[list[str], dict[str, Any]]:
    """Divide overrides into those with one value, and distributions of those with several.

    Args:
        overrides: Parsed overrides.

    Returns:
        The first as they were written, and the others as Optuna's distributions by key.
    """
    fixed, searched = [], {}
    for override in overrides:
        key = override.get_key_element()
        if override.is_sweep_override():
            searched[key] = _distribution(override)
        else:
            fixed.append(f"{key}={override.get_value_element_as_str()}")
    return fixed, searched


def _distribution(override: Override) -> Any:
    distributions = _optuna().distributions
    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        ends: list[Any] = [value.start, value.end]
        whole = all(isinstance(end, int) for end in ends)
        kind = distributions.IntDistribution if whole else distributions.FloatDistribution
        return kind(*ends, log="log" in value.tags)
    if isinstance(value, RangeSweep) and not value.shuffle:
        # Hydra's ranges leave the end out.
        values: list[Any] = list(override.sweep_iterator(transformer=Transformer.identity))
        if len(values) > 1 and all(float(one).is_integer() for one in values):
            return distributions.IntDistribution(values[0], values[-1], step=values[1] - values[0])
    return distributions.CategoricalDistribution(list(override.sweep_string_iterator()))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SettingsError(
            "hydra/sweeper=optuna needs Optuna: pip install 'valora[sweep]'"
        ) from error
    return optuna


def _check(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise SettingsError(
            f"hydra.sweeper.{name}={value} is unknown: choose from {', '.join(known)}"
        )


def register(arguments: Sequence[str]) -> None:
    """Tell Hydra of sweepers and launchers, and name the sweep of this command.

    Args:
        arguments: The command line; the same one continues the same sweep.
    """
    os.environ[SWEEP] = hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:16]
    plugins, store = Plugins.instance(), ConfigStore.instance()
    for plugin, target in (
        (GridSweeper, GRID),
        (OptunaSweeper, TARGET),
        (RayLauncher, ray_launcher.TARGET),
        (SubmititLauncher, submitit_launcher.TARGET),
    ):
        plugins.register(plugin)
        plugins.class_name_to_class[target] = plugin
    store.store(group="hydra/sweeper", name="optuna", node=OptunaSettings, provider="valora")
    store.store(group="hydra/launcher", name="ray", node=RaySettings, provider="valora")
    store.store(
        group="hydra/launcher", name="submitit_local", node=SubmititSettings, provider="valora"
    )
