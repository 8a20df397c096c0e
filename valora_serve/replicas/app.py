"""The application for configuration files of Ray Serve: `serve deploy docs/deploy/serve.yaml`.

`valora-serve --replicas` runs the HTTP server in its own process; here it is a deployment beside
the replicas, behind the proxies of Ray Serve, which Kubernetes' operator KubeRay can run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve

from valora_serve.cli import make_app, read
from valora_serve.errors import SettingsError
from valora_serve.replicas import cluster
from valora_serve.replicas.client import ReplicatedEngine
from valora_serve.server.loading import startup
from valora_serve.server.media.pool import shared_pool
from valora_serve.server.telemetry import logs

if TYPE_CHECKING:
    from fastapi import FastAPI

    from valora_serve.engine.settings import EngineSettings
    from valora_serve.server.settings import ServerSettings

FRONT = "Front"  # name of the deployment of the HTTP server


@serve.ingress()
class Front:
    """The HTTP server as a deployment; Ray Serve's proxies pass it the requests."""

    async def __init__(  # type: ignore[misc] # Ray Serve awaits it
        self,
        replicas: Any,
        bundles: Sequence[str],
        settings: ServerSettings,
        application: str,
        engine_settings: EngineSettings,
    ) -> None:
        logs.set_up(settings.log_level, settings.log_format)
        shared_pool().start()
        folders = startup.find_bundles(bundles, Path(settings.state_file).parent / "downloads")
        # The replicas are stopped by Ray Serve.
        engine = ReplicatedEngine(replicas, cluster.pin_board(application), lambda: None)
        await engine.start()
        self._app, _ = await make_app(engine, settings, folders, engine_settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the ASGI application; Ray Serve calls it after the constructor."""
        return self._app


def build(options: Mapping[str, Any]) -> Any:
    """Return the application with the options of `valora-serve`; configuration files name it.

    Keys belong into `keys_file`: Ray Serve shows options to everyone.
    """
    if "api_key" in options:
        raise SettingsError(
            "api_key in a configuration file of Ray Serve can be read by everyone who sees the "
            "cluster: use keys_file"
        )
    bundles, server, engine, settings = read([], {"replicas": 1} | dict(options))
    if engine.quantize == "auto":
        found = startup.find_bundles(bundles, Path(server.state_file).parent / "downloads")
        engine = startup.follow_bundles(engine, found)
    reserved = cluster.resources(settings, engine)
    replicas = cluster.replicas(settings, engine, server, reserved)
    front = serve.deployment(
        name=FRONT,
        num_replicas=1,  # it decides what is served
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=cluster.MOST_ONGOING,
        graceful_shutdown_timeout_s=server.drain_seconds + cluster.DRAIN_EXTRA,
    )
    return front(Front).bind(replicas, bundles, server, settings.application, engine)
