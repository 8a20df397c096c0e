"""Routers by name: the built-in ones, one of another package, and an unknown name."""

import pytest

from valora_serve.errors import SettingsError
from valora_serve.routing.base import ReplicaState, RouterSettings
from valora_serve.routing.registry import ROUTERS, make_router

ALPHABETICAL = '''
"""Sends every request to the first replica by name."""

from valora_serve.routing.base import Router


class Alphabetical(Router):
    def order(self, adapter, replicas):
        return replicas  # sorted by id


extension = Alphabetical
'''


def test_unknown_router_lists_the_known():
    with pytest.raises(SettingsError, match=r"unknown router 'near': choose one of affinity, lea"):
        make_router("near")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"bound": 1}, "load bound of the router is 1: choose a number above 1"),
        ({"excess": 0}, "excess load of the router is 0: choose a number above 0"),
        ({"slack": -1}, "slack of the router is -1: choose a number of at least 0"),
        ({"choices": 0}, "number of choices of the router is 0: choose a number of at least 1"),
    ],
)
def test_settings_out_of_range(wrong, sentence):
    with pytest.raises(SettingsError, match=sentence):
        RouterSettings(**wrong)


def test_a_router_of_another_package(installed):
    installed("valora.routers", "alphabetical", ALPHABETICAL)
    assert "alphabetical" in ROUTERS
    fleet = [ReplicaState("c", 0), ReplicaState("b", 3)]
    assert make_router("alphabetical").rank("x", fleet) == ["b", "c"]
