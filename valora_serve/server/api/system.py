"""Health, metrics, version, status, and the web console."""

import dataclasses
import platform
import time
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, create_model
from starlette.responses import FileResponse, Response

from valora_serve.server.access.guard import JSON, Access, allow
from valora_serve.server.api.schema import fields_of, optional
from valora_serve.server.context import ServerContext
from valora_serve.server.service import last_part
from valora_serve.server.telemetry.metrics import memory_bytes
from valora_serve.types import EngineStats


class Health(BaseModel):
    """Response of ``/health`` and ``/ready``."""

    status: Literal["ok", "failed"]


class Version(BaseModel):
    """Response of ``/version``."""

    version: str
    base: str
    python: str
    torch: str
    transformers: str


EngineStatus: Any = create_model(
    "EngineStatus",
    __base__=BaseModel,
    __doc__="State and counters of an engine; counters count from its start.",
    **fields_of(EngineStats, "on_device", "on_disk"),  # which may be thousands of names
    prefix_hit_ratio=(float | None, ...),
    image_hit_ratio=(float | None, ...),
)


class Status(EngineStatus):  # type: ignore[misc]
    """Response of ``/v1/status``: state of the engine, as the console shows it."""

    ready: bool
    base: str
    memory_bytes: int
    uptime_seconds: float
    replicas: dict[str, EngineStatus] | None = optional(
        "every replica by its name, whose sum the others are; null if there are none"
    )


WEB = Path(__file__).parents[1] / "web"
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_ASSETS = {file.name: _KINDS[file.suffix] for file in WEB.iterdir() if file.suffix in _KINDS}
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; media-src blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_PROBE: dict[str, Any] = {
    "response_model": Health,
    "responses": {503: {"model": Health, "description": "The engine has failed"}},
}


def router(context: ServerContext) -> APIRouter:
    """Routes for operators, and the web console."""
    routes = APIRouter(tags=["operations"])
    engine, started = context.service.engine, time.monotonic()

    @routes.get("/ready", summary="Whether requests are accepted", **_PROBE)
    @routes.get("/health", summary="Whether the engine runs", **_PROBE)
    @allow(Access.OPEN, any_host=True)
    async def health() -> Response:
        told = Health(status="ok" if engine.healthy else "failed").model_dump_json()
        return Response(told, 200 if engine.healthy else 503, media_type=JSON)

    @routes.get("/version", summary="Versions of the server and its libraries")
    @allow(Access.OPEN)
    async def version() -> Version:
        return Version(
            version=version_of("valora"), base=last_part(engine.base),
            python=platform.python_version(), torch=version_of("torch"),
            transformers=version_of("transformers"),
        )  # fmt: skip

    @routes.get(
        "/metrics", response_class=Response, summary="Metrics for Prometheus",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )  # fmt: skip
    @allow(Access.KEYED if context.settings.protect_metrics else Access.OPEN, tells_all=True)
    async def metrics() -> Response:
        return Response(await context.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/status", summary="State of the engine")
    @allow(Access.KEYED, tells_all=True)
    async def status() -> Status:
        found = engine.peers
        stats = engine.stats() if found is None else total(list(found.values()))
        each = {name: EngineStatus(**_facts(one)) for name, one in (found or {}).items()}
        return Status(
            **_facts(stats), ready=engine.healthy, base=last_part(engine.base),
            memory_bytes=memory_bytes(), uptime_seconds=time.monotonic() - started,
            replicas=None if found is None else each,
        )  # fmt: skip

    if context.settings.console:

        @routes.get("/", include_in_schema=False)
        @allow(Access.OPEN)
        async def console() -> FileResponse:
            headers = {"Content-Security-Policy": _CSP}
            return FileResponse(WEB / "index.html", headers=headers, media_type="text/html")

        @routes.get("/console/{name}", include_in_schema=False)
        @allow(Access.OPEN)
        async def asset(name: str) -> Response:
            if name not in _ASSETS:
                return Response(status_code=404)
            return FileResponse(WEB / name, media_type=_ASSETS[name])

    return routes


def total(states: list[EngineStats]) -> EngineStats:
    """The sum of states: of counters, sizes and names; the mode is that of the busiest."""
    if not states:
        return EngineStats()
    busiest = max(states, key=lambda stats: stats.running)
    made: dict[str, Any] = {}
    for name in (item.name for item in dataclasses.fields(EngineStats)):
        values: list[Any] = [getattr(stats, name) for stats in states]
        if isinstance(values[0], tuple):
            made[name] = tuple(sorted({one for value in values for one in value}))
        elif isinstance(values[0], dict):
            merges: dict[str, Any] = {"finished": sum, "start_seconds": max}
            merge = merges.get(name, lambda found: found[-1])
            keys = {key for value in values for key in value}
            made[name] = {k: merge([one[k] for one in values if k in one]) for k in keys}
        elif type(values[0]) is int:  # all replicas know the same adapters and contexts
            fold: Any = max if name in ("adapters_known", "contexts_known") else sum
            made[name] = fold(values)
        else:
            made[name] = getattr(busiest, name)
    return EngineStats(**made)


def _facts(stats: EngineStats) -> dict[str, Any]:
    found = {name: getattr(stats, name, None) for name in EngineStatus.model_fields}
    for kind in ("prefix", "image"):
        queries = getattr(stats, f"{kind}_queries")
        found[f"{kind}_hit_ratio"] = getattr(stats, f"{kind}_hits") / queries if queries else None
    return found
