"""Reports of replicas, a board without Ray, and replicas with fake engines."""

import asyncio
import contextlib
import functools
import inspect
import json
import pickle
import socket
from types import SimpleNamespace

import httpx

from tests.support.fake_engine import FakeEngine
from valora_serve.replicas.board import Board, Report
from valora_serve.replicas.replica import EngineReplica, SharedState
from valora_serve.server.app import create_app
from valora_serve.server.loading import startup
from valora_serve.server.loading.served_set import ServedSet
from valora_serve.server.loading.state_file import SavedState
from valora_serve.server.settings import ServerSettings
from valora_serve.types import EngineStats

SECRET = "an-admin-key-of-32-characters-ok"
BUILT_IN = {model.name for model in FakeEngine().models()}


def awaited(test):
    """Decorator of a test that is a coroutine, and waits for nothing for long."""

    @functools.wraps(test)
    def run(**given):
        asyncio.run(asyncio.wait_for(test(**given), 60))

    return run


def report(
    name, url="http://127.0.0.1:9", state=None, problem=None, adapters=(), taken=(), load=0, **stats
):
    followed, own = (state or SavedState()).revision, (dict(adapters), dict(taken), load)
    return Report(name, url, "its secret", True, followed, problem, EngineStats(**stats), *own)


class Ref:
    """What Ray gives for a call: the result can be awaited, or had by `get` from another thread."""

    def __init__(self, value, loop):
        self.value, self._loop = value, loop

    def __await__(self):
        if inspect.isawaitable(self.value):
            self.value = yield from self.value.__await__()
        return self.value

    def get(self):
        if inspect.isawaitable(self.value):
            return asyncio.run_coroutine_threadsafe(self.value, self._loop).result(60)
        return self.value


class Handle:
    """A handle of Ray to an object of this process; arguments are pickled, as Ray does it."""

    def __init__(self, actor):
        self._actor, self._loop = actor, asyncio.get_running_loop()

    def __getattr__(self, name):
        def remote(*arguments):
            made = getattr(self._actor, name)(*pickle.loads(pickle.dumps(arguments)))
            return Ref(made, self._loop)

        return SimpleNamespace(remote=remote)


class Running(EngineReplica):
    """A replica with a fake engine: its application behind its gate, on a port."""

    def __init__(self, name, place, board):
        self._name, self._board, self._engine = name, Handle(board), FakeEngine()
        self.name, self.engine = name, self._engine
        self.settings = ServerSettings(
            port=0, api_key=SECRET, allow_runtime_loading=True, log_level="error",
            adapter_folder=str(place / "adapters"), state_file=str(place / "state.json"),
            tls_cert="of-the-fronts.pem", tls_key="of-the-fronts.key",
        )  # fmt: skip
        state = SharedState(self._board, name, place / "state.json")
        self.served_set = ServedSet(self.engine, place / "adapters", state)
        self._given = place / "given"

    async def start(self):
        await startup.load_all(self.engine, [self._given], self.served_set)
        app = create_app(self.engine, self.settings, self.served_set)
        self._listen(app, socket.create_server(("127.0.0.1", 0)), self.settings)
        await self._follow(*await self._tell())
        self._reporting = asyncio.create_task(self._keep_reporting())

    def __del__(self):
        """`stop` has done it."""

    async def stop(self):
        self._reporting.cancel()
        self._server.should_exit = True
        await self._serving

    def front(self):
        told = {"client": ["9.9.9.9", 5], "server": ["127.0.0.1", 80], "scheme": "http",
                "state": {"counts": True, "facts": {}}}  # fmt: skip
        return {"x-valora-front": f"{self._secret} {json.dumps(told)}",
                "authorization": f"Bearer {SECRET}"}  # fmt: skip

    async def post(self, path, status=200, **body):
        async with httpx.AsyncClient(base_url=self._url, headers=self.front(), timeout=60) as one:
            answer = await one.post(f"/v1/{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer

    def names(self):
        return {model.name for model in self.engine.models()} - BUILT_IN


@contextlib.asynccontextmanager
async def running(place, *names):
    board = Board(str(place / "state.json"))
    made = [Running(name, place, board) for name in names]
    for one in made:
        await one.start()
    try:
        yield board, *made
    finally:
        for one in made:
            await one.stop()
