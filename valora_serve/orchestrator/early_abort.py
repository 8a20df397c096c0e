"""S-LoRA's admission control: aborts requests that would miss their latency limit (§4.3)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from valora_serve.orchestrator.decision import PolicySettings, RequestView, View


class EarlyAbort:
    """S-LoRA's early abort (§4.3, appendix B).

    A waiting request is aborted when its first token would come too late even if the request went
    next. While more requests arrive than are admitted, the newest go first, otherwise the oldest.

    Args:
        settings: Settings of the policies; `slo` and `latency_limits` are read.
    """

    PERIOD = 1.0  # seconds between two updates of the moving averages
    KEPT = 0.8  # weight of the old average in the new one

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._newest = -math.inf
        self._arrived = self._admitted = 0
        self._arrived_average = self._admitted_average = 0.0
        self._next_update = -math.inf
        self._prefill_seconds = 0.0  # slowly falling maximum, from admission to first token
        self._admitted_at: dict[str, float] = {}

    def __call__(self, view: View) -> tuple[Sequence[RequestView], tuple[tuple[str, str], ...]]:
        """Return the waiting requests in order, and the ids of those to abort with the reason."""
        now = view.now
        self._measure(view)
        keep, abort = [], []
        for request in view.waiting:
            if request.served is not None:
                keep.append(request)  # preempted: its first token has already been sent
                continue
            limit = request.latency_limit
            if limit is None:
                limit = self._settings.latency_limits.get(request.domain or "", self._settings.slo)
            if request.deadline is not None:
                limit = min(limit, request.deadline - request.arrival)
            if now - request.arrival + self._prefill_seconds > limit:
                abort.append((request.id, f"the first token would come after {limit:g} s"))
            else:
                keep.append(request)
        if self._arrived_average > self._admitted_average:
            keep.reverse()
        return keep, tuple(abort)

    def _measure(self, view: View) -> None:
        for request in reversed(view.waiting):
            if request.arrival <= self._newest:
                break
            self._arrived += 1
        if view.waiting:
            self._newest = max(self._newest, view.waiting[-1].arrival)
        for request in view.running:
            if not request.prompt_left and request.id in self._admitted_at:
                seconds = view.now - self._admitted_at.pop(request.id)
                self._prefill_seconds = max(self._prefill_seconds * 0.99, seconds)
        if view.now >= self._next_update:
            self._next_update = view.now + self.PERIOD
            kept = self.KEPT
            self._arrived_average = kept * self._arrived_average + (1 - kept) * self._arrived
            self._admitted_average = kept * self._admitted_average + (1 - kept) * self._admitted
            self._arrived = self._admitted = 0

    def note(self, requests: Iterable[RequestView], now: float) -> None:
        """Record which requests a step computes.

        Args:
            requests: The requests in the batch.
            now: Current time in seconds on the engine's clock.
        """
        for request in requests:
            if not request.running and request.id not in self._admitted_at:
                self._admitted += 1
                self._admitted_at[request.id] = now
