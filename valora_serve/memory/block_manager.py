"""Who owns which page of the unified memory: sequences, the prefix cache, adapters.

Plain bookkeeping without torch, for one thread. A page holds the keys and values of `block_size`
tokens in all layers, or rank rows of an adapter (S-LoRA §5.1): all pages are equal, so whatever
asks for pages gets them while enough are free, and nothing fragments.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


class Owner(IntEnum):
    """What a page is used for."""

    FREE = 0
    KV = 1
    ADAPTER = 2
    CACHED = 3
    """Keys and values that no sequence uses now; taken back when pages are short."""
    RESERVED = 4
    """Never given back: padding rows write here, absent rank rows read from here."""


class PagePool:
    """Equal pages: which are free, what the others are used for, and by how many.

    Args:
        pages: How many there are.

    Attributes:
        pages: The same.
        on_evict: Told of a cached page before it is given to somebody else.
        on_short: Told how many pages are lacking, so that it may give some back (idle adapters).
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"pages: expected at least 1, got {pages}")
        self.pages = pages
        self.on_evict: Callable[[int], None] = lambda _: None
        self.on_short: Callable[[int], None] = lambda _: None
        self._free = list(range(pages - 1, -1, -1))
        self._cached: dict[int, None] = {}  # in order of last use
        self._users = [0] * pages
        self._owner = [Owner.FREE] * pages
        self._counts = [pages, 0, 0, 0, 0]

    @property
    def free(self) -> int:
        """Pages that can be taken, cached ones included."""
        return len(self._free) + len(self._cached)

    def count(self, owner: Owner) -> int:
        """Pages of one kind of owner."""
        return self._counts[owner]

    def owner(self, page: int) -> Owner:
        """What a page is used for."""
        return self._owner[page]

    def users(self, page: int) -> int:
        """How many use a page."""
        return self._users[page]

    def take(self, count: int, owner: Owner) -> list[int] | None:
        """Get pages, all or none; cached ones are evicted, least recently used first.

        Args:
            count: How many.
            owner: For what: KV, ADAPTER or RESERVED.

        Returns:
            The pages, each with one user, or None if fewer are free.
        """
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
        """Have one more user of a page of keys and values, which may be a cached one."""
        owner = self._owner[page]
        if owner is Owner.CACHED:
            del self._cached[page]
            self._owner[page] = Owner.KV
            self._counts[Owner.CACHED] -= 1
            self._counts[Owner.KV] += 1
        elif owner is not Owner.KV:
            raise ValueError(f"page {page}: expected keys and values, got {owner.name}")
        self._users[page] += 1

    def give(self, page: int, *, keep: bool = False) -> None:
        """Have one user less of a page.

        Args:
            page: Which one.
            keep: Without users, keep what it holds until the page is needed.
        """
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
class Span:
    """Prompt tokens that stand for something else, e.g. an image.

    Attributes:
        start: First token.
        stop: One past the last.
        key: Content hash of what they stand for, with everything that changes what the model sees
            of it (e.g. an adapter of the vision tower).
    """

    start: int
    stop: int
    key: bytes


@dataclass(slots=True)
class _Sequence:
    tokens: Sequence[int]
    salt: bytes
    spans: Sequence[Span]
    blocks: list[int]
    keys: list[bytes] = field(default_factory=list)  # of its full and computed blocks


