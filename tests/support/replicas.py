"""Reports of replicas, a board without Ray, and replicas with fake engines."""

import asyncio
import contextlib
import inspect
import json
import pickle
from dataclasses import replace

import httpx

from tests.support.fake_engine import FakeEngine
from valora_serve.replicas.board import Board, Report
from valora_serve.replicas.replica import Gate, SharedState
from valora_serve.server.app import create_app, make_server
from valora_serve.server.listen import bind
from valora_serve.server.loading import startup
from valora_serve.server.loading.served_set import ServedSet
from valora_serve.server.loading.state_file import SavedState
from valora_serve.server.settings import ServerSettings
from valora_serve.types import EngineStats

SECRET = "an-admin-key-of-32-characters-ok"
BUILT_IN = {model.name for model in FakeEngine().models()}


def report(name, url="http://127.0.0.1:9", *, state=None, adapters=(), taken=(), **stats):
    """A report of a replica."""
    revision = (state or SavedState()).revision
    return Report(
        name, url, "its secret", True, revision, EngineStats(**stats), dict(adapters), dict(taken)
    )


class Ref:
    """What Ray gives for a call: the result can be awaited, or had by `get`."""

    def __init__(self, value):
        self.value = value

    def __await__(self):
        if inspect.isawaitable(self.value):
            self.value = yield from self.value.__await__()
        return self.value

    def get(self):
        """As `ray.get`."""
        return self.value


class Handle:
    """A handle of Ray to an object of this process; arguments are pickled, as Ray does it."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        class Method:
            remote = staticmethod(
                lambda *arguments: Ref(
                    getattr(self._actor, name)(*pickle.loads(pickle.dumps(arguments)))
                )
            )

        return Method


class Running:
    """A replica with a fake engine: its application behind its gate, on a port."""

    def __init__(self, name, place, board):
        self.name, self.engine = name, FakeEngine()
        self.settings = ServerSettings(
            port=0, api_key=SECRET, allow_runtime_loading=True, log_level="error",
            adapter_folder=str(place / "adapters"), state_file=str(place / "state.json"),
        )  # fmt: skip
        self.state = SharedState(Handle(board), name, place / "state.json")
        self.served = ServedSet(self.engine, place / "adapters", self.state)
        self._given = place / "given"

    async def start(self):
        async def warm_up():
            pass

        await startup.load_all(
            self.engine, [self._given], self.served, warm_up=warm_up, replay=False
        )
        app = create_app(self.engine, self.settings, self.served)
        service = app.state.context.service
        self.gate = Gate(app, lambda state: service.changed(self.served.follow(state)))
        sockets = bind(self.settings)
        self.server = make_server(self.gate, self.settings)
        self.serving = asyncio.create_task(self.server.serve(sockets))
        while not self.server.started:
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        one = report(self.name, self.url)
        return replace(one, secret=self.gate.secret, revision=self.served.revision)

    def front(self, **headers):
        told = json.dumps([["9.9.9.9", 5], ["127.0.0.1", 80], "http", True])
        return {"x-valora-front": f"{self.gate.secret} {told}",
                "authorization": f"Bearer {SECRET}", **headers}  # fmt: skip

    async def post(self, path, status=200, **body):
        async with httpx.AsyncClient(base_url=self.url, headers=self.front()) as client:
            answer = await client.post(f"/v1/{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer

    def names(self):
        return {model.name for model in self.engine.models()} - BUILT_IN


@contextlib.asynccontextmanager
async def running(place, *names):
    """Replicas that have joined a board."""
    board = Board(str(place / "state.json"))
    made = [Running(name, place, board) for name in names]
    for one in made:
        assert await board.join(await one.start(), None) is None
    try:
        yield board, *made
    finally:
        for one in made:
            one.server.should_exit = True
            await one.serving
