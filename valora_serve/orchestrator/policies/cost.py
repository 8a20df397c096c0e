"""The default policy: minimises predicted latency (docs/explanation/orchestrator.md).

A step of τ seconds with N requests in the system costs N·τ request-seconds, as the sum of all
latencies is N integrated over time. All choices are compared on this scale.
"""

import heapq
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from valora_serve.orchestrator.base import BasePolicy, can_merge
from valora_serve.orchestrator.batching import FOREVER, BatchPlan
from valora_serve.orchestrator.cost_model import CostModel, StepShape
from valora_serve.orchestrator.decision import PolicySettings, RequestView, View
from valora_serve.types import Mode

CANDIDATES = 2  # adapters considered for merging, besides the merged one
REGRETS = 4  # weights of which is known what they would have saved
HORIZON = 64  # most steps for which a choice of weights is assumed to hold
CHUNKS = (128, 256, 512, 1024, 2048, 4096)  # rows of a step with a chunk, besides captured sizes
RECONSIDER = 0.1  # seconds after which an unchanged queue is considered again
GAP_WEIGHT = 0.1  # weight of the newest gap between arrivals in their moving average
BURST_GAP = 1e-3  # seconds between arrivals below which they count as one burst


@dataclass(slots=True)
class _Tokens:
    """Tokens of a step."""

    all: int = 0
    base: int = 0  # those of the base model
    work: int = 0  # ranks of their adapters, in sum

    def add(self, tokens: int, request: RequestView) -> None:
        self.all += tokens
        self.base += tokens * (request.adapter is None)
        self.work += tokens * request.rank


@dataclass(slots=True)
class _Group:
    """The work to do for one adapter."""

    rank: int
    rows: int = 0  # that decode
    coming: int = 0  # that will
    prompt: int = 0  # tokens


class _Load:
    """The work to do, in sum and by adapter; a request adds at most `chunk` prompt tokens."""

    def __init__(self, running: Iterable[RequestView], chunk: int) -> None:
        self.groups: dict[str | None, _Group] = {}
        self.rows = _Tokens()  # rows that decode
        self.coming = _Tokens()  # rows that will decode after their prefill
        self.prompt = _Tokens()  # prompt tokens to prefill
        self.going_on = 0  # how many of the coming rows generate more than their first token
        self.kv_tokens = self.remaining = self.images = 0
        self._chunk = chunk
        self._ranks = self._coming_ranks = 0  # summed over distinct adapters
        for request in running:
            if request.prompt_left:
                self.prefill(request)
                continue
            group = self.groups.setdefault(request.adapter, _Group(request.rank))
            self._ranks += 0 if group.rows else group.rank
            group.rows += 1
            self.rows.add(1, request)
            self.kv_tokens += request.kv_tokens
            self.remaining += request.output_left

    def prefill(self, request: RequestView) -> None:
        """Add a chunk of a prompt, and the row that decodes after it."""
        tokens = min(request.prompt_left, self._chunk)
        group = self.groups.setdefault(request.adapter, _Group(request.rank))
        self._coming_ranks += 0 if group.rows or group.coming else group.rank
        group.prompt += tokens
        group.coming += 1
        self.prompt.add(tokens, request)
        self.coming.add(1, request)
        self.going_on += request.output_left > 0
        self.images += request.images
        self.remaining += request.output_left

    def step(
        self, adapter: str | None, rank: int, prompt: int, *, later: bool = False
    ) -> StepShape:
        """The next step with so many prompt tokens, or the decode steps after all prefills."""
        share = 1.0 if later else prompt / self.prompt.all if self.prompt.all else 0.0
        more = self.coming if later else self.prompt
        group = self.groups.get(adapter)
        own = group.rows + (group.coming if later else group.prompt * share) if group else 0
        ranks = self._ranks + (self._coming_ranks if later or prompt else 0)
        tokens = self.rows.all + more.all * share
        terms = tokens - self.rows.base - more.base * share
        work = self.rows.work + more.work * share
        if adapter is not None:
            foreign = tokens - own
            if foreign < 0.5:
                terms = work = ranks = 0
            else:
                terms += foreign - own
                work += (foreign - own) * rank
                ranks += 0 if own else rank
        return StepShape(
            mode=Mode.UNMERGED if adapter is None else Mode.MIXTURE,
            decode=self.rows.all + (self.coming.all if later else 0),
            prefill=0 if later else prompt,
            images=0 if later else math.ceil(self.images * share),
            kv_tokens=self.kv_tokens + (self.prompt.all if later else 0),
            terms=math.ceil(terms),
            work=math.ceil(work),
            ranks=ranks,
        )


