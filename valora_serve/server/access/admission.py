"""Rate limits and admission control, as plain bookkeeping without clocks or threads."""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from valora_data.wording import agreeing, plural
from valora_serve.errors import OverloadedError, RateLimitError
from valora_serve.server.settings import ServerSettings
from valora_serve.types import Times

REMEMBERED = 10_000  # callers and models that are remembered; the oldest is dropped first
LONGEST_RETRY = 60.0


class RateLimiter:
    """A token bucket for every caller."""

    def __init__(self, rate: float, burst: int) -> None:
        self._each = 60.0 / rate if rate else 0.0
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self.taken: Counter[str] | None = None  # by caller, for other replicas, if there are any

    def take(self, caller: str, now: float) -> None:
        """Count a request."""
        if not self._each:
            return
        left, then = self._buckets.pop(caller, (float(self._burst), now))
        left = min(self._burst, left + (now - then) / self._each)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left, now)
        if self.taken is not None:
            self.taken[caller] += allowed
        if len(self._buckets) > REMEMBERED:
            self._buckets.popitem(last=False)
        if not allowed:
            wait = (1 - left) * self._each
            raise RateLimitError(
                f"This {caller.partition(' ')[0]} may make {60 / self._each:g} "
                f"{agreeing(60 / self._each, 'request|requests')} a minute: try again in "
                f"{math.ceil(wait)} s",
                wait,
            )

    def share(self, others: Mapping[str, int], now: float) -> None:
        """Count requests that other replicas have let in."""
        for caller, count in others.items():
            left, then = self._buckets.get(caller, (float(self._burst), now))
            self._buckets[caller] = (left - count, then)
        while len(self._buckets) > REMEMBERED:
            self._buckets.popitem(last=False)


@dataclass
class _Average:
    """An exponentially weighted mean whose first ten values have equal weights."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(0.1, 1 / self.count)


class Admission:
    """Bounds the queue and refuses requests on arrival that would miss their deadline.

    A request's predicted latency is the time that the queue before it takes, at the recent rate of
    completions, plus the recent mean service time of its domain. No request is refused before both
    have been measured.

    Where shares are kept, whoever fills the queue does not keep the others out: a client that has
    less than its share of the queue is admitted to a full one, which may then be twice as long, and
    what others have sent beyond their shares is not counted before its requests.

    `shares` are those of clients, 1 for whom they do not name; None if none are kept.
    """

    def __init__(self, settings: ServerSettings, shares: Mapping[str, float] | None = None) -> None:
        self._settings = settings
        self._service: dict[str, _Average] = {}
        self._gap = _Average()
        self._last_end: float | None = None
        self._shares = shares
        self._clients: Counter[str] = Counter()
        self.inside = 0

    def deadline(self, model: str | None, wanted: float | None) -> float | None:
        """Deadline in seconds: the request's own, but no longer than that of its domain."""
        own = self._settings.deadlines.get(model or "", self._settings.deadline) or None
        return min((one for one in (wanted, own) if one is not None), default=None)

    def waiting(self, running: int) -> int:
        """Number of admitted requests that the engine does not run yet."""
        return max(0, self.inside - running)

    def predicted(self, model: str | None, running: int, client: str = "") -> float | None:
        """Predicted latency in seconds of a request that arrives now; None if not measured yet."""
        service = self._service.get(model or "")
        if service is None:
            return None
        before: float = self.waiting(running)
        if self._shares is not None:
            before = min(before, self._clients[client] / self._part(client))
        return before * self._gap.value + service.value

    def _part(self, client: str) -> float:
        """What part of the machine a client has among those that have requests inside."""
        shares = self._shares or {}
        inside = self._clients.keys() | {client}
        return shares.get(client, 1.0) / sum(shares.get(one, 1.0) for one in inside)

    def check(
        self, model: str | None, running: int, deadline: float | None, count: int,
        client: str = "", own: int | None = None,
    ) -> None:  # fmt: skip
        """Refuse requests that come beside others, `count` together, `own` of them this client's.

        All are checked before any enters: one request for several models fits as a whole or not.
        """
        waiting, most = self.waiting(running), self._settings.max_waiting
        inside = self._clients[client] + (count if own is None else own)
        shared = self._shares is not None and inside <= most * self._part(client)
        if waiting + count > most * (2 if shared else 1):
            wait = min(LONGEST_RETRY, max(1.0, waiting * self._gap.value / 2))
            raise OverloadedError(
                f"{plural(waiting, 'request|requests is|are')} waiting, and no more than "
                f"{most} may: try again in {math.ceil(wait)} s"
                f"{', with fewer' * (count > 1)}",
                wait,
            )
        due = math.inf if deadline is None else deadline
        expected = self.predicted(model, running, client) or 0.0
        if self._settings.deadline_admission and waiting and expected > due:
            late = expected - due
            raise OverloadedError(
                f"The answer is expected after {expected:.2f} s, later than the deadline of "
                f"{due:.2f} s: try again in {math.ceil(late)} s, or allow more time",
                min(LONGEST_RETRY, max(1.0, late)),
            )

    def enter(self, count: int = 1, client: str = "") -> None:
        """Count requests that were checked."""
        self.inside += count
        self._clients[client] += count

    def leave(self, model: str | None, times: Times | None, now: float, client: str = "") -> None:
        """Count a request as finished."""
        self.inside -= 1
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]
        if times is not None and times.started is not None and times.finished is not None:
            self._service.setdefault(model or "", _Average()).add(times.finished - times.started)
            if len(self._service) > REMEMBERED:
                del self._service[next(iter(self._service))]
            # The time between completions measures the engine only while it is busy.
            if self._last_end is not None and self.inside > 0:
                self._gap.add(now - self._last_end)
        self._last_end = now if self.inside > 0 else None
