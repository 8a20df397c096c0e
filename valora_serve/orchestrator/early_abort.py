"""S-LoRA's admission control: aborts requests that would miss their latency limit (§4.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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

    def __call__(
        self, view: View, arrived: int
    ) -> tuple[Sequence[RequestView], tuple[tuple[str, str], ...]]:
        """The requests to keep, in order of admission, and the ids to abort with reasons."""
        now, settings = view.now, self._settings
        self._measure(view, arrived)
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

    def _measure(self, view: View, arrived: int) -> None:
        now = view.now
        self._arrived += arrived
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
