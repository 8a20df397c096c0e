"""A router of another package; `test_cluster` asks for an unknown one."""

from valora_serve.routing import ROUTERS, ReplicaState

ALPHABETICAL = """
from valora_serve.routing import Router
class extension(Router):
    def order(self, adapter, replicas):
        return replicas  # sorted by id
"""


def test_a_router_of_another_package(installed):
    installed("valora.routers", "alphabetical", ALPHABETICAL)
    assert "alphabetical" in ROUTERS
    fleet = [ReplicaState("c", 0), ReplicaState("b", 3)]
    assert ROUTERS["alphabetical"]().rank("x", fleet) == ["b", "c"]
