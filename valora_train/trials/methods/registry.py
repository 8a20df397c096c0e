"""The methods by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.registry import Registry
from valora_train.errors import SettingsError

if TYPE_CHECKING:
    from valora_train.trials.methods.base import Method

METHODS: Registry[type[Method]] = Registry(
    "valora.methods",
    "method",
    {
        "joint": "valora_train.trials.methods.joint:Joint",
        "head_only": "valora_train.trials.methods.joint:HeadOnly",
        "fusion": "valora_train.trials.methods.fusion:Fusion",
        "merge": "valora_train.trials.methods.merge:Merge",
        "ewc": "valora_train.trials.methods.ewc:ElasticWeights",
    },
    SettingsError,
)
