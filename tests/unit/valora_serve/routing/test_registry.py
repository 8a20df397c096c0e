"""Routers by name: the built-in ones, one of another package, and an unknown name."""

import pytest

from valora_serve.errors import SettingsError
from valora_serve.routing.base import ReplicaState
from valora_serve.routing.routers import ROUTERS, make_router

ALPHABETICAL = """
from valora_serve.routing.base import Router


class Alphabetical(Router):
    def order(self, adapter, replicas):
        return replicas  # sorted by id


extension = Alphabetical
"""


def test_unknown_router_lists_the_known():
    with pytest.raises(SettingsError, match=r"unknown router 'near': choose one of affinity, lea"):
        make_router("near")


def test_a_router_of_another_package(installed):
    installed("valora.routers", "alphabetical", ALPHABETICAL)
    assert "alphabetical" in ROUTERS
    fleet = [ReplicaState("c", 0), ReplicaState("b", 3)]
    assert make_router("alphabetical").rank("x", fleet) == ["b", "c"]
