"""The policy that minimises predicted latency.

The sum of all latencies is the number of requests in the system, integrated over time. A step of τ
seconds with N requests in the system therefore costs N·τ request-seconds, and the policy compares
all choices on this scale, with times from the cost model:

- **Weights.** The policy compares the current weights, pristine weights and the most popular
  adapters, and takes those with the cheapest switch and steps until the batch changes. A switch
  therefore happens when it pays.
- **Prompts.** A step with prompt tokens delays all rows that decode. Where two such steps cost more
  than a single one with twice the tokens, the policy collects prompts. One set-up costs
  C = N·(seconds that sharing it saves), and a waiting request costs 1 per second, so √(2λC)
  requests at arrival rate λ are prefilled together, or as many as have waited for C in sum. Where
  a chunk takes no longer than reading the weights, the policy cuts prompts into chunks.
- **Pauses.** A few rows of other adapters slow down all rows of the merged adapter. While they are
  too few to be worth it, they are paused, for up to `max_pause` seconds.
- **Order.** Requests that would otherwise miss their latency limit go first, by due time. They do
  not wait for groups or for more prompts, and a request without a limit is preempted for them if
  none else makes room. Then come requests that have waited for `patience`, then the others, the
  shortest remaining one first.
- **Group size.** With τ = a + b·rows, N equal requests end soonest on average in groups of
  √(a·N/b). If the requests of one adapter fill such a group, they run alone: merged, without LoRA
  terms.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from valora_serve.orchestrator.base import BasePolicy, can_merge
from valora_serve.orchestrator.batching import FOREVER, BatchPlan
from valora_serve.orchestrator.cost_model import StepShape
from valora_serve.types import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from valora_serve.orchestrator.cost_model import CostModel
    from valora_serve.orchestrator.decision import PolicySettings, RequestView, View

CANDIDATES = 2  # adapters considered for merging, besides the merged one
HORIZON = 64  # most steps for which a choice of weights is assumed to hold
RECONSIDER = 0.1  # seconds after which an unchanged queue is considered again
CHUNKS = (128, 256, 512, 1024, 2048, 4096)  # rows of a step with a chunk, besides captured sizes
LONE_SHARE = 0.7  # share of all requests from which on those of one adapter may run alone
GAP_WEIGHT = 0.1  # weight of the newest gap between arrivals in their moving average
BURST_GAP = 1e-3  # seconds between arrivals below which they count as one burst


_prompt_left = attrgetter("prompt_left")


@dataclass(slots=True)
class _Group:
    """The work to do for one adapter.

    Attributes:
        rank: Rank of the adapter, 0 for the base model.
        rows: Rows that decode.
        coming: Rows that will decode after their prefill.
        prompt: Prompt tokens to prefill.
    """

    rank: int
    rows: int = 0
    coming: int = 0
    prompt: int = 0


class _Load:
    """The work to do, in sum and by adapter.

    Attributes:
        groups: Work by adapter, None for the base model.
        rows: Rows that decode.
        kv_tokens: Their tokens in the KV cache.
        remaining: Tokens still to generate, of all rows.
        coming: Rows that will decode after their prefill.
        going_on: Those of them that generate more than their first token.
        prompt: Prompt tokens to prefill.
        images: Images to encode.
    """

    def __init__(self) -> None:
        self.groups: dict[str | None, _Group] = {}
        self.rows = self.kv_tokens = self.remaining = 0
        self.coming = self.going_on = self.prompt = self.images = 0
        # Ranks summed over decode rows, over coming rows and over prompt tokens. Rows of the base
        # model add none.
        self._work = self._coming_work = self._prompt_work = 0
        self._base = self._base_coming = self._base_prompt = 0
        self._ranks = self._coming_ranks = 0

    def decode(self, request: RequestView) -> None:
        """Add a row that decodes."""
        rank = request.rank
        group = self.groups.get(request.adapter)
        if group is None:
            group = self.groups[request.adapter] = _Group(rank)
        if not group.rows:
            self._ranks += rank
        group.rows += 1
        self.rows += 1
        self.kv_tokens += request.kv_tokens
        self.remaining += request.output_left
        self._work += rank
        self._base += request.adapter is None

    def prefill(self, request: RequestView, tokens: int) -> None:
        """Add prompt tokens, and the row that decodes after them."""
        rank = request.rank
        base = request.adapter is None
        group = self.groups.get(request.adapter)
        if group is None:
            group = self.groups[request.adapter] = _Group(rank)
        if not group.rows and not group.coming:
            self._coming_ranks += rank
        group.prompt += tokens
        group.coming += 1
        self.prompt += tokens
        self.coming += 1
        self.going_on += request.output_left > 0
        self.images += request.images
        self.remaining += request.output_left
        self._coming_work += rank
        self._prompt_work += rank * tokens
        self._base_coming += base
        self._base_prompt += tokens * base

    def step(self, adapter: str | None, rank: int, prompt: int) -> StepShape:
        """Return the shape of the next step.

        Args:
            adapter: Merged adapter, None for pristine weights.
            rank: Rank of the merged adapter.
            prompt: Prompt tokens of the step.
        """
        share = prompt / self.prompt if self.prompt else 0.0
        group = self.groups.get(adapter)
        terms, work, ranks = self._lora(
            adapter,
            rank,
            self.rows + prompt,
            self._base + self._base_prompt * share,
            self._work + self._prompt_work * share,
            self._ranks + (self._coming_ranks if prompt else 0),
            0 if group is None else group.rows + group.prompt * share,
        )
        return StepShape(
            Mode.UNMERGED if adapter is None else Mode.MIXTURE,
            decode=self.rows,
            prefill=prompt,
            images=math.ceil(self.images * share),
            kv_tokens=self.kv_tokens,
            terms=terms,
            work=work,
            ranks=ranks,
        )

    def later(self, adapter: str | None, rank: int) -> StepShape:
        """Return the shape of the decode steps after all prefills.

        Args:
            adapter: Merged adapter, None for pristine weights.
            rank: Rank of the merged adapter.
        """
        group = self.groups.get(adapter)
        rows = self.rows + self.coming
        terms, work, ranks = self._lora(
            adapter,
            rank,
            rows,
            self._base + self._base_coming,
            self._work + self._coming_work,
            self._ranks + self._coming_ranks,
            0 if group is None else group.rows + group.coming,
        )
        return StepShape(
            Mode.UNMERGED if adapter is None else Mode.MIXTURE,
            decode=rows,
            kv_tokens=self.kv_tokens + self.prompt,
            terms=terms,
            work=work,
            ranks=ranks,
        )

    @staticmethod
    def _lora(
        adapter: str | None,
        rank: int,
        tokens: float,
        base: float,
        work: float,
        ranks: int,
        own: float,
    ) -> tuple[int, int, int]:
        """Return LoRA terms, their ranks and the ranks of the distinct adapters, as in `StepShape`.

        Args:
            adapter: Merged adapter, None for pristine weights.
            rank: Rank of the merged adapter.
            tokens: Tokens in the step.
            base: Tokens of the base model.
            work: Ranks summed over tokens.
            ranks: Ranks summed over adapters.
            own: Tokens of the merged adapter.
        """
        terms = tokens - base
        if adapter is not None:
            foreign = tokens - own
            if foreign < 0.5:
                return 0, 0, 0
            terms += foreign - own
            work += (foreign - own) * rank
            ranks += 0 if own else rank
        return math.ceil(terms), math.ceil(work), ranks


class CostPolicy(BasePolicy):
    """Chooses weights, prompts and order by predicted latency.

    Args:
        cost_model: Predicts the seconds of steps, switches and loads.
        settings: Settings of the policies.
    """

    def __init__(self, cost_model: CostModel, settings: PolicySettings) -> None:
        super().__init__(cost_model, settings)
        self._last_arrival = -math.inf
        self._gap = self._burst = 1.0
        self._burst_size = 0
        self._paused = False
        self._ranks: dict[str, int] = {}
        self._sizes = sorted({*cost_model.captured_rows, *CHUNKS})

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        """Plan the step with the lowest predicted latency."""
        chunk = view.limits.chunk
        load = self._load(view.running, chunk)
        urgent = self.urgent(view, waiting)
        ready, why = self._ready(view, waiting, urgent, load)
        running, ready, until = self._pause(view, ready)
        if until < FOREVER:
            load, why = self._load(running, chunk), "others are paused"
        prefilling = load.coming
        room = view.limits.max_tokens - load.rows
        for request in ready:
            if load.prompt >= room:
                break
            load.prefill(request, min(request.prompt_left, chunk))
        adapter, rank, note = self._weights(view, load)
        budget, held = None, view.now
        if load.prompt:
            if not prefilling and not urgent:
                held = self._hold(view, load, adapter, rank, ready)
            if held > view.now:
                budget, until = 0, min(until, held)
                why = f"collecting prompts; {why}" if why else "collecting prompts"
            else:
                if len(ready) > 1:
                    ready = self._first(view, running, ready, load)
                    if len(ready) < load.coming - prefilling:
                        load = self._load(running, chunk)
                        for request in ready:
                            load.prefill(request, min(request.prompt_left, chunk))
                        adapter, rank, note = self._weights(view, load)
                budget = min(load.prompt, room)
                if (
                    load.rows
                    and not urgent
                    and not self._any_due(r for r in running if r.prompt_left)
                ):
                    budget = self._chunk(load, adapter, rank, budget, self._rate(view.now))
        elif waiting:
            until = min(until, view.now + RECONSIDER)
        return BatchPlan(
            Mode.UNMERGED if adapter is None else Mode.MIXTURE,
            adapter,
            running,
            ready,
            f"{note}; {why}" if why else note,
            until,
            budget=budget,
            urgent=urgent,
        )

    def _any_due(self, requests: Iterable[RequestView]) -> bool:
        """Return whether one of the requests has a latency limit."""
        return any(self.settings.due(r) is not None for r in requests)

    @staticmethod
    def _load(running: Sequence[RequestView], chunk: int) -> _Load:
        load = _Load()
        for request in running:
            if request.prompt_left:
                load.prefill(request, min(request.prompt_left, chunk))
            else:
                load.decode(request)
        return load

    # -- order and group size -------------------------------------------------------------------

    def _ready(
        self,
        view: View,
        waiting: Sequence[RequestView],
        urgent: Sequence[RequestView],
        load: _Load,
    ) -> tuple[Sequence[RequestView], str]:
        """Return the requests to admit now, best first, and the reason for leaving others out."""
        if not waiting:
            return (), ""
        resident = view.resident
        first = [r for r in urgent if r.adapter is None or r.adapter in resident]
        running = len(view.running)
        slots = view.limits.max_requests - running
        if slots <= 0:
            return first, "no request slots left"
        if urgent:
            taken = {r.id for r in urgent}
            waiting = [r for r in waiting if r.id not in taken]
            if not waiting:
                return first, ""
        total = running + len(urgent) + len(waiting)
        target, fixed, slope = self._group_size(view, load, total, waiting)
        slots -= len(first)
        fair = self.settings.fair  # the order is that of the shares
        admit = min(slots, math.ceil(min(target, total)) - running - len(first))
        if admit >= len(waiting):
            return [*first, *(r for r in waiting if r.adapter is None or r.adapter in resident)], ""
        aged = 0
        too_old = view.now - self.settings.patience
        for request in waiting:
            if fair or request.arrival >= too_old:
                break
            aged += 1
        admit = max(admit, min(aged, slots))
        if admit <= 0:
            return first, f"groups of {running} end soonest"
        old = list(islice(waiting, aged))
        rest = [
            r for r in islice(waiting, aged, None) if r.adapter is None or r.adapter in resident
        ]
        why = "by share" if fair else "shortest request first"
        if not aged and not fair and not first:
            alone = self._alone(view, load, rest, target)
            if alone is not None:
                rest = [r for r in rest if r.adapter == alone]
                why = f"{alone} alone fills the batch, shortest request first"
        per_row = slope + fixed / max(1.0, min(target, total))

        def remaining(request: RequestView) -> float:
            return request.prompt_left * self._per_token + request.output_left * per_row

        if not fair:
            rest = heapq.nsmallest(max(0, admit - aged), rest, key=remaining)
        return first + old + rest[: max(0, admit - aged)], why

    def _group_size(
        self, view: View, load: _Load, total: int, waiting: Sequence[RequestView]
    ) -> tuple[float, float, float]:
        """Return the group size that ends soonest, and a step's fixed and per-row seconds."""
        rows = max(2, min(total, view.limits.max_requests))
        some = list(islice(waiting, 32))
        prompt = sum(r.prompt_left for r in some) / len(some)
        output = sum(r.output_left for r in some) / len(some)
        kv_tokens = load.kv_tokens / load.rows if load.rows else prompt + output / 2
        one = self.cost.step(StepShape(decode=1, kv_tokens=int(kv_tokens)))
        many = self.cost.step(StepShape(decode=rows, kv_tokens=int(kv_tokens * rows)))
        slope = max((many - one) / (rows - 1), 1e-9)
        fixed = max(one - slope, 1e-9)
        if output < 1 or not self.settings.groups:
            return FOREVER, fixed, slope  # head requests never decode: `_first` orders them
        size = math.sqrt(fixed * total / slope)
        # Small groups reduce the throughput, which delays requests that arrive later.
        service = prompt * self._per_token + output * (fixed / size + slope)
        idle = 1 - self._rate(view.now) * service
        return size / max(idle, 1e-3), fixed, slope

    def _alone(
        self, view: View, load: _Load, rest: Sequence[RequestView], target: float
    ) -> str | None:
        """Return an adapter whose requests alone fill the batch, None if there is none."""
        counts = Counter([r.adapter for r in rest])
        for adapter, group in load.groups.items():
            counts[adapter] += group.rows + group.coming
        able = [(n, a) for a, n in counts.items() if a is not None and can_merge(view, a)]
        if not able:
            return None
        count, adapter = max(able)
        enough = max(target, LONE_SHARE * counts.total())
        return adapter if count >= enough else None

    def _pause(
        self, view: View, ready: Sequence[RequestView]
    ) -> tuple[Sequence[RequestView], Sequence[RequestView], float]:
        """Pause the requests of other adapters while they are few.

        With n rows of the merged adapter, m rows of others, and mixture steps that are longer by a
        share o, a step without the others gains n·o and loses m. A pause pays while m < n·o, and
        more so if the others then run together. The others are paused while m is at most half of
        n·o, and resumed when m exceeds n·o or when one of them has waited for
        `PolicySettings.max_pause`. Requests with a latency limit are never paused.

        Returns:
            The running requests to compute, the waiting requests to admit, and the time at which
            the pause ends at the latest.
        """
        adapter, now, longest = view.merged, view.now, self.settings.max_pause
        everyone = view.running, ready, FOREVER
        own = [r for r in view.running if r.adapter == adapter and not r.prompt_left]
        others = [r for r in view.running if r.adapter != adapter]
        others += [r for r in ready if r.adapter != adapter]
        paused, self._paused = self._paused, False
        n, m = len(own), len(others)
        if (
            adapter is None
            or not n
            or not m
            or any(self.settings.due(r) is not None for r in others)
        ):
            return everyone
        oldest = min(r.arrival if r.served is None else r.served for r in others)
        joining = self._rate(now) * longest * m / (n + m)
        if m > n or now - oldest >= longest or (joining < 1 and not paused):
            return everyone
        load = _Load()
        for request in own:
            load.decode(request)
        alone = self.cost.step(load.step(adapter, 0, 0))
        for request in others:
            load.decode(request)
        mixed = self.cost.step(load.step(adapter, self._ranks.get(adapter, 64), 0))
        worth = n * (mixed / alone - 1)
        if m > (worth if paused else worth / 2):
            return everyone
        self._paused = True
        return (
            [r for r in view.running if r.adapter == adapter],
            [r for r in ready if r.adapter == adapter],
            oldest + longest,
        )

    # -- weights --------------------------------------------------------------------------------

    def _weights(self, view: View, load: _Load) -> tuple[str | None, int, str]:
        """Return the adapter to merge, its rank, and the reason; None for pristine weights."""
        if not load.groups:
            return view.merged, self._ranks.get(view.merged or "", 0), "nothing to compute"
        popular = sorted(
            ((g.rows + g.coming, g.prompt, a) for a, g in load.groups.items() if a is not None),
            reverse=True,
        )[:CANDIDATES]
        candidates: list[str | None] = [None]
        if view.merged is not None:
            candidates.append(view.merged)
        candidates += [a for _, _, a in popular if a != view.merged and can_merge(view, a)]
        if not self.settings.mixture:  # an adapter beside which nothing else runs, or none
            candidates = [a for a in candidates if a is None or load.groups.keys() <= {a}]
        for adapter, group in load.groups.items():
            if adapter is not None:
                self._ranks[adapter] = group.rank
        rows = load.rows + load.coming
        steps = min(HORIZON, load.remaining / max(1, rows))
        # Without a clear advantage the weights stay as they are.
        best, least = view.merged, math.inf
        for adapter in candidates:
            rank = self._ranks.get(adapter, 0) if adapter is not None else 0
            cost = self.cost.switch(view.merged, adapter, rank)
            cost += self.cost.step(load.step(adapter, rank, load.prompt))
            cost += steps * self.cost.step(load.later(adapter, rank))
            if adapter != view.merged:
                cost += self.settings.hysteresis * self.cost.switch(view.merged, adapter, rank)
            if cost < least:
                best, least = adapter, cost
        rank = self._ranks.get(best, 0) if best is not None else 0
        chosen = load.groups.get(best)
        own = chosen.rows + chosen.coming if chosen is not None else 0
        return (
            best,
            rank,
            f"rows of the merged adapter: {own} of {rows}; predicted {least * 1e3:.1f} ms",
        )

    # -- prompts --------------------------------------------------------------------------------

    def observe(self, arrived: Sequence[float]) -> None:
        """Update the moving averages of the gap between arrivals and of the size of bursts."""
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
        """Return the expected arrival rate in requests per second."""
        return self._burst / max(self._gap, now - self._last_arrival)

    def _hold(
        self, view: View, load: _Load, adapter: str | None, rank: int, ready: Sequence[RequestView]
    ) -> float:
        """Return the time until which to wait for more prompts; now for no waiting."""
        now = view.now
        if not load.rows or not ready:
            return now
        base = self.cost.step(load.step(adapter, rank, 0))
        once = load.step(adapter, rank, load.prompt)
        twice = replace(once, prefill=2 * once.prefill, images=2 * once.images)
        saved = 2 * (self.cost.step(once) - base) - (self.cost.step(twice) - base)
        if saved <= 0:
            return now
        setup = load.rows * saved
        waited = sum(now - r.arrival for r in ready)
        if waited >= setup or len(ready) + 0.5 >= math.sqrt(2 * setup * self._rate(now)):
            return now
        if self._any_due(ready):
            return now
        return now + (setup - waited) / len(ready)

    def _first(
        self,
        view: View,
        running: Sequence[RequestView],
        ready: Sequence[RequestView],
        load: _Load,
    ) -> Sequence[RequestView]:
        """Choose the prompts to prefill in this step; the others follow in the next one.

        The candidates are the shortest 1, 2, 4, … prompts, and those of one adapter, which can be
        merged for them. With k of W prompts first, all W wait for the first step, and W − k wait
        for the others.
        """
        too_old = view.now - self.settings.patience
        if self.settings.fair or any(
            r.arrival < too_old or self.settings.due(r) is not None for r in ready
        ):
            return ready
        ordered = sorted(ready, key=_prompt_left)
        chunk, total = view.limits.chunk, len(ready)
        base = self.cost.step(load.step(None, 0, 0))
        rate = self._rate(view.now)
        best: Sequence[RequestView] = ready
        least = math.inf
        options = [
            a for a in dict.fromkeys((view.merged, ordered[0].adapter)) if can_merge(view, a)
        ]

        def consider(chosen: Sequence[RequestView], part: _Load) -> None:
            nonlocal best, least
            time = min(
                self.cost.switch(view.merged, a, self._ranks.get(a or "", 64))
                + self.cost.step(part.step(a, self._ranks.get(a or "", 64), part.prompt))
                for a in (None, *options)
            )
            left, tokens = total - len(chosen), load.prompt - part.prompt
            parts, rest = 1, 0.0
            if left and tokens > 0:
                parts = math.ceil(left / len(chosen))
                rest = parts * self.cost.step(load.step(None, 0, math.ceil(tokens / parts)))
            spent = time + rest - base * (1 + parts * (left > 0))
            cost = total * time + left * rest * (parts + 1) / (2 * parts) + load.rows * spent
            # Head requests have ended by then; the others decode while the rest prefills.
            cost += part.going_on * max(0.0, rest - base * parts)
            cost /= max(1e-3, 1 - rate * spent / total)
            if cost < least:
                best, least = chosen, cost

        part, size = self._load(running, chunk), 1
        for number, request in enumerate(ordered, 1):
            part.prefill(request, min(request.prompt_left, chunk))
            if number in (size, total):
                consider(ordered[:number], part)
                size *= 2
        for adapter in options:
            same = [r for r in ordered if r.adapter == adapter]
            if same:
                part = self._load(running, chunk)
                for request in same:
                    part.prefill(request, min(request.prompt_left, chunk))
                consider(same, part)
        return best

    def _chunk(self, load: _Load, adapter: str | None, rank: int, prompt: int, rate: float) -> int:
        """Return the number of prompt tokens to compute in the step."""
        base = self.cost.step(load.step(adapter, rank, 0))
        best, least = prompt, math.inf
        chunks = (size - load.rows for size in self._sizes)
        for tokens in (prompt, *(c for c in chunks if 0 < c < prompt)):
            time = self.cost.step(load.step(adapter, rank, tokens))
            steps = math.ceil(prompt / tokens)
            # Prompts are prefilled one after the other: the j-th of n ends after j/n of the steps.
            done = max(1.0, steps * (load.coming + 1) / (2 * load.coming))
            cost = load.rows * steps * (time - base) + load.coming * done * time
            cost += load.going_on * (steps - done) * (time - base)
            # Small steps reduce the throughput, which delays requests that arrive later.
            cost /= max(1e-3, 1 - rate * steps * (time - base) / load.coming)
            if cost < least:
                best, least = tokens, cost
        return best
