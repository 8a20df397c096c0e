"""S-LoRA's admission control: giving up early on requests that would come too late."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from valora_serve.orchestrator.decision import PolicySettings, RequestView, View


class EarlyAbort:
    """S-LoRA's early abort (§4.3, appendix B).

    Requests whose first token would come too late even if they went next are given up. While
    more come than can be taken in, the newest go first, else the oldest.

    Args:
        settings: Knobs: `slo`, `limits`.
    """

    PERIOD = 1.0  # seconds between two updates of the moving averages
    KEPT = 0.8  # share of the old average in the new one

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._newest = -math.inf
        self._came = self._taken = 0
        self._came_average = self._taken_average = 0.0
        self._next = -math.inf
        self._prefill = 0.0  # longest from taking in to the first token
        self._pending: dict[str, float] = {}

    def __call__(self, view: View) -> tuple[Sequence[RequestView], tuple[tuple[str, str], ...]]:
        """Who may still wait and in which order, and who is given up on."""
        now = view.now
        self._measure(view)
        keep, abort = [], []
        for request in view.waiting:
            if request.served is not None:
                keep.append(request)  # preempted: it has had its first token
                continue
            limit = request.limit
            if limit is None:
                limit = self._settings.limits.get(request.domain or "", self._settings.slo)
            if request.deadline is not None:
                limit = min(limit, request.deadline - request.arrival)
            if now - request.arrival + self._prefill > limit:
                abort.append((request.id, f"first token would come after {limit:g} s"))
            else:
                keep.append(request)
        if self._came_average > self._taken_average:
            keep.reverse()
        return keep, tuple(abort)

    def _measure(self, view: View) -> None:
        for request in reversed(view.waiting):
            if request.arrival <= self._newest:
                break
            self._came += 1
        if view.waiting:
            self._newest = max(self._newest, view.waiting[-1].arrival)
        for request in view.running:
            if not request.prompt_left and request.id in self._pending:
                took = view.now - self._pending.pop(request.id)
                self._prefill = max(self._prefill * 0.99, took)
        if view.now >= self._next:
            self._next = view.now + self.PERIOD
            kept = self.KEPT
            self._came_average = kept * self._came_average + (1 - kept) * self._came
            self._taken_average = kept * self._taken_average + (1 - kept) * self._taken
            self._came = self._taken = 0

    def note(self, requests: Iterable[RequestView], now: float) -> None:
        """Be told whom a step computes."""
        for request in requests:
            if not request.running and request.id not in self._pending:
                self._taken += 1
                self._pending[request.id] = now
