"""The trackers beside MLflow by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.registry import Registry
from valora_train.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from valora_train.trackers.base import SecondTracker

TRACKERS: Registry[Callable[[], SecondTracker]] = Registry(
    "valora.trackers",
    "tracker",
    {"wandb": "valora_train.trackers.wandb:WandbTracker"},
    SettingsError,
)
