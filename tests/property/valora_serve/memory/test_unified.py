"""Unified memory: what lies where; adapters and prefixes load and leave beside KV pages."""

from collections import Counter
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support import memory_cases
from tests.support.random_tests import examples
from valora_serve.catalogue.adapters import Adapter
from valora_serve.errors import AdapterError, BusyError, SettingsError
from valora_serve.memory.block_manager import Owner, PagePool
from valora_serve.memory.unified import (
    AdapterMemory,
    GroupSpec,
    PageShape,
    PrefixMemory,
    UnifiedMemory,
)

GROUPS = (
    GroupSpec("q", ("q", "k", "v"), 12, (16, 6, 5), "text"),
    GroupSpec("o", ("o",), 16, (12,), "text"),
    GroupSpec("fc", ("fc",), 7, (30,), "vision"),
)
SHAPES = {
    module: (width, group.in_features)
    for group in GROUPS
    for module, width in zip(group.modules, group.out_features, strict=True)
}
PAGE = PageShape(block_size=3, layers=2, kv_heads=1, head_dim=5)  # 60 elements
MAX_RANK = 9


def make_memory(pages=40, slots=3, dtype=torch.float32, page=PAGE):
    return UnifiedMemory(
        pages, page, GROUPS, slots=slots, max_rank=MAX_RANK, dtype=dtype, device="cpu"
    )


make_adapter = partial(memory_cases.make_adapter, GROUPS)


def check_rows(memory, adapter, slot):
    memory_cases.check_rows(memory, GROUPS, adapter, slot)


ranks_of = st.dictionaries(st.sampled_from(list(SHAPES)), st.integers(1, MAX_RANK), min_size=1)


