"""The board of an application, an actor of Ray: what is loaded at run time, and the replicas."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_serve.errors import StoppedError
from valora_serve.server.loading.state_file import SavedState, StateFile

if TYPE_CHECKING:
    from valora_serve.server.loading.startup import Served
    from valora_serve.types import EngineStats

PERIOD = 0.5  # seconds between two reports of a replica, and between two looks of the server
STALE = 15.0  # age in seconds from which on a report counts as gone; a busy replica is late
UNUSED = 4.0  # seconds after which a server that does not look counts as gone
HELD_SECONDS = 30.0  # silence of a replica after which it loses its turn to change what is served
INSIDE = "inside"  # autoscaling metric of a replica: requests in progress


@dataclass(frozen=True, slots=True)
class Report:
    """How a replica is: what fronts and other replicas know of it."""

    replica: str
    url: str
    secret: str  # with which it takes requests
    healthy: bool
    revision: str  # of what it has loaded at run time
    stats: EngineStats
    adapters: Mapping[str, str | None]  # of models whose adapter has another name than they have
    taken: Mapping[str, int]  # requests by caller that rate limits have counted since the last one


class Board:
    """Owns the state file, and the turn to change it; knows the replicas by their reports.

    Ray starts it anew if it dies: it reads the file again, and hears of all replicas in `PERIOD`.
    """

    def __init__(self, file: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = StateFile(Path(file)) if file else None
        self._state = self._file.read() if self._file else SavedState()
        self._clock = clock
        self._replicas: dict[str, tuple[float, Report]] = {}  # when they reported last, and what
        self._owed: defaultdict[str, Counter[str]] = defaultdict(Counter)  # `taken` of others
        self._holder: str | None = None
        self._held = self._used = -HELD_SECONDS
        self._served: Served | None = None

    def state(self) -> SavedState:
        """What is to be loaded beside the bundles of the command line."""
        return self._state

    def served(self) -> Served | None:
        """What the first replica has served at its start."""
        return self._served

    def _is_changing(self) -> bool:
        return self._holder is not None and self._clock() - self._held < HELD_SECONDS

    async def lock(self, replica: str) -> tuple[SavedState, list[Report]]:
        """Wait for the turn to change the state; gives it and the replicas as they are then."""
        while self._is_changing():
            await asyncio.sleep(0.05)
        self._holder, self._held = replica, self._clock()
        return self._state, self._fresh()

    def unlock(self, replica: str) -> None:
        """Give the turn back."""
        if self._holder == replica:
            self._holder = None

    def record(self, replica: str, state: SavedState) -> Exception | None:
        """Write a new state to the file; gives the error if that fails."""
        if self._holder != replica:
            return StoppedError("The board of the replicas has started anew: ask again")
        try:
            if self._file:
                self._file.publish(self._file.draft(state))
        except OSError as error:
            return error
        self._state = state
        return None

    async def join(self, report: Report, served: Served) -> SavedState | None:
        """Take in a replica that has started, unless it has another state: that is given then."""
        while self._is_changing():
            await asyncio.sleep(0.05)
        if report.revision != self._state.revision:
            return self._state
        self._served = self._served or served
        self.report(report)
        return None

    def report(self, report: Report) -> tuple[SavedState | None, list[Report], Mapping[str, int]]:
        """Take a report; gives the state, None while it changes, all reports, what others took."""
        now, name = self._clock(), report.replica
        if self._holder == name:
            self._held = now
        for other in self._replicas.keys() - {name}:
            self._owed[other].update(report.taken)
        self._replicas[name] = now, report
        state = None if self._is_changing() else self._state
        return state, self._fresh(), self._owed.pop(name, {})

    def leave(self, replica: str) -> None:
        """Forget a replica that ends."""
        self._replicas.pop(replica, None)

    def look(self) -> list[Report]:
        """The replicas, for the server, which uses the application as long as it looks."""
        self._used = self._clock()
        return self._fresh()

    def is_used(self) -> bool:
        """Whether a server uses the application now."""
        return self._clock() - self._used < UNUSED

    def _fresh(self) -> list[Report]:
        since = self._clock() - STALE
        self._replicas = {name: one for name, one in self._replicas.items() if one[0] >= since}
        return [report for _, report in self._replicas.values()]


def wanted(context: Any) -> tuple[float, dict[str, Any]]:
    """Autoscaling policy of Ray Serve: as many replicas as the requests in progress ask for."""
    inside = context.aggregated_metrics.get(INSIDE, {}).values()
    return sum(inside) / context.config.get_target_ongoing_requests(), {}
