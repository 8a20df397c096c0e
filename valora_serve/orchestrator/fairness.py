"""Shares of the machine under overload: weighted virtual token counters.

"Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024, Algorithm 2): the next request
to be admitted is that of the client with the fewest served tokens, divided by its share. A client
that comes back is lifted to the others, so that it gains nothing by having been away.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from valora_serve.orchestrator.decision import RequestView

PROMPT_WEIGHT, ANSWER_WEIGHT = 1.0, 2.0
"""What a token of a prompt and of an answer count (w_p and w_q of the paper)."""
MAX_CLIENTS = 4096  # clients whose counters are kept although they ask for nothing


@dataclass(slots=True)
class _Account:
    """What a request was charged for: its view, and prompt and KV tokens as of then."""

    view: RequestView
    prompt_left: int
    kv_tokens: int
    began: bool = False


class FairShares:
    """Counts what clients are served, and orders waiting requests by it."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = dict(shares)
        self.counters: dict[str, float] = {}  # weighted tokens served, divided by the share
        self._accounts: dict[str, _Account] = {}
        self._queued: set[str] = set()
        self._level = 0.0  # lowest counter of those who waited or ran last

    def order(
        self, running: Iterable[RequestView], waiting: Sequence[RequestView], limit: int
    ) -> Sequence[RequestView]:
        """Charge running requests, and return waiting ones in the order of admission.

        Each client's own stay in their order; that of all does not matter from `limit` on.
        """
        for request in running:
            account = self._accounts.get(request.id)
            if account is not None:
                self._charge(account)
        queues: dict[str, deque[RequestView]] = defaultdict(deque)
        for request in waiting:
            queues[request.client or ""].append(request)
        self._lift(queues)
        if len(queues) < 2:
            return waiting
        heap = [(self.counters[client], client) for client in queues]
        heapq.heapify(heap)
        ordered: list[RequestView] = []
        while heap and len(ordered) < limit:
            counter, client = heap[0]
            queue = queues[client]
            request = queue.popleft()
            ordered.append(request)
            if not queue:
                heapq.heappop(heap)
                continue
            # As if it were admitted: its prompt is certain.
            share = self._shares.get(client, 1.0)
            counter += PROMPT_WEIGHT * max(1, request.prompt_left) / share
            heapq.heapreplace(heap, (counter, client))
        for queue in queues.values():
            ordered.extend(queue)
        return ordered

    def admitted(self, requests: Iterable[RequestView]) -> None:
        """Open accounts for the requests of a batch that have none yet."""
        for request in requests:
            if request.id not in self._accounts:
                self._accounts[request.id] = _Account(
                    request, request.prompt_left, request.kv_tokens
                )

    def finished(self, request_id: str) -> None:
        """Charge a request that has ended for the last time."""
        account = self._accounts.pop(request_id, None)
        if account is not None:
            self._charge(account)

    def _charge(self, account: _Account) -> None:
        view = account.view
        prompt = max(0, account.prompt_left - view.prompt_left)
        answer = 0
        if account.began:  # before, keys and values may have come from the prefix cache
            answer = max(0, view.kv_tokens - account.kv_tokens - prompt)
        if prompt or view.kv_tokens != account.kv_tokens:
            account.began = view.kv_tokens > 0
        account.prompt_left, account.kv_tokens = view.prompt_left, view.kv_tokens
        client, tokens = view.client or "", PROMPT_WEIGHT * prompt + ANSWER_WEIGHT * answer
        share = self._shares.get(client, 1.0)
        self.counters[client] = self.counters.get(client, 0.0) + tokens / share

    def _lift(self, queues: Iterable[str]) -> None:
        """Lift clients that did not wait before to the lowest that did, or else ran last."""
        now = set(queues)
        stayed = [self.counters[client] for client in now & self._queued]
        floor = min(stayed, default=self._level)
        for client in now - self._queued:
            self.counters[client] = max(self.counters.get(client, 0.0), floor)
        active = now | {account.view.client or "" for account in self._accounts.values()}
        if active:
            lowest = min(self.counters.get(client, 0.0) for client in active)
            self._level = max(self._level, lowest)
        self._queued = now
        if len(self.counters) > MAX_CLIENTS + len(now):
            # Whoever is below the level would be lifted to it anyway.
            self.counters = {
                client: counter
                for client, counter in self.counters.items()
                if client in active or counter > self._level
            }
