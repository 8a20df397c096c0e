"""Which page of the unified memory is used for what: KV cache, prefix cache, adapters, or free.

Torch-free, for one thread. A page holds keys and values of `block_size` tokens in all layers, or
rank rows of an adapter (S-LoRA §5.1); all are equal, so that memory does not fragment.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class Owner(IntEnum):
    """Use of a page of the memory pool."""

    FREE = 0
    KV = 1
    ADAPTER = 2
    CACHED = 3  # keys and values that no sequence uses; evicted when pages are short
    RESERVED = 4  # never given back: rows that pad a CUDA graph write here
    CONTEXT = 5  # keys and values of a context, which all requests about it read


class PagePool:
    """Free and used pages, with the use and the number of users of each."""

    def __init__(self, pages: int, first: int = 0) -> None:
        self.pages = pages
        # Called with a cached page before it is taken for something else.
        self.on_evict: Callable[[int], None] = lambda _: None
        # Called with the number of missing pages when `take` finds too few; may give pages back
        # (idle adapters).
        self.on_short: Callable[[int], object] = lambda _: None
        # Pages that can be taken, in this order: given back, never used, cached by their last use.
        self._given: list[int] = []
        self._unused = iter(range(first, first + pages))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._users, self._owner = [0] * (first + pages), bytearray(first + pages)
        # A small model leaves a large GPU millions of pages, too many to count after each step.
        self._counts = [0] * len(Owner)
        self._counts[Owner.FREE] = pages

    @property
    def free(self) -> int:
        """Number of pages that can be taken, cached ones included."""
        return self.count(Owner.FREE) + self.count(Owner.CACHED)

    def count(self, owner: Owner) -> int:
        """Return the number of pages with this use."""
        return self._counts[owner]

    def take(self, count: int, owner: Owner) -> list[int] | None:
        """Take pages with one user each, or None if there are too few; cached ones are evicted."""
        if count > self.free:
            self.on_short(count - self.free)
            if count > self.free:
                return None
        return [self._take(owner) for _ in range(count)]

    def _take(self, owner: Owner) -> int:
        page = self._given.pop() if self._given else next(self._unused, None)
        if page is None:
            page, _ = self._cached.popitem(last=False)
            self.on_evict(page)
        self._users[page] = 1
        self._own(page, owner)
        return page

    def _own(self, page: int, owner: Owner) -> None:
        self._counts[self._owner[page]] -= 1
        self._counts[owner] += 1
        self._owner[page] = owner

    def share(self, page: int) -> None:
        """Add a user to a page of keys and values; a cached page is in use again."""
        if self._owner[page] == Owner.CACHED:
            del self._cached[page]
            self._own(page, Owner.KV)
        assert self._owner[page] == Owner.KV
        self._users[page] += 1

    def give(self, page: int, *, keep: bool = False) -> None:
        """Remove a user from a page; one without users is free, or cached if it is to be kept."""
        assert self._users[page] and self._owner[page] != Owner.RESERVED
        self._users[page] -= 1
        if not self._users[page]:
            self._own(page, Owner.CACHED)
            self._cached[page] = None
            if not keep:
                self.uncache(page)

    def uncache(self, page: int) -> None:
        """Free a cached page; a page that is in use is freed when its last user gives it back."""
        if self._owner[page] == Owner.CACHED:
            self._own(page, Owner.FREE)
            del self._cached[page]
            self._given.append(page)


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Prompt tokens that stand for an image; `key` hashes it and what changes its encoding."""

    start: int
    stop: int
    key: bytes
    whole: bool = False  # whether they see each other, so that none is right without the others


@dataclass(slots=True, eq=False)
class BlockTable:
    """The pages of a sequence, and what the keys and values in them depend on."""

    tokens: Sequence[int]  # of the prompt; the caller appends to it
    salt: bytes = b""  # the adapter's hash
    spans: Sequence[ImageSpan] = ()  # images, by ascending start
    since: int = 0  # token that the adapter is applied from
    shared: Sequence[int] = ()  # full pages of a context that its pages begin with
    root: bytes = b""  # hashes of tenant and context
    # Its pages while it is open, in the order of its tokens.
    blocks: list[int] = field(default_factory=list)
    # Of its full and computed blocks in the prefix cache, behind the shared ones.
    keys: list[bytes] = field(default_factory=list)


