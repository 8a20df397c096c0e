"""Replicas without Ray: the real client and the real replicas, over fake engines and a fake handle.

Everything that crosses a process is pickled, as Ray does it.
"""

import asyncio
import functools
import pickle
from collections import deque

import ray

from tests.support.fake_engine import FakeEngine
from valora_serve.replicas.board import Board
from valora_serve.replicas.client import ReplicatedEngine
from valora_serve.replicas.replica import EngineReplica


def asynchronous(test):
    """Runs a test in an event loop, for 30 seconds at most."""

    @functools.wraps(test)
    def run(*arguments, **options):
        asyncio.run(asyncio.wait_for(test(*arguments, **options), 30))

    return run


def sent(value):
    """A value as it arrives in another process."""
    return pickle.loads(pickle.dumps(value))


class Remote:
    """A method of an actor: `remote` returns something to await."""

    def __init__(self, method):
        self._method = method

    async def remote(self, *arguments):
        return sent(self._method(*map(sent, arguments)))


class BoardHandle:
    """Handle to a board."""

    def __init__(self, board):
        for name in ("pin", "state", "is_used", "report", "leave"):
            setattr(self, name, Remote(getattr(board, name)))


class Grammars:
    """Makes a constraint from a grammar: here the grammar itself, marked as made."""

    async def constraints(self, grammar, client):
        return [("made here", grammar)]


class Replica(EngineReplica):
    """A replica over a fake engine.

    Attributes:
        engine: The fake engine.
        dead: Whether its process is gone.
    """

    def __init__(self, name, board, engine=None):
        self.engine = self._engine = engine or FakeEngine()
        self._name, self._board = name, BoardHandle(board)
        self._state, self._missing = None, {}
        self._changing = asyncio.Lock()
        self._grammars = Grammars()
        self.dead = False
        self.took = 0

    def __del__(self):  # Ray's hook, which Python calls as well
        pass


class Response:
    """An answer on its way from a replica."""

    def __init__(self, replica, call):
        self._replica, self.cancelled = replica, False
        self._stream = None if replica is None else replica.generate(sent(call))

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._replica is None:
            await asyncio.sleep(3600)  # no replica takes it
        batch = asyncio.ensure_future(anext(self._stream))
        while not batch.done():
            if self._replica.dead:
                batch.cancel()
                raise ray.exceptions.ActorDiedError()
            await asyncio.wait({batch}, timeout=0.005)
        if self._replica.dead:
            raise ray.exceptions.ActorDiedError()
        return sent(batch.result())

    def cancel(self):
        self.cancelled = True
        if self._stream is not None:
            self._closing = asyncio.ensure_future(self._stream.aclose())


class Broadcast:
    """A call to all replicas."""

    def __init__(self, replicas, arguments):
        self._replicas, self._arguments = replicas, arguments

    async def results_async(self, *, timeout_s, return_exceptions):
        if not self._replicas:
            raise ray.serve.exceptions.RayServeException("none is there")

        async def ask(replica):
            if replica.dead:
                raise ray.exceptions.ActorDiedError()
            return sent(await replica.control(*map(sent, self._arguments)))

        calls = [ask(replica) for replica in self._replicas]
        return await asyncio.gather(*calls, return_exceptions=return_exceptions)


class Handle:
    """Handle to the replicas, which takes the living ones in turn."""

    def __init__(self, replicas, chosen=None):
        self.replicas, self._chosen = deque(replicas), chosen or {}
        self.calls, self.responses = [], []

    def options(self, **options):
        self_options = {"method_name": options["method_name"], "stream": options.get("stream")}
        assert self_options in (
            {"method_name": "generate", "stream": True},
            {"method_name": "control", "stream": None},
        )
        return Method(self, **self_options)

    async def shutdown_async(self):
        pass

    def next(self):
        living = [replica for replica in self.replicas if not replica.dead]
        self.replicas.rotate(-1)
        return living[0] if living else None

    def broadcast(self, method, *arguments):
        assert method == "control"
        return Broadcast(list(self.replicas), arguments)


class Method:
    def __init__(self, handle, method_name, stream):
        self._handle, self._name, self._stream = handle, method_name, stream

    def remote(self, *arguments):
        replica = self._handle.next()
        if not self._stream:
            return replica.control(*map(sent, arguments))
        self._handle.calls.append(arguments[0])
        if replica is not None:
            replica.took += 1
        self._handle.responses.append(Response(replica, *arguments))
        return self._handle.responses[-1]


async def start(*engines):
    """Start a client over replicas with these engines.

    Returns:
        Client, handle, board, and the replicas.
    """
    board = Board()
    replicas = [Replica(f"r{number}", board, engine) for number, engine in enumerate(engines)]
    handle = Handle(replicas)
    client = ReplicatedEngine(handle, BoardHandle(board), lambda: None)
    await client.start()
    return client, handle, board, replicas
