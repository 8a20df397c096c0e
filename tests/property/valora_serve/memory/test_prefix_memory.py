"""Prefixes in pages: what lies where, and adapters and prefixes that evict each other."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from tests.property.valora_serve.memory.test_unified import Adapters, make_memory
from tests.support.random_tests import examples
from valora_serve.errors import AdapterError
from valora_serve.memory.adapter_memory import PrefixMemory
from valora_serve.memory.block_manager import Owner
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


class Both(Adapters):
    """Adapters and prefixes that are loaded, pinned, evicted and removed beside KV pages."""

    @initialize(
        pages=st.integers(6, 30), slots=st.integers(1, 3), bound=st.sampled_from([None, 0, 3000])
    )
    def start(self, pages, slots, bound):
        super().start(pages, slots, bound)
        self.prefixes = PrefixMemory(self.memory, self.adapters.budget)
        self.sides[Owner.CONTEXT] = self.prefixes

    def side(self, key):
        return self.adapters if key[0] == "a" else self.prefixes

    @rule(tokens=st.integers(1, 14))
    def add_prefix(self, tokens):
        self.count += 1
        key, parts = f"p{self.count}", random_prefix(self.memory.page, tokens, self.count)
        pack = partial(self.memory.pack_prefix, key, key, *parts)
        self.add_packed(key, torch.stack(parts), pack)

    @invariant()
    def pages_hold_their_prefixes(self):
        for key in self.prefixes.resident if hasattr(self, "pool") else ():
            wanted = self.known[key]
            found = stored(self.memory, list(self.prefixes.held(key)), wanted.shape[3])
            assert torch.equal(found, wanted)


TestBoth = Both.TestCase
TestBoth.settings = examples(20, stateful_step_count=30)
