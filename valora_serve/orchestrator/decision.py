"""The interface between deciding and computing: what a policy sees and answers (VaLoRA §4.4).

Nothing here or in the policies imports torch. The engine and the simulator call
`BasePolicy.decide` before each step and carry out the `Decision` in this order: `abort`, `preempt`,
the switch to `mode` and `merged`, `prefetch` (as memory allows), `batch`.
"""

import heapq
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TextIO

from valora_serve.errors import SettingsError
from valora_serve.types import Mode

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RequestView:
    """What a policy sees of a request; the engine updates it in place. Times are in seconds."""

    id: str
    adapter: str | None  # None: base model. Two, or a weighted one, have a name, never merged
    rank: int  # of the adapter, of two the sum; 0 for the base model
    arrival: float  # on the engine's clock
    prompt_left: int  # prompt tokens to prefill, with image tokens, without prefix cache hits
    kv_tokens: int = 0  # tokens in the KV cache
    output_left: int = 0  # expected number of tokens still to generate, 0 for a head request
    running: bool = False  # whether the request holds pages
    # Pages to allocate before more is computed: for a waiting request those of its prompt and first
    # token, for a running one of its next token.
    pages: int = 0
    held: int = 0  # pages that are released if the request is preempted
    adapter_pages: int = 0  # that the adapter takes on the device, 0 for the base model
    images: int = 0  # still to encode
    deadline: float | None = None  # time by which the request must be answered
    domain: str | None = None  # that the request names
    latency_limit: float | None = None  # from arrival; None for that of the domain
    client: str | None = None  # who is charged, if shares are kept
    credit: float = 0.0  # waiting plus predicted execution and switch; written by the policy
    served: float | None = None  # when it was last in a batch; written by the policy
    pair: bool = False  # whether two adapters apply, which only unmerged mode computes
    # First token, and the one behind the last, of each image whose tokens see each other: a step
    # computes all of them or none.
    blocks: Sequence[tuple[int, int]] = ()

    def whole(self, tokens: int) -> int:
        """Return how many of at most so many next tokens end in none of the `blocks`."""
        end = self.kv_tokens + tokens
        inside = next((start for start, stop in self.blocks if start < end < stop), end)
        return max(inside - self.kv_tokens, 0)

    @property
    def min_tokens(self) -> int:
        """Fewest of the next tokens that a step can compute."""
        at = self.kv_tokens
        return next((stop - at for start, stop in self.blocks if start <= at < stop), 1)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may use."""

    max_requests: int  # most requests that may hold pages at a time, which bounds the batch
    max_tokens: int  # most tokens computed in the step
    # Pages that are free or can be freed at once: all except those of running requests, their
    # adapters, the merged adapter and adapters being loaded. A policy that admits a request must
    # also count its adapter's pages, unless they are among these.
    free_pages: int
    max_adapters: int  # most distinct adapters in the step, including the merged one
    chunk: int  # most prompt tokens of one request in the step


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees before a step; times are in seconds on the engine's clock."""

    now: float
    running: Sequence[RequestView]  # they hold pages
    waiting: Sequence[RequestView]  # they hold none, oldest first; of very many, some (`window`)
    mode: Mode  # of the last step
    merged: str | None  # adapter in the base weights, None if these are pristine
    resident: frozenset[str] | set[str]  # adapters on the device
    loading: frozenset[str] | set[str]  # adapters that are being copied to it
    limits: StepLimits
    switchable: frozenset[str] | None = None  # adapters that can be merged now; None: all resident
    arrived: Sequence[float] = ()  # arrival times of all requests since the last view, oldest first


def window(queue: Sequence[RequestView], limit: int) -> Sequence[RequestView]:
    """Return at most `limit` requests of a queue, oldest first, for a policy to see.

    Of a longer queue, half are the oldest ones, of each client as many; the others are the newest
    ones and those with the earliest due times, in equal parts.
    """
    if len(queue) <= limit:
        return queue
    part = limit // 4
    oldest = _oldest(queue, limit - 2 * part)
    chosen = {r.id: r for r in (*oldest, *queue[len(queue) - part :])}
    limited = [(r.arrival + r.latency_limit, r.id, r) for r in queue if r.latency_limit is not None]
    chosen.update((key, request) for _, key, request in heapq.nsmallest(part, limited))
    return sorted(chosen.values(), key=attrgetter("arrival"))


