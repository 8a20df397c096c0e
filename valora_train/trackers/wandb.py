"""Weights & Biases beside MLflow; WANDB_MODE, WANDB_DIR, WANDB_ENTITY and the like are W&B's own.

An experiment becomes a project, a fusion a group of runs, which have MLflow's ids.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from valora_train.errors import SettingsError
from valora_train.trackers.base import RunFacts, SecondTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.Image import Image

STEP = "step"
"""W&B drops what is logged at a step before the last one; a metric of its own is the axis."""


class WandbTracker(SecondTracker):
    """Logs into W&B's local files (``WANDB_MODE=offline``) or its server."""

    def __init__(self) -> None:
        self._runs: dict[str, Any] = {}

    def check(self) -> None:
        """Check that the library is there, and an API key where one is needed.

        Raises:
            SettingsError: If one is missing.
        """
        if importlib.util.find_spec("wandb") is None:
            raise SettingsError(
                "tracking.also=[wandb] needs Weights & Biases: run pip install 'valora[wandb]', or "
                "leave it out"
            )
        import wandb

        settings = wandb.setup().settings
        if settings.mode in ("online", "shared") and not _has_key(settings.base_url):
            raise SettingsError(
                "tracking.also=[wandb] has no API key of Weights & Biases: run `wandb login`, or "
                "set WANDB_MODE=offline, which writes to wandb/ for `wandb sync`"
            )

    def begin(self, run: RunFacts) -> None:
        """Begin a run, or continue the one of the same id."""
        import wandb

        made = wandb.init(
            project=run.experiment.replace("/", "-"),
            id=run.id,
            name=run.name,
            notes=run.note or None,
            group=run.parent or run.id,
            config=dict(run.tags),
            reinit="create_new",  # attempts are open beside their fusion
            resume="allow",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True,
                save_code=False, x_disable_stats=True, x_save_requirements=False,
            ),
        )  # fmt: skip
        made.define_metric(STEP, hidden=True)
        made.define_metric("*", step_metric=STEP)
        self._runs[run.id] = made

    def log_params(self, run_id: str, values: Mapping[str, str]) -> None:
        """Log settings into the run's configuration."""
        self._runs[run_id].config.update(dict(values), allow_val_change=True)

    def log_metrics(self, run_id: str, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of one step."""
        self._runs[run_id].log({**values, STEP: step})

    def log_picture(self, run_id: str, image: Image, file: str) -> None:
        """Log a picture under its path."""
        import wandb

        self._runs[run_id].log({file: wandb.Image(image)})

    def log_table(
        self, run_id: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], file: str
    ) -> None:
        """Log a table; its cells become text, because W&B's columns have one type each."""
        import wandb

        cells = [[str(cell) for cell in row] for row in rows]
        self._runs[run_id].log({file: wandb.Table(columns=list(columns), data=cells)})

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        """Set a value of the run's configuration; W&B's tags are words without values."""
        self._runs[run_id].config.update({name: value}, allow_val_change=True)

    def describe(self, run_id: str, name: str | None, note: str | None) -> None:
        """Change name or notes."""
        if name is not None:
            self._runs[run_id].name = name
        if note is not None:
            self._runs[run_id].notes = note

    def end(self, run_id: str, status: str) -> None:
        """End a run; anything but FINISHED counts as failed."""
        self._runs.pop(run_id).finish(exit_code=0 if status == "FINISHED" else 1)


def _has_key(server: str) -> bool:
    """Whether `wandb.init` finds a key, without asking for one in the terminal."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        known = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return known.authenticators(urlsplit(server).hostname or "") is not None
