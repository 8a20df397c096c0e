"""Prefixes in pages: what lies where, and adapters and prefixes that evict each other."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.property.valora_serve.memory.test_unified import check_rows, make_adapter, make_memory
from tests.support.random_tests import examples
from valora_serve.errors import AdapterError, BusyError
from valora_serve.memory.adapter_memory import AdapterMemory, PrefixMemory
from valora_serve.memory.block_manager import Owner, PagePool
from valora_serve.memory.unified import PageShape


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


def test_what_does_not_fit_is_refused():
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


class Both(RuleBasedStateMachine):
    """Adapters and prefixes that are loaded, pinned, evicted and removed beside KV pages."""

    @initialize(
        pages=st.integers(6, 30), slots=st.integers(1, 3), bound=st.sampled_from([None, 0, 3000])
    )
    def start(self, pages, slots, bound):
        self.memory = make_memory(pages, slots)
        self.pool = PagePool(pages)
        self.pool.take(1, Owner.RESERVED)
        self.adapters = AdapterMemory(self.memory, self.pool, host_bytes=bound)
        self.prefixes = PrefixMemory(self.memory, self.adapters.budget)
        self.known = {}
        self.pins = Counter()
        self.kv = []
        self.count = 0

    def side(self, key):
        return self.adapters if key[0] == "a" else self.prefixes

    def one(self, data):
        found = data.draw(st.sampled_from(sorted(self.known)))
        return found

    @rule(rank=st.integers(1, 9))
    def add_adapter(self, rank):
        self.count += 1
        adapter = make_adapter({"q": rank}, self.count)
        try:
            packed = self.memory.pack(adapter)
        except AdapterError:
            return  # more pages than there are
        self.adapters.add(f"a{self.count}", packed, lambda: self.memory.pack(adapter))
        self.known[f"a{self.count}"] = adapter

    @rule(tokens=st.integers(1, 14))
    def add_prefix(self, tokens):
        self.count += 1
        key = f"p{self.count}"
        parts = random_prefix(self.memory.page, tokens, self.count)

        def pack():
            return self.memory.pack_prefix(key, key, *parts)

        try:
            packed = pack()
        except AdapterError:
            return
        self.prefixes.add(key, packed, pack)
        self.known[key] = torch.stack(parts)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), urgent=st.booleans())
    def load(self, data, urgent):
        key = self.one(data)
        side = self.side(key)
        idle = [
            k for k in self.known
            if k in self.side(k).resident and not self.pins[k]
            and (urgent or k not in self.side(k).wanted)
        ]  # fmt: skip
        room = self.pool.free + sum(self.side(k).pages(k) for k in idle)
        slots = self.memory.slots - len(self.adapters.resident) + sum(k[0] == "a" for k in idle)
        expected = key in side.resident or (
            side.pages(key) <= room and (key[0] == "p" or slots > 0)
        )
        before = self.adapters.resident | self.prefixes.resident
        assert side.load(key, urgent=urgent) == expected
        gone = before - self.adapters.resident - self.prefixes.resident
        assert gone <= set(idle)
        if not expected:
            assert not gone

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def pin(self, data):
        key = self.one(data)
        if key in self.side(key).resident:
            self.side(key).pin(key)
            self.pins[key] += 1

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        key = data.draw(st.sampled_from(sorted(+self.pins)))
        self.side(key).unpin(key)
        self.pins[key] -= 1

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

    @rule(data=st.data())
    def want(self, data):
        wanted = data.draw(st.sets(st.sampled_from(sorted(self.known) or ["-"])))
        self.adapters.wanted = self.prefixes.wanted = frozenset(wanted)

    @rule(count=st.integers(1, 12))
    def take_kv(self, count):
        room = self.pool.free + self.adapters.budget.idle_pages
        pages = self.pool.take(count, Owner.KV)
        assert (pages is None) == (count > room)
        self.kv += pages or []

    @precondition(lambda self: self.kv)
    @rule(count=st.integers(1, 12))
    def give_kv(self, count):
        for page in self.kv[:count]:
            self.pool.give(page)
        del self.kv[:count]

    @invariant()
    def each_has_its_own_pages_and_content(self):
        if not hasattr(self, "pool"):
            return
        for keys, _ in self.memory.kv:
            keys[self.kv] = 99.0  # as if requests wrote to their pages
        held = list(self.kv)
        for side, owner in ((self.adapters, Owner.ADAPTER), (self.prefixes, Owner.CONTEXT)):
            assert {key for key in +self.pins if self.side(key) is side} <= side.resident
            pages = [page for key in side.resident for page in side.held(key)]
            assert self.pool.count(owner) == len(pages)
            held += pages
        assert len(set(held)) == len(held) and 0 not in held
        assert self.pool.free == self.pool.pages - 1 - len(held)
        for key in self.adapters.resident:
            check_rows(self.memory, self.known[key], self.adapters.slot(key))
        for key in self.prefixes.resident:
            wanted = self.known[key]
            found = stored(self.memory, list(self.prefixes.held(key)), wanted.shape[3])
            assert torch.equal(found, wanted)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for key in list(self.known):
            for _ in range(self.pins[key]):
                self.side(key).unpin(key)
            self.side(key).remove(key)
        for page in self.kv:
            self.pool.give(page)
        assert self.pool.free == self.pool.pages - 1
        assert self.adapters.budget.held_bytes == self.adapters.budget.idle_pages == 0


TestBoth = Both.TestCase
TestBoth.settings = examples(20, stateful_step_count=30)
