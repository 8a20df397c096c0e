"""Which waiting requests are admitted first, and which not at all: early abort, and shares."""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from valora_serve.orchestrator.decision import PolicySettings, RequestView, View


class EarlyAbort:
    """S-LoRA's early abort (§4.3, appendix B).

    A waiting request is aborted when its first token would come too late even if the request went
    next. While more requests arrive than are admitted, the newest go first, otherwise the oldest.
    Preempted requests are never aborted, and go before all others: work was done for them.
    """

    PERIOD = 1.0  # seconds between two updates of the moving averages
    KEPT = 0.8  # weight of the old average in the new one

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._arrived = self._admitted = 0
        self._arrived_average = self._admitted_average = 0.0
        self._next_update = self._last = -math.inf  # before the first call
        self._prefill_seconds = 0.0  # slowly falling maximum, from admission to first token
        self._admitted_at: dict[str, float] = {}
        self._ended: list[float] = []  # when those were admitted that have ended since

    def __call__(self, view: View) -> tuple[Sequence[RequestView], tuple[tuple[str, str], ...]]:
        """The requests to keep, in order of admission, and the ids to abort with reasons."""
        now, settings = view.now, self._settings
        self._measure(view)
        preempted, keep, abort = [], [], []
        for request in view.waiting:
            if request.served is not None:
                preempted.append(request)
                self._admitted_at.pop(request.id, None)
                continue
            due = settings.due(request)
            limit = settings.slo if due is None else due - request.arrival
            if now - request.arrival + self._prefill_seconds > limit:
                abort.append((request.id, f"the first token would come after {limit:g} s"))
            else:
                keep.append(request)
        if self._arrived_average > self._admitted_average:
            keep.reverse()
        return preempted + keep, tuple(abort)

    def _measure(self, view: View) -> None:
        now = view.now
        self._arrived += len(view.arrived)
        for request in view.running:
            if not request.prompt_left and request.id in self._admitted_at:
                self._note_prefill(now - self._admitted_at.pop(request.id))
        # Requests that end with their first token are never seen decoding. What passed since they
        # were admitted is their prefill, unless the engine had nothing to do meanwhile.
        if self._ended and any(
            request.arrival <= self._last for request in chain(view.running, view.waiting)
        ):
            self._note_prefill(now - min(self._ended))
        self._ended.clear()
        if self._last == -math.inf:
            self._next_update = now + self.PERIOD
        self._last = now
        if now >= self._next_update:
            self._next_update = now + self.PERIOD
            kept = self.KEPT
            self._arrived_average = kept * self._arrived_average + (1 - kept) * self._arrived
            self._admitted_average = kept * self._admitted_average + (1 - kept) * self._admitted
            self._arrived = self._admitted = 0

    def _note_prefill(self, seconds: float) -> None:
        self._prefill_seconds = max(self._prefill_seconds * 0.99, seconds)

    def note(self, requests: Iterable[RequestView], now: float) -> None:
        """Record which requests a step computes."""
        for request in requests:
            if not request.running and request.served is None:
                self._admitted += 1
                self._admitted_at[request.id] = now

    def finished(self, request_id: str) -> None:
        """Be notified that a request has ended."""
        admitted = self._admitted_at.pop(request_id, None)
        if admitted is not None:
            self._ended.append(admitted)


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
