"""Random operations: no page is lost or owned twice, and cached pages hold what their key says."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.random_tests import examples
from valora_serve.memory.block_manager import BlockManager, BlockTable, ImageSpan, Owner, PagePool

SALTS = (b"", b"adapter one", b"adapter two")
TENANTS = (b"", b"tenant one", b"tenant two")
IMAGES = (b"red", b"blue")


class Naive:
    """A model of a sequence: for each token what its keys and values depend on."""

    def __init__(self, tokens, salt, spans, tenant):
        self.tokens, self.salt, self.spans, self.tenant = list(tokens), salt, spans, tenant
        self.table = BlockTable(self.tokens, salt, spans, root=tenant)
        self.computed = 0

    def prefix(self, stop):
        """Return whose the first `stop` tokens are, and what keys and values depend on."""
        images = [(s.start, min(s.stop, stop), s.key) for s in self.spans if s.start < stop]
        return (self.tenant, self.salt, tuple(self.tokens[:stop]), tuple(images))


class Pages(RuleBasedStateMachine):
    """Compares the block manager with a model that records what every page holds."""

    @initialize(
        pages=st.integers(1, 24),
        block=st.integers(1, 4),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, pages, block, caching):
        self.pool = PagePool(pages)
        self.manager = BlockManager(self.pool, block, caching=caching)
        self.block, self.caching = block, caching
        self.sequences = []
        self.adapters = []
        self.holds = {}  # page: prefix that was computed into it
        self.found = {}  # prefix: page where it can be found
        self.asked = []

    def overwritten(self, pages):
        for page in pages:
            if self.found.get(self.holds.get(page)) == page:
                del self.found[self.holds[page]]
            self.holds.pop(page, None)

    def expected(self, naive, most):
        pages = []
        if self.caching:
            for stop in range(self.block, most + 1, self.block):
                if naive.prefix(stop) not in self.found:
                    break
                pages.append(self.found[naive.prefix(stop)])
        while any(s.whole and s.start < len(pages) * self.block < s.stop for s in naive.spans):
            pages.pop()
        return pages

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from(SALTS),
        image=st.none() | st.tuples(st.integers(0, 8), st.integers(1, 6), st.sampled_from(IMAGES)),
        limit=st.none() | st.integers(0, 10),
        tenant=st.sampled_from(TENANTS),
        whole=st.booleans(),
        again=st.integers(0, 3),
    )
    def open(self, tokens, salt, image, limit, tenant, whole, again):
        """Open a sequence, one of the last ones `again` or a new one."""
        if 0 < again <= len(self.asked):
            tokens, salt, image, tenant, whole = self.asked[-again]
        self.asked.append((tokens, salt, image, tenant, whole))
        spans = []
        if image and image[0] < len(tokens):
            spans = [ImageSpan(image[0], min(image[0] + image[1], len(tokens)), image[2], whole)]
        naive = Naive(tokens, salt, spans, tenant)
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        pages = self.expected(naive, most)
        assert len(pages) * self.block == self.manager.open(naive.table, limit)
        assert naive.table.blocks == pages
        naive.computed = len(pages) * self.block
        self.sequences.append(naive)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), extra=st.integers(0, 14))
    def advance(self, data, extra):
        """Reserve pages, compute some tokens, and perhaps generate one."""
        naive = data.draw(st.sampled_from(self.sequences))
        total = min(naive.computed + extra, len(naive.tokens))
        before, free = list(naive.table.blocks), self.pool.free
        needed = max(0, -(-total // self.block) - len(before))
        assert self.manager.pages_needed(naive.table, total) == needed
        assert self.manager.reserve(naive.table, total) == (needed <= free)
        after = naive.table.blocks
        if needed > free:
            assert after == before
            return
        assert after[: len(before)] == before and len(after) == len(before) + needed
        self.overwritten(after[len(before) :])
        for index in range(naive.computed // self.block, total // self.block):
            prefix = naive.prefix((index + 1) * self.block)
            self.holds[after[index]] = prefix
            if self.caching:
                self.found.setdefault(prefix, after[index])
        naive.computed = total
        self.manager.commit(naive.table, total)
        if total == len(naive.tokens):
            naive.tokens.append(extra % 2)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), forget=st.booleans())
    def close(self, data, forget):
        naive = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.manager.close(naive.table)
        keys = naive.table.keys
        assert len(keys) == (naive.computed // self.block if self.caching else 0)
        if forget:
            self.manager.forget(keys)
            for index in range(len(keys)):
                self.found.pop(naive.prefix((index + 1) * self.block), None)

    @rule(count=st.integers(1, 8))
    def take(self, count):
        free = self.pool.free
        pages = self.pool.take(count, Owner.ADAPTER)
        assert (pages is None) == (count > free)
        if pages is not None:
            assert len(pages) == count
            self.overwritten(pages)
            self.adapters.append(pages)

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def give(self, data):
        for page in self.adapters.pop(data.draw(st.integers(0, len(self.adapters) - 1))):
            self.pool.give(page)

    @invariant()
    def every_page_has_its_owners(self):
        users = Counter(page for one in self.sequences for page in one.table.blocks)
        held = Counter(page for pages in self.adapters for page in pages)
        assert all(count == 1 for count in held.values())
        assert not users.keys() & held.keys()
        for page in range(self.pool.pages):
            assert self.pool._users[page] == users[page] + held[page]
            owner = self.pool._owner[page]
            assert (owner == Owner.KV) == (page in users)
            assert (owner == Owner.ADAPTER) == (page in held)
        assert self.pool.free == self.pool.pages - len(users) - len(held)
        owners = Counter(self.pool._owner)
        assert all(self.pool.count(owner) == owners[owner] for owner in Owner)

    @invariant()
    def tables_hold_what_was_computed(self):
        for naive in self.sequences:
            for index in range(naive.computed // self.block):
                page = naive.table.blocks[index]
                assert self.holds[page] == naive.prefix((index + 1) * self.block)

    def teardown(self):
        if hasattr(self, "pool"):
            for naive in self.sequences:
                self.manager.close(naive.table)
            for pages in self.adapters:
                for page in pages:
                    self.pool.give(page)
            assert self.pool.free == self.pool.pages


TestPages = Pages.TestCase
TestPages.settings = examples(100, stateful_step_count=60)


def compute(manager, tokens, *about, **options):
    """Compute a prompt and close its sequence."""
    table = BlockTable(tokens, *about, **options)
    manager.open(table)
    assert manager.reserve(table, len(tokens))
    manager.commit(table, len(tokens))
    manager.close(table)


def cached(manager, tokens, *about, **options):
    """How many tokens of a prompt are cached."""
    table = BlockTable(tokens, *about, **options)
    found = manager.open(table)
    manager.close(table)
    return found


CAT_AND_DOG = [ImageSpan(1, 3, b"cat"), ImageSpan(3, 5, b"dog")]


@pytest.mark.parametrize(
    ("salt", "spans", "found"),
    [
        (b"one", CAT_AND_DOG, 4), (b"two", CAT_AND_DOG, 0), (b"", CAT_AND_DOG, 0),
        (b"one", [ImageSpan(1, 3, b"dog"), ImageSpan(3, 5, b"cat")], 0),
        (b"one", [ImageSpan(1, 4, b"cat"), ImageSpan(4, 5, b"dog")], 2), (b"one", [], 0),
    ],
)  # fmt: skip
def test_other_adapter_or_image_or_place_of_it_is_another_prefix(salt, spans, found):
    manager, tokens = BlockManager(PagePool(20), 2), [7, 9, 9, 9, 9, 1]
    compute(manager, tokens, b"one", CAT_AND_DOG)
    assert cached(manager, tokens, salt, spans) == found


def test_the_end_of_a_prefix_is_evicted_before_its_start():
    pool = PagePool(4)
    manager = BlockManager(pool, 1)
    compute(manager, [1, 2, 3, 4])
    assert pool.take(2, Owner.ADAPTER) is not None
    assert cached(manager, [1, 2, 3, 4, 5]) == 2
    assert pool.count(Owner.CACHED) == 2


def test_least_recently_used_goes_first():
    pool = PagePool(4)
    manager = BlockManager(pool, 2)
    compute(manager, [1, 1])
    compute(manager, [2, 2])
    assert cached(manager, [1, 1, 1]) == 2
    assert pool.take(3, Owner.ADAPTER) is not None
    assert cached(manager, [1, 1, 1]) == 2
    assert cached(manager, [2, 2, 2]) == 0


def test_where_an_adapter_begins_counts():
    manager = BlockManager(PagePool(20), 4)
    tokens = list(range(9))
    compute(manager, tokens, b"one", since=5)
    assert cached(manager, tokens, b"one", since=5) == 8
    assert cached(manager, tokens, b"one", since=6) == 4  # token 5 has the base model's here
    assert cached(manager, tokens, b"two", since=5) == 4
    assert cached(manager, tokens) == 4
    assert cached(manager, tokens, b"one") == 0
    compute(manager, tokens, b"one")
    assert cached(manager, tokens, b"one", since=3) == 0


def test_the_pages_of_a_context_stand_first_and_stay_its_own():
    pool = PagePool(20)
    manager = BlockManager(pool, 4)
    held = pool.take(2, Owner.CONTEXT)
    # The first 10 are the context's, two of them in a page of each request.
    tokens, about = list(range(15)), {"since": 10, "shared": held, "root": b"doc"}
    one, two = BlockTable(tokens, **about), BlockTable(tokens, **about)
    assert manager.open(one) == 8
    assert manager.reserve(one, 15)
    assert one.blocks[:2] == held
    manager.commit(one, 15)
    manager.open(two)
    assert two.blocks == one.blocks[:3]
    for other in ({"root": b"other"}, {"salt": b"one"}):
        assert cached(manager, tokens, **about | other) == 8
    assert cached(manager, tokens) == 0
    manager.close(one)
    manager.close(two)
    assert pool.count(Owner.CONTEXT) == 2 and pool.count(Owner.CACHED) == 1
