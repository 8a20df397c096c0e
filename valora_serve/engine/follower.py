"""A follower of a tensor-parallel group: the process that `crew` starts for every further GPU.

It has an engine of its own, of which it uses the parts that compute, and does what the leader tells
it in the order in which it is told. It ends when it is told to, or when the leader is gone.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from valora_data.errors import ValoraError
from valora_serve.engine.crew import Orders, device_of
from valora_serve.engine.engine import Engine
from valora_serve.engine.lockstep import FollowingAdapters, FollowingRunner
from valora_serve.model.work import AdapterTable
from valora_serve.parallel.group import Group, make_store
from valora_serve.pauses import short_pauses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)


class Follower:
    """Does what the leader does.

    Args:
        engine: An engine in the follower's place of the group.
        report: Sends a kind of news and its value to the leader, from any thread.
    """

    def __init__(self, engine: Engine, report: Callable[[str, int], None]) -> None:
        self._engine = engine
        self._linears = engine.lmm.linears
        runner = engine.runner
        assert isinstance(runner, FollowingRunner)
        self._runner = runner
        table = AdapterTable(engine.adapters.ranks, engine.adapters.scalings)
        self.adapters = FollowingAdapters(
            engine.memory,
            table,
            engine.lmm.targets,
            engine.lmm.own_kv_heads,
            lambda ticket: report("copied", ticket),
        )
        self._orders: dict[str, Callable[..., object]] = {
            "step": runner.follow,
            "encode": runner.encode_share,
            "capture": runner.capture,
            "prepare": runner.prepare,
            "give_up": runner.give_up,
            "compile_kernels": runner.compile_kernels,
            "forget_graphs": runner.forget_graphs,
            "activate": self._activate,
            "merge": self._linears.merge,
            "unmerge": self._linears.unmerge,
            "is_finite": self._linears.is_finite,
            "write": self.adapters.write,
            "write_pages": self.adapters.write_pages,
            "copy_page": engine.memory.copy_page,
            "adapters": lambda: None,
        }

    def do(
        self,
        name: str,
        arguments: Sequence[Any],
        table: tuple[bytes, bytes] | None,
        dropped: Sequence[int],
    ) -> None:
        """Carry out an order of the leader, see `Crew.tell`."""
        for number in dropped:
            self.adapters.drop(number)
        if table is not None:
            self.adapters.learn(table)
        self._orders[name](*arguments)

    def _activate(self, names: Sequence[str], mergeable: bool) -> None:
        self._linears.activate(names, self._engine.memory.lora, mergeable=mergeable)
        self._runner.has_lora = True


def _pack(adapters: FollowingAdapters | None, orders: Connection) -> None:
    """Pack adapters beside the steps; the end of the pipe is that of the leader."""
    while True:
        try:
            order = orders.recv()
        except (EOFError, OSError):
            os._exit(0)
        answer: str | None = None
        try:
            assert adapters is not None
            adapters.pack(*order)
        except ValoraError as error:
            answer = str(error)
        except Exception as error:
            log.exception("packing an adapter")
            answer = f"adapter {order[1]} cannot be packed: {error}"
        orders.send(answer)


def _wait_for_end(packs: Connection, ready: threading.Event) -> None:
    """End with the leader while the model is read; later `_pack` does."""
    while not ready.is_set():
        # Nothing is packed before all processes are ready: it can only be the end of the pipe.
        if packs.poll(0.5) and not ready.is_set():
            os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Entry point; the arguments are the file descriptors of the two pipes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader says when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    steps, packs = (Connection(int(one)) for one in arguments)
    sending = threading.Lock()

    def report(kind: str, value: object) -> None:
        with sending:
            steps.send((kind, value))

    ready = threading.Event()
    threading.Thread(target=_wait_for_end, args=(packs, ready), daemon=True).start()
    try:
        report("hello", 0)
        orders: Orders = steps.recv()
        logging.basicConfig(
            level=orders.log_level, format=f"[GPU {orders.rank}] %(levelname)s %(message)s"
        )
        torch.set_num_threads(orders.threads)
        settings = orders.settings
        device = device_of(settings, orders.rank)
        store = make_store(settings.tensor_parallel, orders.port)
        group = Group.join(orders.rank, settings.tensor_parallel, device, store)
        follower = Follower(Engine(settings, group=group), report)
        ready.set()
        threading.Thread(target=_pack, args=(follower.adapters, packs), daemon=True).start()
        report("ready", 0)
        with short_pauses():
            while True:
                order = pickle.loads(steps.recv_bytes())
                if order[0] == "stop":
                    break
                follower.do(*order)
        group.leave()
    except (EOFError, ConnectionError, BrokenPipeError):
        return 1  # the leader is gone
    except Exception as error:
        if not isinstance(error, ValoraError):
            log.exception("this process of the tensor-parallel group failed")
        report("failed", str(error) or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads and collectives under way are not waited for