@given(
    ranks=ranks_of,
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block=st.integers(2, 12),
    others=st.dictionaries(st.sampled_from(list(SHAPES)), st.sampled_from([0.0, 0.5, 3.0])),
)
@examples(40)
def test_any_adapter_lies_in_any_pages(ranks, seed, dtype, block, others):
    page = PageShape(block, 2, 1, 5)
    memory = make_memory(60, dtype=dtype, page=page)
    adapter = make_adapter(ranks, seed, others=others)
    packed = memory.pack(adapter)
    pages = np.random.default_rng(seed).permutation(60)[: packed.pages].tolist()
    memory.storage[: 60 * page.elements] = 77
    memory.write(packed, pages, slot=1)
    check_rows(memory, adapter, 1)
    mine = memory.storage[: 60 * page.elements].view(60, -1)
    for number in set(range(60)) - set(pages):
        assert (mine[number] == 77).all()
    taken = Counter()
    for group in GROUPS:
        weights = memory.lora[group.name]
        for p, module in enumerate(group.modules):
            sides = ((weights.a_table, group.in_features), (weights.b_table, SHAPES[module][0]))
            for table, width in sides:
                for start in table[p, 1, : ranks.get(module, 0)].tolist():
                    assert start // page.elements == (start + width - 1) // page.elements
                    assert start % page.elements % 8 == 0
                    taken.update(range(start, start + width))
            assert (weights.a_table[p, 0] == 60 * page.elements).all()
    assert max(taken.values()) == 1
    # Pages are full but for what is too short for a row.
    rows = sum(r * (-(-i // 8) + -(-o // 8)) * 8 for m, r in ranks.items() for o, i in [SHAPES[m]])
    assert packed.pages <= -(-rows // (page.elements - 30 + 1))
    assert packed.groups == {g.name for g in GROUPS if set(g.modules) & set(ranks)}


def test_what_does_not_fit_is_refused():
    with pytest.raises(SettingsError, match="blocks of at least 3 tokens"):
        make_memory(page=PageShape(1, 1, 1, 5))
    memory = make_memory(pages=2)
    with pytest.raises(AdapterError, match=r"rank 10, .*max_rank is 9"):
        memory.pack(make_adapter({"q": 10}, 1))
    large = make_adapter({"q": 9, "o": 9}, 1)
    needed = make_memory(pages=99).pack(large).pages
    make_memory(pages=needed + 1).pack(large)
    # One page is for rows that fill a step up.
    with pytest.raises(AdapterError, match=f"needs {needed} pages, there are {needed - 1}"):
        make_memory(pages=needed).pack(large)
    adapter = make_adapter({"q": 1}, 1)
    strange = {"lm_head": adapter.modules["q"]}
    with pytest.raises(AdapterError, match="lm_head"):
        memory.pack(Adapter(adapter.folder, strange, 1, 1.0, adapter.parts, "x", ""))
    adapter.modules["q"].b[3, 0] = 1e6
    with pytest.raises(AdapterError, match=r"beyond the range of torch\.float16"):
        make_memory(dtype=torch.float16).pack(adapter)


def random_prefix(page, tokens, seed):
    """Keys and values, each [layers, kv_heads, tokens, head_dim], whose elements all differ."""
    generator = torch.Generator().manual_seed(seed)
    shape = (page.layers, page.kv_heads, tokens, page.head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return keys, values


def stored(memory, table, tokens):
    """Keys and values as the attention reads them: [2, layers, kv_heads, tokens, head_dim]."""
    size = memory.page.block_size
    found = []
    for part in range(2):
        layers = [
            torch.stack([pages[part][table[i // size], i % size] for i in range(tokens)], 1)
            for pages in memory.kv
        ]
        found.append(torch.stack(layers))
    return torch.stack(found)


@given(
    tokens=st.integers(1, 40), block=st.integers(1, 9), heads=st.integers(1, 3),
    seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
@examples(40)
def test_any_prefix_lies_in_any_pages(tokens, block, heads, seed, dtype):
    page = PageShape(block, 2, heads, 16)
    memory = make_memory(60, dtype=dtype, page=page)
    keys, values = random_prefix(page, tokens, seed)
    packed = memory.pack_prefix("doc", "hash", keys, values)
    assert packed.pages == -(-tokens // block)
    pages = torch.randperm(60, generator=torch.Generator().manual_seed(seed)).tolist()
    table = pages[: packed.pages]
    memory.write_pages(packed, table)
    wanted = torch.stack([keys, values]).to(dtype)
    assert torch.equal(stored(memory, table, tokens), wanted)
    assert torch.equal(memory.read_tokens(table, tokens), wanted)
    memory.copy_page(table[-1], pages[-1])
    assert torch.equal(stored(memory, [*table[:-1], pages[-1]], tokens), wanted)


def test_prefixes_that_do_not_fit_are_refused():
    memory = make_memory(12)
    page = memory.page
    keys, values = random_prefix(page, 40, 0)
    with pytest.raises(AdapterError, match="context doc needs 14 pages, there are 11"):
        memory.pack_prefix("doc", "hash", keys, values)
    with pytest.raises(AdapterError, match=r"has keys of 2 layers with 3 heads of 5, the engine"):
        memory.pack_prefix("doc", "hash", keys.repeat(1, 3, 1, 1), values.repeat(1, 3, 1, 1))
    small = make_memory(60, dtype=torch.float16)
    with pytest.raises(AdapterError, match=r"beyond the range of torch\.float16"):
        small.pack_prefix("doc", "hash", keys, values * 1e6)


class Memory(RuleBasedStateMachine):
    """Loads, pins, evicts and removes adapters and prefixes while KV pages come and go."""

    @initialize(
        pages=st.integers(5, 30), slots=st.integers(1, 4), bound=st.sampled_from([None, 0, 3000])
    )
    def start(self, pages, slots, bound):
        self.memory = make_memory(pages, slots)
        self.pool = PagePool(pages)
        self.pool.take(1, Owner.RESERVED)
        self.adapters = AdapterMemory(self.memory, self.pool, host_bytes=bound)
        self.prefixes = PrefixMemory(self.memory, self.adapters.budget)
        self.sides = {Owner.ADAPTER: self.adapters, Owner.CONTEXT: self.prefixes}
        self.bound, self.largest = bound, 0
        self.known = {}
        self.pins = Counter()
        self.kv = []
        self.used = []  # idle ones, by last use
        self.count = 0

    def side(self, key):
        return self.adapters if key[0] == "a" else self.prefixes

    def one(self, data):
        return data.draw(st.sampled_from(sorted(self.known)))

    def resident(self):
        return {key for side in self.sides.values() for key in side.resident}

    def pages(self, keys):
        return sum(self.side(key)[key].page_count for key in keys)

    def sync(self):
        """Forget the order of use of idle ones that were evicted."""
        self.used = [key for key in self.used if key in self.resident()]

    def add_packed(self, key, known, pack):
        try:
            packed = pack()
        except AdapterError:
            return  # more pages than there are
        self.side(key).add(key, packed, pack)
        self.known[key] = known
        self.largest = max(self.largest, packed.bytes)

    @rule(ranks=ranks_of, scaling=st.sampled_from([0.5, 2.0]))
    def add(self, ranks, scaling):
        self.count += 1
        adapter = make_adapter(ranks, self.count, scaling)
        self.add_packed(f"a{self.count}", adapter, lambda: self.memory.pack(adapter))

    @rule(tokens=st.integers(1, 14))
    def add_prefix(self, tokens):
        self.count += 1
        key, parts = f"p{self.count}", random_prefix(self.memory.page, tokens, self.count)
        pack = partial(self.memory.pack_prefix, key, key, *parts)
        self.add_packed(key, torch.stack(parts), pack)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def add_again(self, data):
        key = self.one(data)
        self.side(key).add(key, None)  # what is there stays, as keys name contents

    @precondition(lambda self: self.known)
    @rule(data=st.data(), urgent=st.booleans())
    def load(self, data, urgent):
        key = self.one(data)
        side, resident = self.side(key), self.resident()
        wanted = set(self.adapters.wanted)
        idle = [k for k in self.used if urgent or k not in wanted]
        alike = [k for k in idle if self.side(k) is side]  # they would free a slot
        room = self.pool.free + self.pages(idle)
        full = side is self.adapters and len(side.resident) == self.memory.slots
        fits = side[key].page_count <= room and not (full and not alike)
        expected = key in resident or fits
        assert side.load(key, urgent=urgent) == expected
        assert side.ready(key) == expected
        gone = resident - self.resident()
        order = sorted(idle, key=lambda k: (k in wanted, self.used.index(k)))
        assert gone <= set(idle)
        last = max(map(order.index, gone), default=0)
        skipped = [k for k in order[:last] if k not in gone]  # prefixes, where a slot is lacking
        assert not skipped or full
        assert all(self.side(k) is not side for k in skipped)
        if not expected:
            assert not gone
        if expected and key not in resident:
            self.used.append(key)
        self.sync()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def pin(self, data):
        key = self.one(data)
        if key not in self.resident():
            return
        self.side(key).pin(key)
        self.pins[key] += 1
        self.used = [other for other in self.used if other != key]

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        key = data.draw(st.sampled_from(sorted(+self.pins)))
        self.side(key).unpin(key)
        self.pins[key] -= 1
        if not self.pins[key]:
            self.used.append(key)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data):
        key = self.one(data)
        if self.pins[key]:
            with pytest.raises(BusyError, match=f"{self.side(key).kind} {key} is in use"):
                self.side(key).remove(key)
            return
        self.side(key).remove(key)
        del self.known[key]
        self.sync()

    @rule(data=st.data())
    def want(self, data):
        wanted = data.draw(st.sets(st.sampled_from(sorted(self.known) or ["-"])))
        for side in self.sides.values():
            side.wanted = frozenset(wanted)

    @rule(count=st.integers(1, 12))
    def take_kv(self, count):
        room = self.pool.free + self.adapters.budget.idle_pages
        before = self.resident()
        pages = self.pool.take(count, Owner.KV)
        assert (pages is None) == (count > room)
        if pages is None:
            assert self.resident() == before
        self.kv += pages or []
        self.sync()

    @precondition(lambda self: self.kv)
    @rule(count=st.integers(1, 12))
    def give_kv(self, count):
        for page in self.kv[:count]:
            self.pool.give(page)
        del self.kv[:count]

    @invariant()
    def whatever_is_used_stays(self):
        resident = self.resident()
        assert set(+self.pins) <= resident <= set(self.known)
        slots = [self.adapters[key].slot for key in self.adapters.resident]
        assert len(set(slots)) == len(slots)
        held = list(self.kv)
        for owner, side in self.sides.items():
            assert not side.loading
            own = [page for key in side.resident for page in side[key].pages]
            assert self.pool.count(owner) == len(own) == self.pages(side.resident)
            held += own
        assert len(set(held)) == len(held) and 0 not in held
        assert self.pool.count(Owner.KV) == len(self.kv)
        assert self.pool.free == self.pool.pages - 1 - len(held)
        budget, idle = self.adapters.budget, [key for key in resident if not self.pins[key]]
        assert budget.idle_pages == self.pages(idle)
        assert sum(map(len, self.sides.values())) == len(self.known)
        for key in self.known:
            assert (key in self.side(key).resident) == (key in resident)
        if self.bound is not None:
            assert budget.held_bytes <= self.bound + self.largest

    @invariant()
    def slots_and_pages_hold_what_they_should(self):
        for keys, _ in self.memory.kv:
            keys[self.kv] = 99.0  # as if somebody wrote to all pages of keys
        free = set(range(self.memory.slots))
        for key in self.adapters.resident:
            slot = self.adapters[key].slot
            free.discard(slot)
            check_rows(self.memory, self.known[key], slot)
            assert self.adapters.ranks[slot] == self.known[key].rank
            assert self.adapters.scalings[slot] == self.known[key].scaling
        assert not self.adapters.ranks[list(free)].any()
        for key in self.prefixes.resident:
            wanted = self.known[key]
            found = stored(self.memory, list(self.prefixes[key].pages), wanted.shape[3])
            assert torch.equal(found, wanted)

    def teardown(self):
        if hasattr(self, "pool"):
            for key in list(self.known):
                for _ in range(self.pins[key]):
                    self.side(key).unpin(key)
                self.side(key).remove(key)
            for page in self.kv:
                self.pool.give(page)
            assert self.pool.free == self.pool.pages - 1
            assert self.adapters.budget.held_bytes == self.adapters.budget.idle_pages == 0


TestMemory = Memory.TestCase
TestMemory.settings = examples(40, stateful_step_count=30)


def test_what_cannot_be_read_again_hits_only_itself():
    memory = make_memory(12, slots=2)
    adapters = AdapterMemory(memory, PagePool(12), host_bytes=0)
    good, bad = make_adapter({"q": 2}, 1), make_adapter({"q": 2}, 2)
    read = Mock(side_effect=[memory.pack(good), OSError("no such file"), memory.pack(bad)])
    adapters.add("good", memory.pack(good), lambda: memory.pack(good))
    adapters.add("bad", memory.pack(bad), read)
    adapters.add("third", memory.pack(make_adapter({"q": 1}, 3)), lambda: memory.pack(bad))
    assert {"good", "bad"} <= adapters.dropped
    assert adapters.load("good")
    for said in ("was changed since", "cannot be read again: no such file"):
        with pytest.raises(AdapterError, match=said):
            adapters.load("bad")
    assert "bad" in adapters.dropped and not adapters.loading
    assert adapters.load("bad") and adapters.ready("bad")
    check_rows(memory, bad, adapters["bad"].slot)
    check_rows(memory, good, adapters["good"].slot)
