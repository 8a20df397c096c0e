"""Waiting and running requests, and the memory that running ones hold."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from valora_serve.engine.sequence import SequenceState
    from valora_serve.memory.adapter_memory import AdapterMemory
    from valora_serve.memory.block_manager import BlockManager
    from valora_serve.orchestrator.decision import RequestView


class Requests:
    """All unfinished requests.

    A running request holds a place in the batch, KV pages and a pin on its adapter. It gets them
    together (`admit`) and gives them back together (`release`).

    Args:
        blocks: Page tables of running requests, and the prefix cache.
        adapters: Adapters of the engine.
        max_requests: Most requests that run at a time.

    Attributes:
        blocks: Page tables of running requests, and the prefix cache.
        adapters: Adapters of the engine.
        waiting: Requests in the queue by id: preempted ones, then the others as they arrived.
        running: Requests that hold memory, by id; also those whose head computes its result.
        wanted: Number of unfinished requests by key of their adapter; keys without any are absent.
        places: Free places in the batch.
        preemptions: How often a request was preempted since the start.
        prefix_queries: Prompt tokens looked up in the prefix cache since the start.
        prefix_hits: Prompt tokens found in it.
    """

    def __init__(self, blocks: BlockManager, adapters: AdapterMemory, max_requests: int) -> None:
        self.blocks, self.adapters = blocks, adapters
        self.waiting: OrderedDict[str, SequenceState] = OrderedDict()
        self.running: dict[str, SequenceState] = {}
        self.wanted: Counter[str] = Counter()
        self.places = deque(range(max_requests))
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self._deadlines: list[tuple[float, str]] = []

    def queue(self) -> list[RequestView]:
        """Return what policies see of the waiting requests, oldest first."""
        views = [sequence.view for sequence in self.waiting.values()]
        # Preempted requests stand before others that may be older.
        views.sort(key=attrgetter("arrival"))
        return views

    def find(self, request_id: str) -> SequenceState | None:
        """Return an unfinished request, None if there is none of this id."""
        return self.waiting.get(request_id) or self.running.get(request_id)

    def all(self) -> list[SequenceState]:
        """Return all unfinished requests."""
        return [*self.waiting.values(), *self.running.values()]

    def of_adapter(self, key: str) -> list[SequenceState]:
        """Return the unfinished requests that run on an adapter."""
        return [sequence for sequence in self.all() if sequence.adapter == key]

    def add(self, sequence: SequenceState) -> None:
        """Put a new request at the end of the queue."""
        self.waiting[sequence.id] = sequence
        if sequence.adapter is not None:
            self.wanted[sequence.adapter] += 1
        if sequence.view.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.view.deadline, sequence.id))
            unfinished = len(self.waiting) + len(self.running)
            if len(self._deadlines) > 2 * unfinished + 64:  # most have ended long before theirs
                self._deadlines = [(at, key) for at, key in self._deadlines if self.find(key)]
                heapq.heapify(self._deadlines)

    def overdue(self, now: float) -> Iterator[SequenceState]:
        """Return the unfinished requests whose deadline has passed, each once.

        Args:
            now: Seconds of `time.monotonic`.
        """
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            late = self.find(request_id)
            if late is not None and late.view.deadline == deadline:  # not another of the same id
                yield late

    def admit(self, sequence: SequenceState) -> bool:
        """Let a waiting request run: give it a place, pages for its prompt, and its adapter.

        Returns:
            Whether it runs now; False if a place, pages or its adapter are missing.
        """
        if sequence.place is not None:
            return True
        key, blocks = sequence.adapter, self.blocks
        if not self.places or (key is not None and key not in self.adapters.resident):
            return False
        if key is not None:
            self.adapters.pin(key)
        head = sequence.head
        limit = None
        if head is not None and head.reads_visual:
            # The head needs the hidden states of all visual tokens: compute them.
            limit = int(min(item.at[0] for item in sequence.prompt.visuals))
        if sequence.scores is not None:
            limit = 0  # the log probabilities of all tokens are computed
        cached = blocks.open(sequence.id, sequence.ids, sequence.salt, sequence.spans, limit)
        if not blocks.reserve(sequence.id, len(sequence.ids) + (head is None)):
            blocks.close(sequence.id)
            if key is not None:
                self.adapters.unpin(key)
            return False
        del self.waiting[sequence.id]
        self.running[sequence.id] = sequence
        sequence.place = self.places.popleft()
        sequence.computed, sequence.chosen = cached, False
        if not sequence.preemptions:
            sequence.cached = min(cached, sequence.prompt_tokens)
            self.prefix_queries += sequence.prompt_tokens
            self.prefix_hits += sequence.cached
        view = sequence.view
        view.running, view.pages = True, 0
        view.prompt_left, view.kv_tokens = len(sequence.ids) - cached, cached
        return True

    def release(self, sequence: SequenceState) -> None:
        """Give back a request's place, pages and pin on its adapter, if it has them."""
        if sequence.place is None:
            return
        self.places.append(sequence.place)
        sequence.place = None
        sequence.keys = self.blocks.close(sequence.id)
        if sequence.adapter is not None:
            self.adapters.unpin(sequence.adapter)
        sequence.features.clear()

    def preempt(self, sequence: SequenceState) -> None:
        """Release a running request and put it at the front of the queue, to be recomputed.

        The host must know all its tokens.
        """
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
        view.prompt_left = len(sequence.ids)
        view.images = len(sequence.prompt.visuals)
        view.pages = -(-(len(sequence.ids) + 1) // self.blocks.block_size)
        self.waiting[sequence.id] = sequence
        self.waiting.move_to_end(sequence.id, last=False)

    def remove(self, sequence: SequenceState) -> None:
        """Take a finished request out and release what it holds."""
        self.waiting.pop(sequence.id, None)
        if self.running.pop(sequence.id, None) is not None:
            self.release(sequence)
        if sequence.adapter is not None:
            self.wanted[sequence.adapter] -= 1
            if not self.wanted[sequence.adapter]:
                del self.wanted[sequence.adapter]
