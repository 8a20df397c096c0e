"""Which page of the unified memory is used for what: KV cache, prefix cache, adapters, or free.

Torch-free, for one thread. A page holds keys and values of `block_size` tokens in all layers, or
rank rows of an adapter (S-LoRA §5.1); all are equal, so that memory does not fragment.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
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
        if pages < 1:
            raise ValueError(f"pages: expected at least 1, got {pages}")
        self.pages = pages
        # Called with a cached page before it is taken for something else.
        self.on_evict: Callable[[int], None] = lambda _: None
        # Called with the number of missing pages when `take` finds too few; may give pages back
        # (idle adapters).
        self.on_short: Callable[[int], object] = lambda _: None
        self._free = list(range(first + pages - 1, first - 1, -1))
        self._cached: dict[int, None] = {}  # in order of last use
        self._users = [0] * (first + pages)
        self._owner = [Owner.FREE] * (first + pages)
        self._counts = [pages, *[0] * (len(Owner) - 1)]

    @property
    def free(self) -> int:
        """Number of pages that can be taken, cached ones included."""
        return len(self._free) + len(self._cached)

    def count(self, owner: Owner) -> int:
        """Return the number of pages with this use."""
        return self._counts[owner]

    def take(self, count: int, owner: Owner) -> list[int] | None:
        """Take pages with one user each, or None if there are too few; cached ones are evicted."""
        if count > self.free:
            self.on_short(count - self.free)
            if count > self.free:
                return None
        free, cached = self._free, self._cached
        taken = []
        for _ in range(count):
            if free:
                page = free.pop()
                self._counts[Owner.FREE] -= 1
            else:
                page = next(iter(cached))
                del cached[page]
                self._counts[Owner.CACHED] -= 1
                self.on_evict(page)
            self._users[page] = 1
            self._owner[page] = owner
            taken.append(page)
        self._counts[owner] += count
        return taken

    def share(self, page: int) -> None:
        """Add a user to a page of keys and values; a cached page is in use again."""
        owner = self._owner[page]
        if owner is Owner.CACHED:
            del self._cached[page]
            self._owner[page] = Owner.KV
            self._counts[Owner.CACHED] -= 1
            self._counts[Owner.KV] += 1
        elif owner is not Owner.KV:
            raise ValueError(f"page {page}: expected keys and values, got {owner.name}")
        self._users[page] += 1

    def uncache(self, page: int) -> None:
        """Free a cached page; a page that is in use is freed when its last user gives it back."""
        if self._owner[page] is Owner.CACHED:
            del self._cached[page]
            self._owner[page] = Owner.FREE
            self._counts[Owner.CACHED] -= 1
            self._counts[Owner.FREE] += 1
            self._free.append(page)

    def give(self, page: int, *, keep: bool = False) -> None:
        """Remove a user from a page; one without users is free, or cached if it is to be kept."""
        users = self._users[page] - 1
        owner = self._owner[page]
        if users < 0 or owner is Owner.RESERVED:
            raise ValueError(f"page {page}: expected one that is in use, got {owner.name}")
        self._users[page] = users
        if users:
            return
        self._counts[owner] -= 1
        if keep:
            self._owner[page] = Owner.CACHED
            self._counts[Owner.CACHED] += 1
            self._cached[page] = None
        else:
            self._owner[page] = Owner.FREE
            self._counts[Owner.FREE] += 1
            self._free.append(page)


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Prompt tokens that stand for an image; `key` hashes it and what changes its encoding."""

    start: int
    stop: int
    key: bytes
    whole: bool = False  # whether they see each other, so that none is right without the others


@dataclass(slots=True)
class _SequencePages:
    """Tokens, pages and keys of an open sequence; see `BlockManager.open`."""

    tokens: Sequence[int]
    salt: bytes
    since: int
    spans: Sequence[ImageSpan]
    blocks: list[int]  # its pages, in the order of its tokens
    shared: int  # pages at their beginning that belong to its context
    keys: list[bytes]  # of its full and computed blocks in the prefix cache, behind `shared`
    root: bytes