class BlockManager:
    """Block tables of sequences, and the prefix cache.

    The key of a full block hashes its tokens, the images behind them and the key of the block
    before; the chain begins with `root` (hashes of tenant and context) and the adapter's hash
    (`salt`), which joins in later if the adapter is applied from a later token on. Only full blocks
    are shared, so a shared block is never written to.
    """

    def __init__(self, pool: PagePool, block_size: int, *, caching: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.caching = caching
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def open(self, own: BlockTable, limit: int | None = None) -> int:
        """Open a sequence; return the number of its cached tokens, shared ones included.

        At most `limit` tokens come from the cache.
        """
        own.blocks, own.keys, shared = [*own.shared], [], len(own.shared)
        longest = len(own.tokens) - 1 if limit is None else min(limit, len(own.tokens) - 1)
        for index in range(shared, longest // self.block_size if self.caching else 0):
            key = self._key(own, index)
            if key not in self._block_of:
                break
            own.keys.append(key)
            own.blocks.append(self._block_of[key])
        for span in reversed(own.spans):
            if span.whole and span.start < len(own.blocks) * self.block_size < span.stop:
                first = max(span.start // self.block_size, shared)
                del own.blocks[first:], own.keys[first - shared :]
        for block in own.blocks[shared:]:
            self.pool.share(block)
        return len(own.blocks) * self.block_size

    def pages_needed(self, own: BlockTable, total_tokens: int) -> int:
        """Return how many pages a sequence must still get to hold this many tokens."""
        return max(0, -(-total_tokens // self.block_size) - len(own.blocks))

    def reserve(self, own: BlockTable, total_tokens: int) -> bool:
        """Take the pages that a sequence needs to hold this many tokens; all, or none and False."""
        taken = self.pool.take(self.pages_needed(own, total_tokens), Owner.KV)
        own.blocks += taken or ()
        return taken is not None

    def commit(self, own: BlockTable, computed_tokens: int) -> None:
        """Add a sequence's full blocks of computed tokens, counted from its start, to the cache."""
        if not self.caching:
            return
        for index in range(len(own.shared) + len(own.keys), computed_tokens // self.block_size):
            key, block = self._key(own, index), own.blocks[index]
            own.keys.append(key)
            # If two sequences computed the same block at once, the first one is in the cache.
            if self._block_of.setdefault(key, block) == block:
                self._key_of[block] = key

    def close(self, own: BlockTable) -> None:
        """Close a sequence; the blocks of its `keys` stay cached until they are evicted."""
        # Last block first, so that the end of a prefix is evicted before its beginning.
        for block in reversed(own.blocks[len(own.shared) :]):
            self.pool.give(block, keep=block in self._key_of)
        own.blocks = []

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove blocks from the cache by their keys, as their content is not to be used again."""
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is not None:
                del self._key_of[block]
                self.pool.uncache(block)

    def _key(self, own: BlockTable, index: int) -> bytes:
        """Return the key of block `index`; the keys before it are there."""
        start, stop = index * self.block_size, (index + 1) * self.block_size
        before = own.keys[-1] if own.keys else own.root
        if start <= own.since < stop:  # where the salt joins in
            late = own.since - start
            before += own.salt + (b"|%d" % late if own.salt and late else b"")
        digest = hashlib.sha256(b"%d|" % len(before))  # so that no salt runs into the tokens
        digest.update(before)
        digest.update(array("q", own.tokens[start:stop]).tobytes())
        for span in own.spans:
            if span.start < stop and span.stop > start:
                offset = (span.start - start, min(span.stop, stop) - start, len(span.key))
                digest.update(b"|%d|%d|%d|" % offset)
                digest.update(span.key)
        return digest.digest()

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
