"""The board of an application, an actor of Ray: what all replicas serve, and which there are."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from valora_serve.errors import AdapterError, StoppedError
from valora_serve.server.loading.state_file import SavedState, StateFile
from valora_serve.types import EngineStats

PERIOD = 0.5  # seconds between two reports of a replica, and between two looks of the server
STALE = 15.0  # age in seconds from which on a report counts as gone; a busy replica is late
INSIDE = "inside"  # autoscaling metric of a replica: requests in progress


@dataclass(frozen=True, slots=True)
class Report:
    """How a replica is: what fronts and other replicas know of it."""

    replica: str
    url: str
    secret: str  # with which it takes requests
    healthy: bool
    followed: str  # revision of what it was told to serve; empty while it loads
    problem: str | None  # why it does not serve that
    stats: EngineStats
    adapters: Mapping[str, str | None]  # of models whose adapter has another name than they have
    taken: Mapping[str, int]  # requests by caller that rate limits have counted since the last one
    load: int  # requests under way


class Board:
    """Owns the state file, and the turn to change it; knows the replicas by their reports.

    Ray starts it anew if it dies: it reads the file again, and hears of all replicas in `PERIOD`.
    """

    def __init__(self, file: str | None) -> None:
        self._file = StateFile(Path(file)) if file else None
        self._state = self._file.read() if self._file else SavedState()
        self._target = self._state  # what replicas are told to serve: another one while it changes
        self._holder: str | None = None  # the replica whose turn it is
        self._changing = asyncio.Lock()  # a change goes on when its replica dies
        self._replicas: dict[str, tuple[float, Report]] = {}  # when they reported last, and what
        self._owed: defaultdict[str, Counter[str]] = defaultdict(Counter)  # `taken` of others
        self._served: Any = None

    def served(self, served: Any = None) -> Any:
        """What a replica has served at its start, a `startup.Served`, as one has told."""
        self._served = served or self._served
        return self._served

    def state(self) -> SavedState:
        """What is to be loaded beside the bundles of the command line."""
        return self._state

    async def lock(self, replica: str) -> SavedState:
        """Wait for the turn to change the state, which one that dies loses; gives the state."""
        while self._changing.locked() or self._holder in {one.replica for one in self.reports()}:
            await asyncio.sleep(PERIOD / 10)
        self._holder = replica
        return self._state

    def unlock(self, replica: str) -> None:
        """Give the turn back."""
        if self._holder == replica:
            self._holder = None

    async def change(self, replica: str, state: SavedState) -> Exception | None:
        """Have the other replicas serve a state, and record it; the error if neither was done."""
        if self._holder != replica:  # the board has started anew, perhaps after it recorded this
            return None if state == self._state else StoppedError("The board is new: ask again")
        async with self._changing:
            try:
                if (error := await self._follow(state)) is None and self._file:
                    self._file.publish(self._file.draft(state))
            except OSError as failure:
                error = failure
            if error is not None:
                await self._follow(self._state)
            self._state = self._target
            return error

    async def _follow(self, state: SavedState) -> Exception | None:
        """Have all replicas but the one whose turn it is serve a state; the error if one cannot."""
        revision, self._target = state.revision, state
        while True:
            others = [one for one in self.reports() if one.replica != self._holder]
            if all(one.followed == revision for one in others):
                return next((AdapterError(one.problem) for one in others if one.problem), None)
            await asyncio.sleep(PERIOD / 10)

    async def report(self, report: Report) -> tuple[SavedState | None, list[Report], Counter[str]]:
        """Take a report; gives the state to serve, at once if it is new, or after `PERIOD`.

        It is None while the replica itself changes it. With it come all reports and what is owed.
        """
        name = report.replica
        for other in self._replicas.keys() - {name}:
            self._owed[other].update(report.taken)
        self._replicas[name] = monotonic(), report
        for _ in range(10):
            told = None if self._holder == name else self._target
            if told is not None and told.revision != report.followed:  # what it serves changes now
                self._replicas[name] = monotonic(), replace(report, followed="")
                break
            await asyncio.sleep(PERIOD / 10)
        return told, self.reports(), self._owed.pop(name, Counter())

    def leave(self, replica: str) -> None:
        """Forget a replica that ends."""
        self._replicas.pop(replica, None)

    def reports(self) -> list[Report]:
        """The replicas that have reported lately."""
        since = monotonic() - STALE
        self._replicas = {name: one for name, one in self._replicas.items() if one[0] >= since}
        return [report for _, report in self._replicas.values()]


def wanted(context: Any) -> tuple[float, dict[str, Any]]:
    """Autoscaling policy of Ray Serve: as many replicas as the requests in progress ask for."""
    inside = context.aggregated_metrics.get(INSIDE, {}).values()
    return sum(inside) / context.config.get_target_ongoing_requests(), {}
