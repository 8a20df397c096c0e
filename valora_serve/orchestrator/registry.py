"""The policies by name; other packages add theirs with an entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from valora_data.registry import Registry
from valora_serve.errors import SettingsError
from valora_serve.orchestrator.decision import PolicySettings

if TYPE_CHECKING:
    from valora_serve.orchestrator.cost_model import CostModel
    from valora_serve.orchestrator.decision import Policy
    from valora_serve.types import Mode


class PolicyClass(Protocol):
    """What is registered under a name: a class of policies.

    Attributes:
        modes: Inference modes that the decisions of its policies can have.
        shares: Whether its policies keep shares (`PolicySettings.fair`); True if there is none.
    """

    modes: frozenset[Mode]

    def __call__(self, cost_model: CostModel, settings: PolicySettings) -> Policy:
        """Create a policy."""


_NAMES = {
    "cost": "CostPolicy",
    "valora": "ValoraPolicy",
    "algorithm1": "Algorithm1Policy",
    "algorithm1_published": "Algorithm1PublishedPolicy",
    "merge_only": "MergeOnlyPolicy",
    "unmerge_only": "UnmergeOnlyPolicy",
    "dlora": "DLoraPolicy",
    "slora": "SLoraPolicy",
}
POLICIES: Registry[PolicyClass] = Registry(
    "valora.policies",
    "policy",
    {name: f"valora_serve.orchestrator.policies.{name}:{cls}" for name, cls in _NAMES.items()},
    SettingsError,
)


def make_policy(name: str, cost_model: CostModel, settings: PolicySettings | None = None) -> Policy:
    """Create a policy by name.

    Args:
        name: One of `POLICIES`.
        cost_model: Predicts the seconds of steps, switches and loads on this machine.
        settings: Settings of the policy; the defaults if None.

    Raises:
        SettingsError: No policy has this name.
    """
    return POLICIES[name](cost_model, settings or PolicySettings())


def modes_of(name: str) -> frozenset[Mode]:
    """Inference modes that the decisions of a policy can have.

    Args:
        name: One of `POLICIES`.

    Raises:
        SettingsError: No policy has this name.
    """
    return POLICIES[name].modes


def keeps_shares(name: str) -> bool:
    """Return whether a policy keeps shares.

    Args:
        name: One of `POLICIES`.

    Raises:
        SettingsError: No policy has this name.
    """
    return bool(getattr(POLICIES[name], "shares", True))