def _oldest(queue: Sequence[RequestView], limit: int) -> Sequence[RequestView]:
    """Return the oldest requests of a queue, in turn from each client if there are several."""
    seen: Counter[str | None] = Counter()
    turns: list[tuple[int, int]] = []
    for number, request in enumerate(queue):
        turns.append((seen[request.client], number))
        seen[request.client] += 1
    return [queue[number] for _, number in heapq.nsmallest(limit, turns)]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the next step does.

    In `Mode.MERGED`, the batch has only rows of `merged`; in `MIXTURE`, `merged` is in the weights
    and the batch has any rows; in `UNMERGED`, it has any rows, and `merged` is None.
    """

    mode: Mode
    merged: str | None  # adapter that the base weights hold during the step
    batch: tuple[tuple[str, int], ...] = ()  # ids with the tokens to compute: 1, or of the prompt
    prefetch: tuple[str, ...] = ()  # adapters to load, most urgent first; none is here or loading
    abort: tuple[tuple[str, str], ...] = ()  # ids of requests to abort, each with the reason
    preempt: tuple[str, ...] = ()  # ids of running requests to preempt; none is in the batch
    reason: str = ""  # explanation for the decision trace
    # The decision holds for all steps that start before this time, as long as no request arrives,
    # ends, finishes its prompt or needs a page and no adapter finishes loading; 0: this step only.
    until: float = 0.0


class DecisionTrace:
    """Writes one line per decision, until the file cannot be written any more (a full disk).

    Time in seconds, mode, merged adapter, rows (``d`` decode, ``p`` prompt tokens), running and
    waiting requests, prefetched adapters, preempted and aborted requests if any, reason.
    """

    def __init__(self, file: TextIO) -> None:
        self._file: TextIO | None = file

    def write(self, view: View, decision: Decision) -> None:
        """Write the line of one step."""
        prefilling = {r.id for r in view.waiting} | {r.id for r in view.running if r.prompt_left}
        tokens = sum(n for key, n in decision.batch if key in prefilling)
        decodes = sum(key not in prefilling for key, _ in decision.batch)
        notes = [f"+{name}" for name in decision.prefetch]
        notes += [f"preempt {key}" for key in decision.preempt]
        notes += [f"abort {key}: {why}" for key, why in decision.abort]
        line = (
            f"{view.now:12.6f} {decision.mode:8} {decision.merged or '-':16} "
            f"{decodes:4d}d+{tokens}p run {len(view.running)} wait {len(view.waiting)}  "
            f"{' '.join([*notes, decision.reason])}\n"
        )
        try:
            if self._file is not None:
                self._file.write(line)
        except OSError as error:
            log.warning("the decision trace ends here, as it cannot be written: %s", error)
            self._file = None


MAX_SHARE = 1e6
"""Largest share of a client, and the inverse of the smallest: beyond it, the tokens of others would
be lost among the digits of its counter."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of the policies; each policy reads those that concern it.

    Attributes:
        theta: Starvation threshold θ of `valora` in seconds of credit (VaLoRA §4.4.3).
        patience: Waiting time in seconds after which no policy lets others overtake a request.
        hysteresis: Share by which another mode or merged adapter must be better to replace the
            current one.
        clusters: Adapters in a batch from which on waiting requests of the same adapters go first
            (S-LoRA's adapter clustering, §4.2); 0 turns it off.
        early_abort: Whether to abort requests that will miss their latency limit (S-LoRA's
            admission control, §4.3).
        slo: Latency limit in seconds to the first token that early abort assumes for requests
            without one.
        latency_limits: Latency limits in seconds by domain. Of these, a request's own limit and its
            deadline, the earliest counts.
        fair: Whether waiting requests are admitted by what their clients were served
            (`admission.FairShares`), instead of by age, by length or by `patience`.
        shares: Share of each client; 1 for those that it does not name.
        mixture: Whether requests of other adapters may run beside a merged one; without it, they
            run unmerged (to compare with).
    """

    theta: float = 0.03
    patience: float = 20.0
    hysteresis: float = 0.1
    clusters: int = 0
    early_abort: bool = False
    slo: float = 6.0
    latency_limits: dict[str, float] = field(default_factory=dict)
    fair: bool = False
    shares: dict[str, float] = field(default_factory=dict)
    mixture: bool = True

    def __post_init__(self) -> None:
        for name in ("theta", "patience", "hysteresis", "slo", "clusters"):
            if not (value := getattr(self, name)) >= 0:  # neither is NaN
                raise SettingsError(f"{name}: expected 0 or more, got {value}")
        for domain, limit in self.latency_limits.items():
            if not limit > 0:
                raise SettingsError(f"latency_limits: expected more than 0 s for {domain}: {limit}")
        for client, share in self.shares.items():
            if not 1 / MAX_SHARE <= share <= MAX_SHARE:
                limits = f"at least {1 / MAX_SHARE:g} and at most {MAX_SHARE:g}"
                raise SettingsError(f"shares: expected {limits} for {client}, got {share:g}")

    def due(self, request: RequestView) -> float | None:
        """Return when a request should be answered: the earliest of its three limits, if any."""
        due, own = request.deadline, request.latency_limit
        if own is not None and (due is None or request.arrival + own < due):
            due = request.arrival + own
        if self.latency_limits and request.domain is not None:
            limit = self.latency_limits.get(request.domain)
            if limit is not None and (due is None or request.arrival + limit < due):
                due = request.arrival + limit
        return due
