"""The HTTP server: the ASGI application and the uvicorn server that runs it."""

import asyncio
import contextlib
import ctypes
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from typing import Any, cast

import anyio.to_thread
import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as BaseRoute
from starlette.types import Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from valora_data.registry import Registry
from valora_serve.server.access.admission import Admission
from valora_serve.server.access.guard import JSON, Access, Guard
from valora_serve.server.api.common import REFUSALS
from valora_serve.server.bodies import Bodies, Route
from valora_serve.server.constrain import Grammars
from valora_serve.server.context import ServerContext
from valora_serve.server.errors import handle_errors
from valora_serve.server.loading.served_set import ServedSet
from valora_serve.server.loading.state_file import StateFile
from valora_serve.server.media.reader import MediaReader
from valora_serve.server.middleware import Middleware
from valora_serve.server.resolving.on_request import OnRequest
from valora_serve.server.service import Service
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry.metrics import Metrics
from valora_serve.server.telemetry.spans import Tracer
from valora_serve.types import EngineClient

DESCRIPTION = (
    "OpenAI's chat and completions endpoints and a vision endpoint, over one large multimodal "
    "model with many LoRA adapters and heads. `model` names a domain, an adapter or the base model."
)
_API = "valora_serve.server.api"
ENDPOINTS: Registry[Callable[[ServerContext], APIRouter]] = Registry(
    "valora.endpoints",
    "endpoint",
    {
        "chat": f"{_API}.chat:router",
        "completions": f"{_API}.completions:router",
        "responses": f"{_API}.openai_responses:router",
        "embeddings": f"{_API}.completions:embeddings",
        "vision": f"{_API}.vision:router",
        "models": f"{_API}.models:router",
        "contexts": f"{_API}.models:contexts",
        "examples": f"{_API}.models:examples",
        "system": f"{_API}.system:router",
    },
)
"""Endpoints by name. Another package adds one in the entry-point group."""
WORKERS = 4  # threads for file access and for building large answers
_M_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 4 << 20  # of malloc.h; bytes
_READ_BYTES = 16 * 1024
_KEY = {"type": "http", "scheme": "bearer", "description": "API key, if the server asks for one"}


def create_app(
    engine: EngineClient,
    settings: ServerSettings,
    served: ServedSet | None = None,
    *,
    share_by: str = "none",  # by what the engine keeps the shares: ``key`` or ``adapter``
    shares: Mapping[str, float] | None = None,
) -> FastAPI:
    """Make the ASGI application, which closes the engine at shutdown."""
    tracer = Tracer(settings.otlp_endpoint)
    admission = Admission(settings, None if share_by == "none" else shares or {})
    metrics = Metrics(engine)
    served = served or ServedSet(engine, settings.adapter_folder, StateFile(settings.state_file))
    service = Service(engine, admission, metrics, tracer, settings, share_by)
    on_request = OnRequest(service, served, settings) if settings.adapter_sources else None
    metrics.loader = on_request
    context = ServerContext(
        settings=settings, service=service, metrics=metrics, served=served, on_request=on_request,
        media=MediaReader(settings, text_only=engine.models()[0].media == "text"),
        grammars=Grammars(engine), guard=Guard(settings), bodies=Bodies(settings),
    )  # fmt: skip

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        # As many threads on every machine: asyncio's default grows with the number of cores.
        pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="work")
        asyncio.get_running_loop().set_default_executor(pool)
        anyio.to_thread.current_default_thread_limiter().total_tokens = WORKERS  # 40 by default
        context.grammars.read()
        if on_request is not None:
            for name in filter(on_request.allows, served.waiting):
                on_request.begin(name)
        yield
        await context.media.close()
        if on_request is not None:
            await on_request.close()
        context.grammars.close()
        await engine.close(drain=0.0)
        tracer.close()

    app: FastAPI = FastAPIOffline(  # FastAPI whose /docs loads nothing from other hosts
        title="VaLoRA", description=DESCRIPTION, version=version("valora"), lifespan=life,
        redoc_url=None, static_url="/console/docs",
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        redirect_slashes=False,  # to an absolute URL of whatever the Host header says
    )  # fmt: skip
    app.state.context = context
    _add_routes(app, context)
    handle_errors(app, metrics)
    app.add_middleware(Middleware, settings=settings, metrics=metrics)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_methods=["*"], allow_headers=["*"],
            allow_origins=[one.lower().rstrip("/") for one in settings.allowed_origins],
            expose_headers=["X-Request-Id", "Retry-After"],
        )  # fmt: skip
    if settings.trusted_proxies:
        app.add_middleware(_Proxies, trusted_hosts=list(settings.trusted_proxies))
    return app


