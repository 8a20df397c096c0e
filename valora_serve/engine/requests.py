"""Waiting and running requests, and the memory that running ones hold."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from valora_serve.engine.sequence import SequenceState
from valora_serve.errors import ServeError
from valora_serve.memory.block_manager import BlockManager, SequencePages
from valora_serve.memory.unified import AdapterMemory, PrefixMemory
from valora_serve.orchestrator.decision import RequestView

LOOK_AHEAD: Final = 256  # waiting requests whose prefixes are loaded before it is their turn
PREFETCHES: Final = 32  # most prefixes that are loaded at a time


class Requests:
    """All unfinished requests, and the memory that they hold.

    A running request holds a slot in the batch, KV pages, and pins on its adapter and on the
    prefix of its context. It gets them together (`admit`) and gives them back together (`release`).
    """

    def __init__(
        self,
        blocks: BlockManager,
        adapters: AdapterMemory,
        prefixes: PrefixMemory,
        max_requests: int,
    ) -> None:
        self.blocks, self.adapters, self.prefixes = blocks, adapters, prefixes
        # By id: the queue (preempted ones first), those with memory, and riders on others' passes.
        self.waiting: OrderedDict[str, SequenceState] = OrderedDict()
        self.running: dict[str, SequenceState] = {}
        self.riding: dict[str, SequenceState] = {}
        self.wanted: Counter[str] = Counter()  # unfinished requests by key of their adapter
        self.wanted_prefixes: Counter[str] = Counter()
        # Requests by what policies know their adapters by, where that is no key, and by id.
        self.mixes: dict[str, dict[str, SequenceState]] = {}
        adapters.wanted, prefixes.wanted = self.wanted, self.wanted_prefixes
        self.free_slots = deque(range(max_requests))  # in the batch
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self._deadlines: dict[SequenceState, float] = {}
        self._starved = False  # a request waits too long for room for its prefix

    def queue(self) -> list[RequestView]:
        """Return what policies see of the waiting requests, oldest first.

        Those that wait for a prefix or carrier are left out; all are if one lacks room for long.
        """
        if self._starved:
            return []
        views = [
            sequence.view
            for sequence in self.waiting.values()
            if not sequence.early
            and (sequence.prefix is None or self._sees(sequence, sequence.prefix))
        ]
        # Preempted requests stand before others that may be older.
        return sorted(views, key=attrgetter("arrival"))

    def _sees(self, sequence: SequenceState, key: str) -> bool:
        """Update the pages that a request with a prefix needs; False if that is not there."""
        if key not in self.prefixes.resident:
            return False
        pages = self.own_pages(sequence, len(sequence.ids) + 1)
        if self.prefixes.budget.pool is self.blocks.pool and not self.prefixes.pinned(key):
            pages += self.prefixes.pages(key)  # admitting it takes them from those that count
        sequence.view.pages = pages
        return True

    def own_pages(self, sequence: SequenceState, tokens: int) -> int:
        """Return how many pages a request has for itself with this many tokens."""
        size = self.blocks.block_size
        return -(-tokens // size) - sequence.prompt.given // size

    def load_prefixes(self, starved: float) -> dict[str, ServeError]:
        """Start loading prefixes, none before that of a starved request; return errors by key."""
        prefixes = self.prefixes
        failed = prefixes.poll()
        self._starved = False
        if not self.wanted_prefixes:
            return failed
        oldest = sorted(self.waiting.values(), key=lambda sequence: sequence.view.arrival)
        for number, sequence in enumerate(oldest[:LOOK_AHEAD]):
            key = sequence.prefix
            if len(prefixes.loading) >= PREFETCHES:
                break
            if key is None or key in failed or key in prefixes.resident | prefixes.loading:
                continue
            try:
                # Only for the oldest may one be evicted that others wait for.
                if not prefixes.load(key, urgent=number == 0):
                    self._starved |= number == 0 and sequence.view.arrival < starved
            except ServeError as error:
                failed[key] = error
        return failed

    def find(self, request_id: str) -> SequenceState | None:
        """Return an unfinished request, None if there is none of this id."""
        held = self.waiting.get(request_id) or self.running.get(request_id)
        return held or self.riding.get(request_id)

    def all(self) -> list[SequenceState]:
        """Return all unfinished requests."""
        return [*self.waiting.values(), *self.running.values(), *self.riding.values()]

    def add(self, sequence: SequenceState, others: Sequence[SequenceState] = ()) -> None:
        """Put a new request in the queue, or on the pass of another one about the same images."""
        sequence.follow([one for one in others if one.carrier is None and one.finish is None])
        held = self.waiting if sequence.carrier is None else self.riding
        held[sequence.id] = sequence
        if sequence.prefix is not None:
            self.wanted_prefixes[sequence.prefix] += 1
        self.wanted.update(list(sequence.adapters))
        label = sequence.view.adapter
        if label is not None and label not in sequence.adapters:
            self.mixes.setdefault(label, {})[sequence.id] = sequence
        if sequence.view.deadline is not None:
            self._deadlines[sequence] = sequence.view.deadline

    def overdue(self, now: float) -> list[SequenceState]:
        """Return the unfinished requests whose deadline has passed by now."""
        return [sequence for sequence, deadline in self._deadlines.items() if deadline <= now]

    def admit(self, sequence: SequenceState) -> bool:
        """Give a waiting request its slot, pages, adapter and prefix; False if one is missing."""
        if sequence.slot is not None:
            return True
        prefix, given, blocks = sequence.prefix, sequence.prompt.given, self.blocks
        if not self.free_slots or not self.adapters.resident.issuperset(sequence.adapters):
            return False
        if prefix is not None and prefix not in self.prefixes.resident:
            return False
        self._pin(sequence)
        head = sequence.head
        limit = None
        if head is not None and head.reads_visual:
            # The head needs the hidden states of all visual tokens: compute them.
            limit = int(min(item.at[0] for item in sequence.prompt.visuals))
        elif head is not None:
            limit = max(0, sequence.prompt_tokens - head.last_tokens)
        if sequence.scores is not None:
            limit = 0  # the log probabilities of all tokens are computed
        held = () if prefix is None else self.prefixes.held(prefix)
        full, rest = divmod(given, blocks.block_size)
        pages = SequencePages(
            sequence.ids, sequence.salt, sequence.spans, sequence.own_from, held[:full],
            sequence.root,
        )  # fmt: skip
        cached = blocks.open(sequence.id, pages, limit)
        if not blocks.reserve(sequence.id, len(sequence.ids) + (head is None)):
            blocks.close(sequence.id)
            self._pin(sequence, release=True)
            return False
        if prefix is not None and rest and cached < given:
            self.prefixes.copy_rest(prefix, blocks.table(sequence.id)[full])
        cached = max(cached, given)
        del self.waiting[sequence.id]
        self.running[sequence.id] = sequence
        sequence.slot = self.free_slots.popleft()
        sequence.computed, sequence.chosen = cached, False
        if not sequence.preemptions:
            sequence.cached = min(cached, sequence.prompt_tokens)
            self.prefix_queries += sequence.prompt_tokens - given
            self.prefix_hits += sequence.cached - given
        view = sequence.view
        view.running, view.pages = True, 0
        view.prompt_left, view.kv_tokens = len(sequence.ids) - cached, cached
        return True

    def _pin(self, sequence: SequenceState, *, release: bool = False) -> None:
        for key in sequence.adapters:
            (self.adapters.unpin if release else self.adapters.pin)(key)
        if sequence.prefix is not None:
            (self.prefixes.unpin if release else self.prefixes.pin)(sequence.prefix)

    def release(self, sequence: SequenceState) -> None:
        """Give back a request's place, pages and pins, if it has them."""
        if sequence.slot is None:
            return
        self.free_slots.append(sequence.slot)
        sequence.slot = None
        sequence.keys = self.blocks.close(sequence.id)
        self._pin(sequence, release=True)
        sequence.features.clear()
        sequence.memory = None

    def preempt(self, sequence: SequenceState) -> None:
        """Put a running request, whose tokens the host knows, back at the front of the queue."""
        self.release(sequence)
        del self.running[sequence.id]
        sequence.preemptions += 1
        self.preemptions += 1
        sequence.computed = 0
        sequence.hidden.clear()
        if sequence.scores is not None:
            sequence.scores.clear()
        view = sequence.view
        view.running, view.kv_tokens, view.held = False, 0, 0
        view.prompt_left = len(sequence.ids) - sequence.prompt.given
        view.images = len(sequence.prompt.visuals)
        view.pages = self.own_pages(sequence, len(sequence.ids) + 1)
        self.waiting[sequence.id] = sequence
        self.waiting.move_to_end(sequence.id, last=False)

    def remove(self, sequence: SequenceState) -> None:
        """Take a finished request out and release what it holds; one that it carries goes on."""
        self.waiting.pop(sequence.id, None)
        self.riding.pop(sequence.id, None)
        self._deadlines.pop(sequence, None)
        if sequence.carrier is not None:
            sequence.carrier.riders.remove(sequence)
        if sequence.riders:
            first, *others = sequence.riders
            sequence.riders, first.riders, first.carrier = [], others, None
            for one in others:
                one.carrier = first
            self.waiting[first.id] = self.riding.pop(first.id)
        if self.running.pop(sequence.id, None) is not None:
            self.release(sequence)
        label = sequence.view.adapter
        if label in self.mixes:
            self.mixes[label].pop(sequence.id, None)
            if not self.mixes[label]:
                del self.mixes[label]
        prefixes = () if sequence.prefix is None else (sequence.prefix,)
        for counts, keys in ((self.wanted, sequence.adapters), (self.wanted_prefixes, prefixes)):
            for key in keys:
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]
