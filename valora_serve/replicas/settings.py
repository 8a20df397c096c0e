"""Settings of replicas."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from valora_serve.routing import ROUTERS, RouterSettings
from valora_serve.server.settings import Count, NotNegative, Seconds

Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Replicas: engines on several GPUs and machines, through Ray Serve.

    Attributes:
        replicas: Number of engines, each with a GPU of its own or, on machines without GPUs, with
            its share of the cores; none for one engine, without Ray.
        fronts: Number of processes that share the port and pass requests to the replicas; none for
            a quarter of this machine's cores, from 2 to 16.
        max_replicas: Most replicas, if more are started while requests queue up (autoscaling).
        router: ``affinity`` keeps the requests of an adapter together as long as the load allows
            it, ``least`` and ``random`` do not.
        router_settings: Settings of the router.
        ray_address: Ray cluster to join, as HOST:PORT, or ``auto`` for the one on this machine;
            none for RAY_ADDRESS or, without it, a Ray that is started on this machine.
        application: Name of the server in the Ray cluster, which no other server there has.
        replica_cpus: CPU cores that Ray reserves for each replica; none for 0 beside a GPU, and
            otherwise for an equal share of the cores.
        target_requests: Requests in progress for each replica at which autoscaling aims.
        scale_out_seconds: Time that the load must ask for more replicas before they are started.
        scale_in_seconds: Time that the load must ask for fewer replicas before some are drained.
        start_seconds: Time limit for the replicas to start.
    """

    replicas: Count | None = None
    fronts: Count | None = None
    max_replicas: Count | None = None
    router: str = "affinity"
    router_settings: RouterSettings = field(default_factory=RouterSettings)
    ray_address: str | None = None
    application: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] = "valora"
    replica_cpus: Positive | None = None
    target_requests: Positive = 64.0
    scale_out_seconds: NotNegative = 10.0
    scale_in_seconds: NotNegative = 300.0
    start_seconds: Seconds = 900.0

    def __post_init__(self) -> None:
        for name in ("fronts", "max_replicas"):
            if getattr(self, name) is not None and self.replicas is None:
                raise ValueError(f"{name} is for replicas: name their number with replicas")
        if self.max_replicas is not None and self.max_replicas < (self.replicas or 0):
            raise ValueError(f"max_replicas is less than {self.replicas}, the number of replicas")
        ROUTERS[self.router]  # refuses an unknown router