class CostPolicy(BasePolicy):
    """Chooses weights, prompts and order by predicted latency."""

    def __init__(self, cost_model: CostModel, settings: PolicySettings) -> None:
        super().__init__(cost_model, settings)
        self._last_arrival = -math.inf
        self._gap = self._burst = 1.0
        self._burst_size = 0
        self._ranks: dict[str | None, int] = {}
        # Seconds that other weights would have saved in steps with prompts since the last switch.
        self._regrets: dict[str | None, float] = {}
        self._sizes = sorted({*cost_model.captured_rows, *CHUNKS})

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        load = _Load(view.running, view.limits.chunk)
        urgent = self.urgent(view, waiting)
        ready, why = self._ready(view, waiting, urgent, load)
        too_old = view.now - self.settings.patience
        in_order = self.settings.fair or self._any_due(ready)
        in_order = in_order or any(r.arrival < too_old for r in ready)
        if not in_order:
            ready = sorted(ready, key=attrgetter("prompt_left"))
        prefilling = load.coming.all
        room = max(1, view.limits.max_tokens - load.rows.all)  # no less, as not all rows may run
        for request in ready:
            if load.prompt.all >= room:
                break
            load.prefill(request)
        adapter, note = self._weights(view, load)
        budget, until = sys.maxsize, FOREVER
        if load.prompt.all:
            held = view.now
            if not prefilling and not urgent:
                held = self._hold(view, load, adapter, ready)
            if held > view.now:
                budget, until = 0, held
                why = f"collecting prompts; {why}" if why else "collecting prompts"
            else:
                fitting = load.coming.all - prefilling
                if fitting > 1 and not in_order:
                    first = self._first(view, ready, fitting, load)
                    if len(first) < fitting:
                        ready, load = first, _Load([*view.running, *first], view.limits.chunk)
                        adapter, note = self._weights(view, load)
                budget = min(load.prompt.all, room)
                due = urgent or self._any_due(r for r in view.running if r.prompt_left)
                if load.rows.all and not due:
                    behind = len(waiting) - (load.coming.all - prefilling)
                    budget = self._chunk(load, adapter, budget, behind, self._rate(view.now))
                self._regret(view, load, adapter, budget)
        elif waiting:
            until = view.now + RECONSIDER
        return BatchPlan(
            Mode.UNMERGED if adapter is None else Mode.MIXTURE,
            adapter,
            view.running,
            ready,
            f"{note}; {why}" if why else note,
            until,
            budget=budget,
            urgent=urgent,
        )

    def _any_due(self, requests: Iterable[RequestView]) -> bool:
        return any(self.settings.due(r) is not None for r in requests)

    def _ready(
        self, view: View, waiting: Sequence[RequestView], urgent: Sequence[RequestView], load: _Load
    ) -> tuple[Sequence[RequestView], str]:
        """The requests to admit now, best first, and the reason for leaving others out."""
        resident = view.resident
        first = [r for r in urgent if r.adapter is None or r.adapter in resident]
        slots = view.limits.max_requests - len(view.running) - len(first)
        if slots <= 0:
            return first, "no request slots left"
        taken = {r.id for r in urgent}
        rest = [
            r for r in waiting
            if r.id not in taken and (r.adapter is None or r.adapter in resident)
        ]  # fmt: skip
        if len(rest) <= slots:
            return first + rest, ""
        if self.settings.fair:  # their order is that of the shares
            return first + rest[:slots], "by share"
        rows = view.limits.max_requests
        kv_tokens = load.kv_tokens * rows // max(1, load.rows.all)
        per_row = self.cost.step(StepShape(decode=rows, kv_tokens=kv_tokens)) / rows
        too_old = view.now - self.settings.patience

        def order(request: RequestView) -> tuple[bool, float]:
            if request.arrival < too_old:
                return False, request.arrival
            return True, request.prompt_left * self._per_token + request.output_left * per_row

        return first + heapq.nsmallest(slots, rest, key=order), "shortest request first"

    def _candidates(self, view: View, load: _Load) -> list[str | None]:
        """The weights to compare: pristine ones, the current ones, the most popular adapters'."""
        popular = heapq.nlargest(
            CANDIDATES,
            ((g.rows + g.coming, g.prompt, a) for a, g in load.groups.items() if a is not None),
        )
        found: list[str | None] = [None]
        if view.merged is not None:
            found.append(view.merged)
        found += [a for _, _, a in popular if a != view.merged and can_merge(view, a)]
        if not self.settings.mixture:  # an adapter beside which nothing else runs, or none
            found = [a for a in found if a is None or load.groups.keys() <= {a}]
        return found

    def _weights(self, view: View, load: _Load) -> tuple[str | None, str]:
        if not load.groups:
            return view.merged, "nothing to compute"
        kept = self._ranks.keys() & {view.merged, *self._regrets}
        self._ranks = {a: self._ranks[a] for a in kept}
        self._ranks.update((a, g.rank) for a, g in load.groups.items())
        rows = load.rows.all + load.coming.all
        steps = min(HORIZON, load.remaining / max(1, rows))
        # Without a clear advantage the weights stay as they are.
        best, lowest = view.merged, math.inf
        for adapter in self._candidates(view, load):
            rank = self._ranks.get(adapter, 0)
            switch = self.cost.switch(view.merged, adapter, rank)
            cost = switch * (1 + self.settings.hysteresis)
            cost = max(0.0, cost - self._regrets.get(adapter, 0.0))
            cost += self.cost.step(load.step(adapter, rank, load.prompt.all))
            cost += steps * self.cost.step(load.step(adapter, rank, 0, later=True))
            if cost < lowest:
                best, lowest = adapter, cost
        chosen = load.groups.get(best)
        own = chosen.rows + chosen.coming if chosen is not None else 0
        note = f"rows of the merged adapter: {own} of {rows}; predicted {lowest * 1e3:.1f} ms"
        return best, note

    def _regret(self, view: View, load: _Load, adapter: str | None, tokens: int) -> None:
        """Note what other weights would have saved in a step with so many prompt tokens."""
        if adapter != view.merged:
            self._regrets.clear()
        found, ranks = self._regrets, self._ranks
        took = self.cost.step(load.step(adapter, ranks.get(adapter, 0), tokens))
        for other in {*self._candidates(view, load), *found} - {adapter}:
            rank = ranks.get(other, 0)
            saved = took - self.cost.step(load.step(other, rank, tokens))
            limit = self.cost.switch(adapter, other, rank) * (1 + self.settings.hysteresis)
            found[other] = min(found.get(other, 0.0) + saved, limit)
        best = heapq.nlargest(REGRETS, found, key=found.__getitem__)
        self._regrets = {other: found[other] for other in best if found[other] > 0}

    def observe(self, arrived: Sequence[float]) -> None:
        for arrival in arrived:
            gap = arrival - self._last_arrival
            if gap < BURST_GAP:
                self._burst_size += 1
                continue
            if self._last_arrival > -math.inf:
                self._gap += GAP_WEIGHT * (gap - self._gap)
                self._burst += GAP_WEIGHT * (self._burst_size - self._burst)
            self._burst_size = 1
            self._last_arrival = arrival

    def _rate(self, now: float) -> float:
        return self._burst / max(self._gap, now - self._last_arrival)

    def _hold(
        self, view: View, load: _Load, adapter: str | None, ready: Sequence[RequestView]
    ) -> float:
        """The time until which to wait for more prompts; now for no waiting."""
        now, rows = view.now, load.rows.all
        if not rows or not ready:
            return now
        rank = self._ranks.get(adapter, 0)
        base = self.cost.step(load.step(adapter, rank, 0))
        once = load.step(adapter, rank, load.prompt.all)
        twice = replace(once, prefill=2 * once.prefill, images=2 * once.images)
        saved = 2 * (self.cost.step(once) - base) - (self.cost.step(twice) - base)
        if saved <= 0:
            return now
        setup = rows * saved
        waited = sum(now - r.arrival for r in ready)
        if waited >= setup or len(ready) + 0.5 >= math.sqrt(2 * setup * self._rate(now)):
            return now
        if self._any_due(ready):
            return now
        return now + (setup - waited) / len(ready)

    def _first(
        self, view: View, ready: Sequence[RequestView], fitting: int, load: _Load
    ) -> Sequence[RequestView]:
        """Choose the prompts to prefill in this step; the others follow in the next one.

        The candidates are the shortest 1, 2, 4, … of the `fitting` first of `ready`, and those of
        one adapter, which can be merged for them. With k of W prompts first, all W wait for the
        first step, and W − k for the others.
        """
        ordered = ready[:fitting]
        rows, chunk = load.rows.all, view.limits.chunk
        base = self.cost.step(load.step(None, 0, 0))
        rate = self._rate(view.now)
        options = [
            a for a in dict.fromkeys((view.merged, ordered[0].adapter)) if can_merge(view, a)
        ]

        def cost(number: int, part: _Load) -> float:
            """Request-seconds if the prompts in `part`, so many of them, go first."""
            time = math.inf
            for adapter in (None, *options):
                rank = self._ranks.get(adapter, 64)
                step = self.cost.step(part.step(adapter, rank, part.prompt.all))
                time = min(time, self.cost.switch(view.merged, adapter, rank) + step)
            left, tokens = fitting - number, load.prompt.all - part.prompt.all
            parts, rest = 1, 0.0
            if left and tokens > 0:
                parts = math.ceil(left / number)
                rest = parts * self.cost.step(load.step(None, 0, math.ceil(tokens / parts)))
            spent = time + rest - base * (1 + parts * (left > 0))
            found = len(ready) * time + (len(ready) - fitting) * rest + rows * spent
            # Head requests end with their prompt; the others decode on while the rest prefills.
            later = load.going_on - part.going_on
            found += part.going_on * max(0.0, rest - base * parts)
            found += later * max(0.0, rest - base * (parts - 1) / 2)
            found += (left - later) * rest * (parts + 1) / (2 * parts)
            return found / max(1e-3, 1 - rate * spent / fitting)

        best, lowest = ordered, math.inf
        part, size = _Load(view.running, chunk), 1
        for number, request in enumerate(ordered, 1):
            part.prefill(request)
            if number in (size, fitting):
                size *= 2
                if (found := cost(number, part)) < lowest:
                    best, lowest = ordered[:number], found
        for adapter in options:
            same = [r for r in ordered if r.adapter == adapter]
            if same and (found := cost(len(same), _Load([*view.running, *same], chunk))) < lowest:
                best, lowest = same, found
        return best

    def _chunk(
        self, load: _Load, adapter: str | None, prompt: int, behind: int, rate: float
    ) -> int:
        """How many of the `prompt` tokens to compute in this step; so many requests wait behind."""
        rank, rows, coming = self._ranks.get(adapter, 0), load.rows.all, load.coming.all
        base = self.cost.step(load.step(adapter, rank, 0))
        best, lowest = prompt, math.inf
        chunks = (size - rows for size in self._sizes)
        for tokens in (prompt, *(c for c in chunks if 0 < c < prompt)):
            time = self.cost.step(load.step(adapter, rank, tokens))
            steps = math.ceil(prompt / tokens)
            # Prompts are prefilled one after the other: the j-th of n ends after j/n of the steps.
            done = max(1.0, steps * (coming + 1) / (2 * coming))
            cost = rows * steps * (time - base) + coming * done * time
            cost += load.going_on * (steps - done) * (time - base) + behind * steps * time
            # Small steps reduce the throughput, which delays requests that arrive later.
            cost /= max(1e-3, 1 - rate * steps * (time - base) / coming)
            if cost < lowest:
                best, lowest = tokens, cost
        return best