class BlockManager:
    """Block tables of sequences, and the prefix cache.

    The key of a full block hashes its tokens, the images behind them and the key of the block
    before; the chain begins with `root` (hashes of tenant and context) and the adapter's hash
    (`salt`), which joins in later if the adapter is applied from a later token on. Only full blocks
    are shared, so a shared block is never written to.
    """

    def __init__(self, pool: PagePool, block_size: int, *, caching: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1, got {block_size}")
        self.pool = pool
        self.block_size = block_size
        self.caching = caching
        self._sequences: dict[Hashable, _SequencePages] = {}
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    def match(
        self,
        tokens: Sequence[int],
        salt: bytes = b"",
        spans: Sequence[ImageSpan] = (),
        limit: int | None = None,
        since: int = 0,
        *,
        shared: int = 0,
        root: bytes = b"",
    ) -> tuple[int, list[int]]:
        """Count the cached tokens of a prompt, `shared` ones included, and the blocks behind."""
        blocks: list[int] = []
        if self.caching:
            longest = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
            key = root
            for index in range(shared, longest // self.block_size):
                key = self._key(self._before(key, salt, since, index), tokens, spans, index)
                block = self._block_of.get(key)
                if block is None:
                    break
                blocks.append(block)
            for span in reversed(spans):
                cached = (shared + len(blocks)) * self.block_size
                if span.whole and span.start < cached < span.stop:
                    del blocks[max(span.start // self.block_size - shared, 0) :]
        return (shared + len(blocks)) * self.block_size, blocks

    def open(
        self,
        sequence: Hashable,
        tokens: Sequence[int],
        salt: bytes = b"",
        spans: Sequence[ImageSpan] = (),
        limit: int | None = None,
        since: int = 0,
        *,
        shared: Sequence[int] = (),
        root: bytes = b"",
    ) -> int:
        """Open a sequence; return the number of its cached tokens, `shared` ones included.

        `tokens` are those of the prompt; the list is kept, and the caller appends to it. `salt` is
        the adapter's hash, which is applied from token `since` on; `spans` are images, by ascending
        start. At most `limit` tokens come from the cache. `shared` are full pages of a context that
        the table begins with; `root`, hashes of tenant and context, begins the chain of keys.
        """
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is open already: close it first")
        cached, blocks = self.match(
            tokens, salt, spans, limit, since, shared=len(shared), root=root
        )
        for block in blocks:
            self.pool.share(block)
        keys = [self._key_of[block] for block in blocks]
        self._sequences[sequence] = _SequencePages(
            tokens, salt, since, spans, [*shared, *blocks], len(shared), keys, root
        )
        return cached

    def pages_needed(self, sequence: Hashable, total_tokens: int) -> int:
        """Return how many pages a sequence must still get to hold this many tokens."""
        held = len(self._sequences[sequence].blocks)
        return max(0, -(-total_tokens // self.block_size) - held)

    def reserve(self, sequence: Hashable, total_tokens: int) -> bool:
        """Take the pages that a sequence needs to hold this many tokens; all, or none and False."""
        blocks = self._sequences[sequence].blocks
        lacking = -(-total_tokens // self.block_size) - len(blocks)
        if lacking > 0:
            taken = self.pool.take(lacking, Owner.KV)
            if taken is None:
                return False
            blocks += taken
        return True

    def commit(self, sequence: Hashable, computed_tokens: int) -> None:
        """Add a sequence's full blocks of computed tokens, counted from its start, to the cache."""
        entry = self._sequences[sequence]
        full = computed_tokens // self.block_size
        if full <= entry.shared + len(entry.keys):
            return
        if computed_tokens > len(entry.tokens) or full > len(entry.blocks):
            raise ValueError(
                f"sequence {sequence}: expected at most {len(entry.tokens)} computed tokens in "
                f"{len(entry.blocks)} blocks, got {computed_tokens}"
            )
        if not self.caching:
            return
        for index in range(entry.shared + len(entry.keys), full):
            last = entry.keys[-1] if entry.keys else entry.root
            before = self._before(last, entry.salt, entry.since, index)
            key = self._key(before, entry.tokens, entry.spans, index)
            entry.keys.append(key)
            # If two sequences computed the same block at once, the first one is in the cache.
            if key not in self._block_of:
                block = entry.blocks[index]
                self._block_of[key] = block
                self._key_of[block] = key

    def table(self, sequence: Hashable) -> list[int]:
        """Return the blocks of a sequence, in the order of its tokens; do not change the list."""
        return self._sequences[sequence].blocks

    def close(self, sequence: Hashable) -> list[bytes]:
        """Close a sequence, whose blocks stay cached until they are evicted; return their keys."""
        entry = self._sequences.pop(sequence)
        # Last block first, so that the end of a prefix is evicted before its beginning.
        for block in reversed(entry.blocks[entry.shared :]):
            self.pool.give(block, keep=block in self._key_of)
        return entry.keys

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove blocks from the cache by their keys, as their content is not to be used again."""
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is not None:
                del self._key_of[block]
                self.pool.uncache(block)

    def _before(self, key: bytes, salt: bytes, since: int, index: int) -> bytes:
        """Key of the block before `index`, and the salt, which joins in at token `since`."""
        if index != since // self.block_size:
            return key
        offset = since % self.block_size
        return key + salt + (b"|%d" % offset if salt and offset else b"")

    def _key(
        self, before: bytes, tokens: Sequence[int], spans: Sequence[ImageSpan], index: int
    ) -> bytes:
        """Return the key of block `index`, given the key of the block before it, or the salt."""
        start, stop = index * self.block_size, (index + 1) * self.block_size
        digest = hashlib.sha256(b"%d|" % len(before))  # so that no salt runs into the tokens
        digest.update(before)
        digest.update(array("q", tokens[start:stop]).tobytes())
        for span in spans:
            if span.start < stop and span.stop > start:
                offset = (span.start - start, min(span.stop, stop) - start, len(span.key))
                digest.update(b"|%d|%d|%d|" % offset)
                digest.update(span.key)
        return digest.digest()

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
