"""Ray Serve's routing by our routers: Ray's own class, over replicas that only have a name."""

import asyncio
from types import SimpleNamespace

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.config import RequestRouterConfig

from valora_serve.replicas.request_router import RESIDENT
from valora_serve.replicas.wire import Call

DEPLOYMENT = DeploymentID("EngineReplica", "valora")


class Named:
    """A running replica, as far as a router asks."""

    def __init__(self, name, resident=()):
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.routing_stats = {RESIDENT: list(resident)}
        self.node_id, self.availability_zone = "n", None
        self.max_ongoing_requests = 100

    async def get_queue_len(self, *, deadline_s):
        return 0


def router(name="affinity", **settings):
    """The router that Ray Serve makes from the configuration."""
    config = RequestRouterConfig(
        request_router_class="valora_serve.replicas.request_router:AdapterRequestRouter"
    )
    made = config.get_request_router_class()(
        DEPLOYMENT, DeploymentHandleSource.UNKNOWN, use_replica_queue_len_cache=True
    )
    made.initialize_state(router=name, settings=settings, slots=2)
    return made


def pending(adapter):
    call = Call(request=None, adapter=adapter, revision=None)
    return SimpleNamespace(args=[call], kwargs={})


def run(case):
    return asyncio.run(case())


async def first(made, replicas, adapter):
    ranks = await made.choose_replicas(replicas, pending(adapter))
    assert [len(rank) for rank in ranks] == [1] * len(replicas)
    return ranks[0][0]


def test_requests_of_an_adapter_keep_together_until_the_load_bound():
    async def case():
        made = router(slack=4, bound=1.25)
        replicas = [Named(name) for name in ("r1", "r2", "r3")]
        made.update_replicas(replicas)
        home = await first(made, replicas, "cats")
        for _ in range(4):
            assert await first(made, replicas, "cats") is home
            made.on_send_request(home.replica_id)
        other = await first(made, replicas, "cats")
        assert other is not home  # it has 4 requests, and the others none
        for _ in range(4):
            made.on_request_completed(home.replica_id, "x")
        assert await first(made, replicas, "cats") is home
        made.on_request_completed(home.replica_id, "one too many")
        made.on_send_request(home.replica_id)
        assert made._sent[home.replica_id] == 1

    run(case)


def test_resident_adapters_come_first():
    async def case():
        made = router()
        replicas = [Named("r1"), Named("r2", resident=["dogs"]), Named("r3", resident=["cats"])]
        made.update_replicas(replicas)
        assert await first(made, replicas, "dogs") is replicas[1]
        assert await first(made, replicas, "cats") is replicas[2]
        # What is asked of all replicas has no adapter.
        for arguments in (["facts"], []):
            ranks = await made.choose_replicas(replicas, SimpleNamespace(args=arguments))
            assert len(ranks) == 3
        assert not made._recent[replicas[0].replica_id].names

    run(case)
