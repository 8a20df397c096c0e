"""The HTTP server: the ASGI application and the uvicorn server that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import select
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import uvicorn
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.server import HANDLED_SIGNALS

from valora_serve.pauses import short_pauses
from valora_serve.server.access.admission import Admission, RateLimiter
from valora_serve.server.access.guard import Guard
from valora_serve.server.access.keys import KeyRing
from valora_serve.server.access.rules import JSON, Access, RouteTable, Rules
from valora_serve.server.access.sites import Sites
from valora_serve.server.api.registry import endpoints
from valora_serve.server.api.schema import ErrorAnswer
from valora_serve.server.api.system import own_version
from valora_serve.server.bodies import BodyParser, JsonRoute
from valora_serve.server.constrain import Grammars
from valora_serve.server.context import ServerContext
from valora_serve.server.drain import Drain
from valora_serve.server.envelope import AsciiJson, Envelope, handle_errors
from valora_serve.server.listen import bind, ready, take_no_more
from valora_serve.server.loading.served_set import ServedSet
from valora_serve.server.media.reader import MediaReader
from valora_serve.server.protocol import protocol
from valora_serve.server.resolving.on_request import OnRequest
from valora_serve.server.service import Service
from valora_serve.server.telemetry import logs
from valora_serve.server.telemetry.adapter_states import follow_adapters
from valora_serve.server.telemetry.metrics import Metrics
from valora_serve.server.telemetry.spans import Tracer

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from types import FrameType

    from valora_serve.server.settings import ServerSettings
    from valora_serve.types import EngineClient

DESCRIPTION = (
    "OpenAI's chat and completions endpoints and a vision endpoint, over one large multimodal "
    "model with many LoRA adapters and heads. `model` names a domain, an adapter or the base model."
)

_M_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 4 << 20  # of malloc.h; bytes

_LAST_SECONDS = 0.1
"""Time to accept the connections that wait in the queues of the sockets."""
_MOST_LAST_SECONDS = 2.0
"""Most of that time, while more of them come."""

WORKERS = 4
"""Threads for file access and for building large answers."""

_KEY = {"type": "http", "scheme": "bearer", "description": "API key, if the server asks for one"}


def create_app(
    engine: EngineClient,
    settings: ServerSettings,
    served: ServedSet | None = None,
    tracer: Tracer | None = None,
    *,
    share_by: str = "none",
    shares: Mapping[str, float] | None = None,
) -> FastAPI:
    """Make the ASGI application.

    Args:
        engine: Running engine; it is closed at shutdown.
        settings: Settings of the server.
        served: Loads and unloads at run time; made from the settings if None.
        tracer: Makes OpenTelemetry spans; made from the settings if None.
        share_by: By what the engine keeps shares: ``key``, ``adapter`` or ``none``.
        shares: The shares.
    """
    tracer = tracer or Tracer.to(settings.otlp_endpoint)
    admission = Admission(
        settings.max_waiting,
        deadline_admission=settings.deadline_admission,
        deadline=settings.deadline,
        deadlines=settings.deadlines,
        shares=None if share_by == "none" else shares or {},
    )
    metrics = Metrics(engine)
    if served is None:
        folder = Path(settings.adapter_folder) if settings.adapter_folder else None
        served = ServedSet(engine, folder, Path(settings.state_file))
    service = Service(engine, admission, metrics, tracer, share_by, settings.cache_sharing)
    on_request = OnRequest.of(service, served, settings)
    follow_adapters(metrics, service, on_request)
    context = ServerContext(
        settings=settings,
        service=service,
        media=MediaReader(settings),
        grammars=Grammars(engine),
        metrics=metrics,
        served=served,
        on_request=on_request,
        parser=BodyParser(),
        drain=Drain(),
        started=time.monotonic(),
    )

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        # As many threads on every machine: asyncio's default grows with the number of cores.
        pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="work")
        asyncio.get_running_loop().set_default_executor(pool)
        anyio.to_thread.current_default_thread_limiter().total_tokens = WORKERS  # 40 by default
        context.grammars.read()
        if on_request is not None:
            for name in filter(on_request.allows, served.missing):
                on_request.begin(name)
        yield
        context.drain.begun = True
        await context.media.close()
        if on_request is not None:
            await on_request.close()
        context.parser.close()
        context.grammars.close()
        await engine.close(drain=0.0)
        tracer.close()

    app: FastAPI = FastAPIOffline(  # FastAPI whose /docs loads nothing from other hosts
        title="VaLoRA", description=DESCRIPTION, version=own_version(), lifespan=life,
        redoc_url=None, static_url="/console/docs",
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        redirect_slashes=False,  # to an absolute URL of whatever the Host header says
    )  # fmt: skip
    app.state.context = context

    @cache
    def described() -> bytes:
        return bytes(AsciiJson(app.openapi()).body)

    async def document(_: Request) -> Response:
        # FastAPI would make it on the event loop.
        return Response(await asyncio.to_thread(described), media_type=JSON)

    app.router.routes.insert(0, Route("/openapi.json", document, include_in_schema=False))
    routes = RouteTable()
    routes.add(app.routes, Rules(Access.OPEN))  # so far only the documentation at /docs
    for endpoint in endpoints():
        router = endpoint(context)
        for route in router.routes:
            if type(route) is APIRoute:
                route.__class__ = JsonRoute  # also routes of other packages
        app.include_router(router)
        routes.add(router.routes)
    guard = Guard(
        KeyRing.from_settings(settings),
        RateLimiter(settings.rate, settings.burst),
        Sites(settings.host, settings.allowed_hosts, settings.allowed_origins),
    )
    handle_errors(app, metrics)
    app.add_middleware(
        Envelope, settings=settings, routes=routes, guard=guard, metrics=metrics,
        drain=context.drain,
    )  # fmt: skip
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"],
            allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After"],
        )  # fmt: skip
    if settings.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(settings.trusted_proxies))
    app.openapi = _openapi(app, routes)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI, routes: RouteTable) -> Callable[[], dict[str, Any]]:
    """The schema with the key that a route asks for, and without FastAPI's own 422.

    Invalid requests get a 400 in OpenAI's form.
    """

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title, version=app.version, description=app.description,
                routes=app.routes, servers=app.servers,
            )  # fmt: skip
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for route, rules in routes:
                if rules.access is not Access.OPEN and isinstance(route, APIRoute):
                    for method in route.methods or ():
                        operation = made["paths"].get(route.path_format, {}).get(method.lower(), {})
                        operation["security"] = [{"HTTPBearer": []}]
            made["components"]["securitySchemes"] = {"HTTPBearer": _KEY}
            schemas = made["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas.setdefault("ErrorAnswer", ErrorAnswer.model_json_schema())
            app.openapi_schema = made
        return app.openapi_schema

    return schema


class Server(uvicorn.Server):
    """uvicorn server that keeps answering while it drains.

    uvicorn itself closes its listening sockets first, so that new clients are refused without a
    word, and cuts the connections of requests that take too long.

    Args:
        config: uvicorn's configuration.
        drain: State of the shutdown.
        drain_seconds: Time in seconds that running requests have to finish.
        sockets: Bound sockets.

    Attributes:
        on_started: Called once the server listens; None for nothing.
    """

    on_started: Callable[[], None] | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Drain,
        drain_seconds: float,
        sockets: list[socket.socket],
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._sockets = sockets
        self._signal: str | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal comes, and drain."""
        own = threading.current_thread() is threading.main_thread()  # not one of several, in tests
        with short_pauses() if own else contextlib.nullcontext():
            await super().serve(ready(self._sockets if sockets is None else sockets))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started and self.on_started is not None:
            self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving; unlike uvicorn's, the process then exits with status 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def end(self) -> None:
        """Begin to drain, as after a signal."""
        self._drain.begun = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second signal stops the process at once.

        Logs nothing itself: it may interrupt a line that the main thread is writing, and the
        stream then raises an error instead of taking another one.
        """
        if self.should_exit:
            os._exit(128 + sig)  # threads that decode images may take seconds to end
        self._drain.begun = True
        self._signal = signal.Signals(sig).name
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests until running ones have finished, and then stop listening."""
        if self._signal is not None:
            logs.LOG.info("draining after %s", self._signal)
        await self._drain.finish(self._drain_seconds)
        await self._accept_last(sockets or [])
        await super().shutdown(sockets)

    async def _accept_last(self, sockets: list[socket.socket]) -> None:
        """Take the connections that the kernel has accepted; later ones are refused.

        Closing a socket resets those that wait in its queue. They get their 503 instead.
        """
        for sock in sockets:
            take_no_more(sock)
        await asyncio.sleep(_LAST_SECONDS)
        # Bounded: whoever connects again and again would keep the server from ending.
        end = time.monotonic() + _MOST_LAST_SECONDS
        while select.select(sockets, [], [], 0)[0] and time.monotonic() < end:
            await asyncio.sleep(0.01)


def make_server(
    app: FastAPI, settings: ServerSettings, sockets: list[socket.socket] | None = None
) -> Server:
    """Make a uvicorn server for the application.

    Args:
        app: Application made by `create_app`.
        settings: Settings that the application was made with.
        sockets: Sockets made by `listen.bind`; made from the settings if None.
    """
    _allow_files(settings.max_connections + 256)
    _return_memory()
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol(
            min(20.0, settings.body_seconds), settings.send_seconds, settings.body_seconds
        ),
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # uvicorn believes those of 127.0.0.1
        backlog=2048,
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=5,  # for the last bytes; requests have ended before
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    drain = app.state.context.drain
    return Server(config, drain, settings.drain_seconds, sockets or bind(settings))


def _allow_files(count: int) -> None:
    """Raise the limit on open files to `count`, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        count = min(count, hard)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _return_memory() -> None:
    """Let glibc return large blocks (bodies, images) to the system as soon as they are freed.

    By default it keeps more and more of them, once it has seen one freed.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
