"""The policies by name; other packages add theirs with an entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_data.registry import Registry
from valora_serve.errors import SettingsError
from valora_serve.orchestrator.decision import PolicySettings

if TYPE_CHECKING:
    from valora_serve.orchestrator.base import BasePolicy
    from valora_serve.orchestrator.cost_model import CostModel

_AT = {
    "cost": "cost:CostPolicy",
    "valora": "valora:ValoraPolicy",
    "algorithm1": "algorithm1:Algorithm1Policy",
    "algorithm1_published": "algorithm1:Algorithm1PublishedPolicy",
    "merge_only": "baselines:MergeOnlyPolicy",
    "unmerge_only": "baselines:UnmergeOnlyPolicy",
    "dlora": "dlora:DLoraPolicy",
    "slora": "baselines:SLoraPolicy",
}
POLICIES: Registry[type[BasePolicy]] = Registry(
    "valora.policies",
    "policy",
    {name: f"valora_serve.orchestrator.policies.{at}" for name, at in _AT.items()},
    SettingsError,
)


def make_policy(
    name: str, cost_model: CostModel, settings: PolicySettings | None = None
) -> BasePolicy:
    """Create a policy by name, with the default settings if None; SettingsError if unknown."""
    return POLICIES[name](cost_model, settings or PolicySettings())
