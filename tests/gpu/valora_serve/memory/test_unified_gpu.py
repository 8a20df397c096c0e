"""Adapters on their way to a real GPU: nothing waits for them, nobody reads them half copied."""

import gc
import time

import pytest
import torch

from tests.support import memory_cases
from valora_kernels.metadata import LoraBatch
from valora_kernels.reference import atmm_reference
from valora_serve.errors import AdapterError
from valora_serve.memory.block_manager import PagePool
from valora_serve.memory.unified import AdapterMemory, GroupSpec, PageShape, UnifiedMemory

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 1024, 8
GROUPS = tuple(
    GroupSpec(f"{n}.q", (f"{n}.q", f"{n}.k", f"{n}.v"), WIDTH, (WIDTH, 256, 256), "text")
    for n in range(LAYERS)
)


def make_memory(pages=16, slots=4):
    return UnifiedMemory(
        pages, PageShape(16, LAYERS, 8, 128), GROUPS,
        slots=slots, max_rank=32, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip


def make_adapter(seed, rank=16):
    ranks = dict.fromkeys((module for group in GROUPS for module in group.modules), rank)
    adapter = memory_cases.make_adapter(GROUPS, ranks, seed, 0.5)
    for pair in adapter.modules.values():
        pair.a.div_(32)
    return adapter


def wait(adapters, key):
    end = time.monotonic() + 20
    while not adapters.ready(key):
        assert time.monotonic() < end
        time.sleep(1e-3)


def check_rows(memory, adapter, slot):
    memory_cases.check_rows(memory, GROUPS, adapter, slot)


def test_host_memory_is_locked_and_given_back():
    memory = make_memory()
    for seed in range(3):
        packed = [memory.pack(make_adapter(10 * seed + n)) for n in range(8)]
        assert all(one.buffer.is_pinned() and one.buffer[5:].is_pinned() for one in packed)
        del packed
        gc.collect()


def test_nothing_waits_for_a_copy_and_a_copy_waits_for_readers():
    memory = make_memory(pages=5, slots=2)
    adapters = AdapterMemory(memory, PagePool(5))
    made = {key: make_adapter(number) for number, key in enumerate("ab")}
    for key, adapter in made.items():
        adapters.add(key, memory.pack(adapter))
    assert 3 <= adapters["a"].page_count <= 5  # both do not fit
    for key in "aba":  # the first call of a kernel may wait
        adapters.load(key)
        wait(adapters, key)
        memory.lora["0.q"].rows_of(0, adapters[key].slot, 16)
    batch = LoraBatch(32, 4, "cuda")
    x = torch.randn(32, WIDTH, device="cuda", dtype=torch.bfloat16)
    y = [torch.zeros(32, w, device="cuda", dtype=torch.bfloat16) for w in GROUPS[0].out_features]
    batch.update([adapters["a"].slot] * 32, adapters.ranks, adapters.scalings)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about 0.1 s in which the reader is only enqueued
    weights = memory.lora["0.q"]
    rows = [weights.rows_of(p, adapters["a"].slot, 16) for p in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.perf_counter()
        assert adapters.load("b")  # into the pages of a, and into its slot
        took = time.perf_counter() - began
        assert not adapters.ready("b")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert took < 0.05
    assert adapters.loading == {"b"} and not {"a"} & (adapters.resident | adapters.dropped)
    wait(adapters, "b")
    for p, module in enumerate(GROUPS[0].modules):
        assert torch.equal(rows[p][0].cpu(), made["a"].modules[module].a.bfloat16())
    check_rows(memory, made["b"], adapters["b"].slot)
    batch.update([adapters["b"].slot] * 32, adapters.ranks, adapters.scalings)
    atmm_reference(y, x, weights, batch)
    pair = made["b"].modules["0.q"]
    delta = (pair.b.bfloat16().double() @ pair.a.bfloat16().double()).cuda() * 0.5
    torch.testing.assert_close(y[0].double(), x.double() @ delta.T, rtol=2e-2, atol=2e-2)


def test_files_are_read_in_another_thread():
    memory = make_memory()
    adapters = AdapterMemory(memory, PagePool(16), host_bytes=0)
    good, bad = make_adapter(1), make_adapter(2)

    def slow():
        time.sleep(0.2)
        return memory.pack(good)

    adapters.add("good", memory.pack(good), slow)
    adapters.add("bad", memory.pack(bad), lambda: memory.pack(good))
    adapters.add("last", memory.pack(make_adapter(3)), lambda: memory.pack(good))
    began = time.perf_counter()
    assert adapters.load("good")
    assert time.perf_counter() - began < 0.1
    assert not adapters.ready("good") and "good" in adapters.loading
    wait(adapters, "good")
    check_rows(memory, good, adapters["good"].slot)
    assert adapters.load("bad")
    with pytest.raises(AdapterError, match="was changed"):
        wait(adapters, "bad")
    assert "bad" in adapters.dropped
    adapters.close()


def test_loads_and_evictions_beside_readers():
    memory = make_memory(pages=12, slots=3)
    adapters = AdapterMemory(memory, PagePool(12))
    made = {str(n): make_adapter(n, rank=4 * (1 + n % 4)) for n in range(9)}
    for key, adapter in made.items():
        adapters.add(key, memory.pack(adapter))
    generator = torch.Generator().manual_seed(0)
    read = []
    for _ in range(60):
        key = str(int(torch.randint(0, 9, (1,), generator=generator)))
        assert adapters.load(key)
        wait(adapters, key)
        torch.cuda._sleep(2_000_000)
        weights = memory.lora[f"{LAYERS - 1}.q"]
        read.append((key, weights.rows_of(1, adapters[key].slot, made[key].rank)))
    for key, (a, b) in read:
        pair = made[key].modules[f"{LAYERS - 1}.k"]
        assert torch.equal(a.cpu(), pair.a.bfloat16())
        assert torch.equal(b.cpu(), pair.b.T.bfloat16())
