"""The board of an application: what is served, and how the replicas are; an actor of Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from valora_serve.replicas.wire import Report, ServedState

PERIOD = 0.5  # seconds between two reports of a replica, and between two looks of the server
STALE = 4.0  # age in seconds from which on a report, or a server, counts as gone


class Board:
    """Where the server pins what is served, and the replicas how they are.

    If Ray starts it anew, it is empty; the server and the replicas fill it again within `PERIOD`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state: ServedState | None = None
        self._seen = 0.0
        self._reports: dict[str, tuple[float, Report]] = {}

    def pin(self, state: ServedState) -> list[Report]:
        """Pin what is served, and return the latest reports of the replicas that run."""
        self._state, self._seen = state, self._clock()
        since = self._seen - STALE
        self._reports = {name: one for name, one in self._reports.items() if one[0] >= since}
        return [report for _, report in self._reports.values()]

    def state(self) -> ServedState | None:
        """Return what is served; None if no server has said it yet."""
        return self._state

    def is_used(self) -> bool:
        """Return whether a server uses the application now."""
        return self._state is not None and self._clock() - self._seen < STALE

    def report(self, report: Report) -> None:
        """Take the report of a replica."""
        self._reports[report.replica] = self._clock(), report

    def leave(self, replica: str) -> None:
        """Forget a replica that ends."""
        self._reports.pop(replica, None)