class BlockManager:
    """Block tables of sequences, and the prefix cache.

    A full block is known by a hash of its tokens, of the images behind them, and of the block
    before it; the first one's by the adapter's content hash (`salt`). Blocks that several
    sequences share are full, so nobody writes to them.

    Args:
        pool: Where pages come from.
        block_size: Tokens a block.
        caching: Whether computed blocks are found again.
    """

    def __init__(self, pool: PagePool, block_size: int, *, caching: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1, got {block_size}")
        self.pool = pool
        self.block_size = block_size
        self.caching = caching
        self._sequences: dict[Hashable, _Sequence] = {}
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        """Number of open sequences."""
        return len(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    @property
    def free_pages(self) -> int:
        """Pages that can be had, cached ones included, those of idle adapters not."""
        return self.pool.free

    def fits(self, pages: int) -> bool:
        """Whether so many pages can be had now without evicting an adapter."""
        return pages <= self.pool.free

    def match(
        self,
        tokens: Sequence[int],
        salt: bytes = b"",
        spans: Sequence[Span] = (),
        limit: int | None = None,
    ) -> tuple[int, list[int]]:
        """Look up how much of a prompt is cached; nothing changes.

        Args:
            tokens: The prompt.
            salt: Content hash of the adapter, empty for none.
            spans: Images and the like among the tokens, by rising start.
            limit: Tokens that may come from the cache at most; a head that reads visual tokens
                needs those computed.

        Returns:
            Cached tokens from the start (whole blocks, never all of the prompt: the last token
            must be computed), and their blocks.
        """
        blocks = [self._block_of[key] for key in self._match(tokens, salt, spans, limit)]
        return len(blocks) * self.block_size, blocks

    def open(
        self,
        sequence: Hashable,
        tokens: Sequence[int],
        salt: bytes = b"",
        spans: Sequence[Span] = (),
        limit: int | None = None,
    ) -> int:
        """Begin a sequence; its table starts with the cached blocks, which it now holds.

        Args:
            sequence: Its id.
            tokens: Prompt; the list is kept, and the caller appends what is generated.
            salt: As in `match`.
            spans: As in `match`.
            limit: As in `match`.

        Returns:
            Tokens that need not be computed.

        Raises:
            ValueError: A sequence of this id is open.
        """
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence}: is open already, close it first")
        keys = self._match(tokens, salt, spans, limit)
        blocks = [self._block_of[key] for key in keys]
        for block in blocks:
            self.pool.share(block)
        self._sequences[sequence] = _Sequence(tokens, salt, spans, blocks, keys)
        return len(blocks) * self.block_size

    def pages_needed(self, sequence: Hashable, total_tokens: int) -> int:
        """Pages that a sequence lacks for so many tokens."""
        held = len(self._sequences[sequence].blocks)
        return max(0, -(-total_tokens // self.block_size) - held)

    def reserve(self, sequence: Hashable, total_tokens: int) -> bool:
        """Make a sequence's table long enough for so many tokens.

        Returns:
            False if the pages are not there; nothing has changed then.
        """
        blocks = self._sequences[sequence].blocks
        lacking = -(-total_tokens // self.block_size) - len(blocks)
        if lacking > 0:
            taken = self.pool.take(lacking, Owner.KV)
            if taken is None:
                return False
            blocks += taken
        return True

    def commit(self, sequence: Hashable, computed_tokens: int) -> None:
        """Say how many tokens of a sequence are computed; full blocks can be found from now on.

        Raises:
            ValueError: More than its tokens, or than its table has room for.
        """
        entry = self._sequences[sequence]
        full = computed_tokens // self.block_size
        if full <= len(entry.keys):
            return
        if computed_tokens > len(entry.tokens) or full > len(entry.blocks):
            raise ValueError(
                f"sequence {sequence}: expected at most {len(entry.tokens)} computed tokens in "
                f"{len(entry.blocks)} blocks, got {computed_tokens}"
            )
        if not self.caching:
            return
        for index in range(len(entry.keys), full):
            before = entry.keys[-1] if entry.keys else entry.salt
            key = self._key(before, entry.tokens, entry.spans, index)
            entry.keys.append(key)
            # Two that computed the same at the same time both keep theirs; one is found.
            if key not in self._block_of:
                block = entry.blocks[index]
                self._block_of[key] = block
                self._key_of[block] = key

    def table(self, sequence: Hashable) -> list[int]:
        """Blocks of a sequence in the order of its tokens: the manager's own list, only read it."""
        return self._sequences[sequence].blocks

    def close(self, sequence: Hashable) -> None:
        """End a sequence; what it computed stays findable until its pages are needed.

        Raises:
            KeyError: None of this id is open.
        """
        blocks = self._sequences.pop(sequence).blocks
        # From the end, so that the later part of a prefix is evicted before what leads to it.
        for block in reversed(blocks):
            self.pool.give(block, keep=block in self._key_of)

    def _match(
        self, tokens: Sequence[int], salt: bytes, spans: Sequence[Span], limit: int | None
    ) -> list[bytes]:
        """Keys of the cached blocks that a prompt starts with."""
        keys: list[bytes] = []
        if not self.caching:
            return keys
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        key = salt
        for index in range(most // self.block_size):
            key = self._key(key, tokens, spans, index)
            if key not in self._block_of:
                break
            keys.append(key)
        return keys

    def _key(
        self, before: bytes, tokens: Sequence[int], spans: Sequence[Span], index: int
    ) -> bytes:
        """Hash of block `index` of a sequence, given that of the block before it, or the salt."""
        start, stop = index * self.block_size, (index + 1) * self.block_size
        digest = hashlib.sha256(b"%d|" % len(before))  # so that no salt runs into the tokens
        digest.update(before)
        digest.update(array("q", tokens[start:stop]).tobytes())
        for span in spans:
            if span.start < stop and span.stop > start:
                place = (span.start - start, min(span.stop, stop) - start, len(span.key))
                digest.update(b"|%d|%d|%d|" % place)
                digest.update(span.key)
        return digest.digest()

    def _forget(self, block: int) -> None:
        """A cached block's page goes to somebody else."""
        del self._block_of[self._key_of.pop(block)]