def _add_routes(app: FastAPI, context: ServerContext) -> None:
    """Add the endpoints' routes, which check their rules, and the OpenAPI document."""
    for make in ENDPOINTS.values():  # built-in ones first: no other can take over their paths
        router = make(context)
        for route in router.routes:
            if type(route) is not APIRoute:
                raise TypeError(f"{route} is no APIRoute of FastAPI, whose access is checked")
            route.__class__ = Route
            if cast("Route", route).rules.access is not Access.OPEN:
                secured: dict[str, Any] = {"security": [{"HTTPBearer": []}]}
                route.openapi_extra = (route.openapi_extra or {}) | secured
                route.responses = REFUSALS | route.responses
        app.include_router(router)

    plain = app.openapi

    @cache
    def described() -> dict[str, Any]:
        made = plain()
        for operation in (one for path in made["paths"].values() for one in path.values()):
            operation["responses"].pop("422", None)  # invalid requests get a 400
        made["components"]["securitySchemes"] = {"HTTPBearer": _KEY}
        return made

    async def document(_: Request) -> Response:  # FastAPI would make it on the event loop
        return Response(json.dumps(await asyncio.to_thread(described)), media_type=JSON)

    app.openapi = described  # type: ignore[method-assign]
    app.router.routes.insert(0, BaseRoute("/openapi.json", document, include_in_schema=False))


class _Proxies(ProxyHeadersMiddleware):
    """uvicorn's middleware, for which clients of a Unix socket have the address ``unix``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # type: ignore[override]
        client = scope.get("client") or ("unix", 0)
        await super().__call__({**scope, "client": client}, receive, send)  # type: ignore[arg-type]


class SmallReads(H11Protocol):
    """HTTP by h11, which bounds a request's head and keeps the body beside an offer to upgrade.

    Parsing chunks of a byte takes h11 seconds for what asyncio reads at once by default.
    """

    def connection_made(self, transport: Any) -> None:
        """Let other connections have their turn after each small part."""
        transport.max_size = _READ_BYTES
        super().connection_made(transport)


class _Server(uvicorn.Server):
    """uvicorn's, which also ends connections that it accepted just before it stopped listening."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait for what is being answered."""
        ending = asyncio.ensure_future(super().shutdown(sockets))
        while not (await asyncio.wait([ending], timeout=0.1))[0]:
            for connection in [*self.server_state.connections]:
                if not connection.transport.is_closing():
                    connection.shutdown()
        await ending


def make_server(app: FastAPI, settings: ServerSettings) -> uvicorn.Server:
    """Make a uvicorn server for an application; it serves sockets made by `listen.bind`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = settings.max_connections + 256
    if hard == resource.RLIM_INFINITY or hard >= files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    # glibc returns large blocks (bodies, images) to the system as soon as they are freed.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
    drain: Any = settings.drain_seconds
    config = uvicorn.Config(
        app, http=SmallReads, ws="none", lifespan="on", loop="asyncio",
        log_config=None, access_log=False, server_header=False,
        proxy_headers=False,  # uvicorn believes those of 127.0.0.1
        backlog=2048, limit_concurrency=settings.max_connections,
        timeout_keep_alive=15, timeout_graceful_shutdown=drain,
        ssl_certfile=settings.tls_cert, ssl_keyfile=settings.tls_key,
    )  # fmt: skip
    return _Server(config)
