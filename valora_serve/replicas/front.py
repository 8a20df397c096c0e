"""What `valora-serve --replicas` uses instead of an engine."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING

from valora_serve.errors import SettingsError

if TYPE_CHECKING:
    from valora_serve.engine.settings import EngineSettings
    from valora_serve.replicas.client import ReplicatedEngine
    from valora_serve.replicas.settings import ReplicaSettings
    from valora_serve.server.settings import ServerSettings


async def start_replicas(
    settings: ReplicaSettings, engine: EngineSettings, server: ServerSettings
) -> ReplicatedEngine:
    """Start or join Ray, and start the replicas, without adapters.

    Args:
        settings: Settings of replicas.
        engine: Settings of each engine.
        server: Settings of the server.

    Raises:
        SettingsError: The cluster cannot be joined, has no room, or serves the same application for
            another server; or the replicas do not start.
    """
    from valora_serve.replicas import cluster
    from valora_serve.replicas.client import ReplicatedEngine

    address = settings.ray_address or os.environ.get("RAY_ADDRESS") or None
    # Not in another thread: the processes of a Ray that is started here end with that thread.
    cluster.join(address)
    name = settings.application
    try:
        board = await asyncio.to_thread(cluster.pin_board, name)
        taken = await board.is_used.remote()
    except BaseException:
        await asyncio.to_thread(cluster.leave)
        raise
    if taken:
        await asyncio.to_thread(cluster.leave)
        raise SettingsError(
            f"another server serves application {name} on this Ray cluster: stop it, or name "
            "another application"
        )
    stop = partial(cluster.release, name, started=address is None)
    try:
        reserved = await asyncio.to_thread(cluster.resources, settings, engine)
        made = cluster.replicas(settings, engine, server, reserved)
        handle = await asyncio.to_thread(cluster.deploy, made, settings)
        client = ReplicatedEngine(handle, board, stop)
        await client.start()
    except BaseException:
        await asyncio.to_thread(stop)
        raise
    return client
