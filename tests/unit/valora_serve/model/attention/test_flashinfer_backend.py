"""FlashInfer's plans without a GPU: the library and the device's queue are simulated."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from valora_serve.model.attention import flashinfer_backend
from valora_serve.model.attention.base import KVCache, Rows
from valora_serve.model.attention.flashinfer_backend import FlashInferBackend


class Device:
    """A device that is behind: what is enqueued runs once the host waits for it.

    Attributes:
        queue: What is enqueued, the oldest first.
        computed: The plan that each step on the device was computed with.
    """

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.computed: list[list[int]] = []

    def event(self) -> Any:
        """An event, as `torch.cuda.Event()` makes it."""
        done = [True]

        def record() -> None:
            done[0] = False
            self.queue.append(lambda: done.__setitem__(0, True))

        def synchronize() -> None:
            while not done[0]:
                self.queue.pop(0)()

        return SimpleNamespace(record=record, synchronize=synchronize)

    def wrapper(self, *_: object, **__: object) -> Any:
        """A wrapper of FlashInfer: its copies to the device begin in one buffer of the host."""
        buffer: list[int] = []
        copied: list[int] = []

        def plan(first: torch.Tensor, *_: object, **__: object) -> None:
            buffer[:] = first.tolist()
            self.queue.append(lambda: copied.__setitem__(slice(None), buffer))

        def run(query: torch.Tensor, _: object) -> torch.Tensor:
            self.queue.append(lambda: self.computed.append(list(copied)))
            return query

        return SimpleNamespace(plan=plan, run=run)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    library = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=found.wrapper,
        BatchDecodeWithPagedKVCacheWrapper=found.wrapper,
        append_paged_kv_cache=lambda *_: None,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 1)
    return found


@pytest.mark.parametrize("kind", ["plan", "mixed_plan", "decode_plan"])
def test_steps_of_a_device_that_is_behind_keep_their_plans(device: Device, kind: str) -> None:
    page = torch.zeros(32, 4, 1, 8)
    backend = FlashInferBackend(KVCache([(page, page)], block_size=4, heads=1))
    fixed: Any = {
        "mixed_plan": lambda: backend.mixed_plan(2, 8),
        "decode_plan": lambda: backend.decode_plan(1),
    }.get(kind, lambda: None)()
    steps = [(1, 5), (1, 14)] if kind == "decode_plan" else [(3, 5), (2, 14), (1, 20)]
    expected = []
    for count, length in steps:
        rows = Rows(np.array([0, count], np.int32), np.array([length], np.int32), [[*range(5)]])
        if fixed is None:
            plan: Any = backend.plan(rows)
        else:
            fixed.update(rows)
            plan = fixed
        x = torch.zeros(8, 1, 8)
        plan.run(0, x, x, x, 1.0)
        expected.append([0, -(-length // 4)] if kind == "decode_plan" else [0, count])
    while device.queue:
        device.queue.pop(0)()
    assert [plan[:2] for plan in device.computed] == expected


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["mixed_plan", "decode_plan"])
def test_sequences_that_share_a_prefix_fit(kind: str) -> None:
    """Together their tables have many more pages than the cache."""
    page = torch.zeros(32, 4, 1, 8)
    backend = FlashInferBackend(KVCache([(page, page)], block_size=4, heads=1))
    plan: Any = backend.mixed_plan(20, 64) if kind == "mixed_plan" else backend.decode_plan(20)
    shared = Rows(np.arange(21, dtype=np.int32), np.full(20, 124, np.int32), [[*range(1, 32)]] * 20)
    assert plan.max_pages >= 20 * 31
    plan.update(shared)
