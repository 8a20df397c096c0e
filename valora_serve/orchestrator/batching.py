"""Fills the batch of a step within its limits; all policies share this.

Running requests that decode come first, then running requests that still prefill, then waiting
requests in the policy's order, then prefetches of adapters into the pages that are left.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter

from valora_serve.orchestrator.decision import RequestView, View
from valora_serve.types import Mode

FOREVER = math.inf
PREFETCHES = 32  # adapters being loaded at a time; the prompts of a step may all use different ones
LOOK_AHEAD = 256  # waiting requests considered for prefetching and for shares
HEADROOM = 1  # pages left for each running request, which soon takes its next one, at admission

by_age = attrgetter("arrival", "id")
"""Sorts requests oldest first, without ties: a request is preempted only for an older one."""


def has_limit(request: RequestView) -> bool:
    """Return whether a request has a latency limit or a deadline of its own."""
    return request.latency_limit is not None or request.deadline is not None


def waiting_since(request: RequestView) -> float:
    """Return the time in seconds since which a request waits for its next token."""
    served = request.served
    return request.arrival if served is None else served


@dataclass(slots=True)
class BatchPlan:
    """What a policy wants of a step."""

    mode: Mode
    merged: str | None  # adapter to merge into the base weights, None for pristine weights
    running: Sequence[RequestView]  # that may take part
    waiting: Sequence[RequestView]  # that may be admitted, in this order
    reason: str  # explanation for the decision trace
    until: float = FOREVER  # the decision holds so long if no prompt and no request left out
    budget: int = sys.maxsize  # most prompt tokens of the step, besides the limits' own
    strict: bool = False  # whether a request that does not fit blocks those behind it
    # Waiting requests that must be admitted to keep their latency limits. Running requests without
    # a limit are preempted for them, unless they have starved.
    urgent: Sequence[RequestView] = ()


class BatchBuilder:
    """A batch that is filled by a plan within the limits of a view.

    Adapters of urgent requests are prefetched first, then in the order of the plan, then of the
    waiting ones in `queue`, which a plan may leave out. Requests that arrived before the time
    `starved` may not be overtaken.
    """

    def __init__(
        self, view: View, plan: BatchPlan, queue: Iterable[RequestView], starved: float
    ) -> None:
        self.view, self.plan, self.queue, self.starved = view, plan, queue, starved
        self.preempt: list[RequestView] = []
        self.prefetch: list[str] = []  # adapters to load
        self.rotating = False  # whether not all running requests fit, so that they take turns
        self.prompt_tokens = 0  # of the step
        self._reserved = False  # whether a starved request gets the next free pages
        self._max_adapters = view.limits.max_adapters + 1  # None, the base model, is one of them
        self._pinned: set[str | None] = {r.adapter for r in view.running}
        self._pinned |= {view.merged, plan.merged, *view.loading}
        # An adapter that becomes pinned only by being merged in this step.
        self._merge_pages = 0
        if plan.merged not in (None, view.merged, *(r.adapter for r in view.running)):
            own = (r.adapter_pages for r in view.waiting if r.adapter == plan.merged)
            self._merge_pages = next(own, 0)
        self._restart()

    def _restart(self) -> None:
        self.items: list[tuple[str, int]] = []
        self.requests: list[RequestView] = []
        self.tokens = self.view.limits.max_tokens  # that the step can still take
        self.pages = self._free_pages()
        self.adapters: set[str | None] = {None, self.plan.merged}

    def _free_pages(self) -> int:
        """Count the pages that are free once the merge and the preemptions are carried out."""
        held = sum(r.held for r in self.preempt)
        return self.view.limits.free_pages - self._merge_pages + held

    def run(self) -> None:
        """Fill the batch: `items`, `requests`, `preempt` and `prefetch`."""
        if self.plan.urgent:
            self._preempt_for_urgent()
        if self._add_running() and self.plan.waiting:
            self._add_waiting()
        if not self.items and self.view.running and not self.preempt and not self._reserved:
            self._preempt_for_waiting()
        if self.view.waiting:
            self._add_prefetches()

    def _add_running(self) -> bool:
        """Add running requests; return False if pages ran out and some were preempted."""
        plan, limits = self.plan, self.view.limits
        running = self._kept(plan.running)
        prefilling = self._add_decoding(running)
        if self.rotating or len(running) > limits.max_tokens:
            # Not all running requests fit at once: those that waited longest go first, and choose
            # the adapters of the step.
            self._restart()
            self.rotating = True
            running = sorted(running, key=waiting_since)
            for request in running:
                self._fits(request.adapter)
            prefilling = self._add_decoding(running)
        short = prefilling is None
        if short:
            self.preempt += self._choose_victims()
            self._restart()
            running = self._kept(running)
            prefilling = self._add_decoding(sorted(running, key=by_age), skip=True)
        budget = min(plan.budget, self.tokens)
        for request in sorted(prefilling or (), key=has_limit, reverse=True):
            if budget <= 0:
                break
            tokens = self._prompt_tokens(request, budget)
            if tokens and self._fits(request.adapter) and request.pages <= self.pages:
                self.pages -= request.pages
                self._add(request, tokens)
                budget -= tokens
        return not short

    def _kept(self, running: Sequence[RequestView]) -> Sequence[RequestView]:
        if not self.preempt:
            return running
        gone = {r.id for r in self.preempt}
        return [r for r in running if r.id not in gone]

    def _add_decoding(
        self, running: Iterable[RequestView], *, skip: bool = False
    ) -> list[RequestView] | None:
        """Add rows that decode, return those that prefill; None without a page, unless `skip`."""
        prefilling = []
        adapters, resident = self.adapters, self.view.resident
        items, requests = self.items, self.requests
        limit, tokens, pages = self._max_adapters, self.tokens, self.pages
        for request in running:
            if request.prompt_left:
                prefilling.append(request)
                continue
            adapter = request.adapter
            if adapter not in adapters and not self._fits(adapter):
                self.rotating |= adapter in resident
                continue
            if request.pages:
                if request.pages > pages:
                    if skip:
                        continue
                    return None
                pages -= request.pages
            if tokens <= 0:
                self.rotating = True
                break
            tokens -= 1
            items.append((request.id, 1))
            requests.append(request)
        self.tokens, self.pages = tokens, pages
        if any(r.adapter not in adapters for r in prefilling) and len(adapters) >= limit:
            self.rotating = True  # adapters of the rows that decode leave none for a prompt
        return prefilling

    def _choose_victims(self) -> list[RequestView]:
        """Choose whom to preempt until the rest have pages: the youngest, never the oldest."""
        running = sorted(self._kept(self.view.running), key=by_age, reverse=True)[:-1]
        running.sort(key=lambda r: has_limit(r) or r.arrival < self.starved)  # these last
        return self._victims(running, self._kept(self.plan.running))[0]

    def _victims(
        self,
        able: Iterable[RequestView],
        wanted: Iterable[RequestView],
        need: int = 0,
        slots: int = 1,
    ) -> tuple[list[RequestView], bool]:
        """Choose the first of `able` until all `wanted` and `need` have pages; whether they do."""
        free, taking = self._free_pages(), {r.id: r.pages for r in wanted}
        need += sum(taking.values())
        victims: list[RequestView] = []
        for request in able:
            if need <= free and slots > 0:
                break
            victims.append(request)
            free += request.held
            slots += 1
            need -= taking.get(request.id, 0)
        return victims, need <= free and slots > 0

    def _need(self, request: RequestView) -> int:
        """Pages of a waiting request, and of its adapter where that is not pinned."""
        return request.pages + (request.adapter_pages if request.adapter not in self._pinned else 0)

    def _fits(self, adapter: str | None) -> bool:
        if adapter in self.adapters:
            return True
        if adapter not in self.view.resident or len(self.adapters) >= self._max_adapters:
            return False
        self.adapters.add(adapter)
        return True

    def _prompt_tokens(self, request: RequestView, budget: int) -> int:
        """Tokens of a prompt within the limits; of an image's block all or none."""
        tokens = min(max(1, request.prompt_left), self.view.limits.chunk, budget)
        if not request.blocks:
            return tokens
        # The first prompt of a step gets its block, whatever the budget.
        limit = budget if self.prompt_tokens else self.tokens
        return request.whole(tokens) or (request.min_tokens if request.min_tokens <= limit else 0)

    def _add(self, request: RequestView, tokens: int) -> None:
        self.items.append((request.id, tokens))
        self.requests.append(request)
        self.tokens -= tokens
        self.prompt_tokens += tokens

    def _add_waiting(self) -> None:
        plan, view = self.plan, self.view
        limits, resident = view.limits, view.resident
        slots = limits.max_requests - len(view.running) + len(self.preempt)
        if slots <= 0:
            return
        budget = min(self.tokens, plan.budget - self.prompt_tokens)
        self._reserved = not self._reserve()
        if self._reserved:
            return
        urgent = {r.id for r in plan.urgent}
        growing = len(view.running) - len(self.preempt)
        for request in plan.waiting:
            if slots <= 0 or budget <= 0:
                break
            adapter = request.adapter
            if adapter is not None and adapter not in resident:
                continue
            starved = request.arrival < self.starved
            need = self._need(request)
            # What is preempted soon after its admission was computed in vain.
            room = self.pages if request.id in urgent else self.pages - HEADROOM * growing
            tokens = self._prompt_tokens(request, budget)
            if not tokens or need > room or not self._fits(adapter):
                if starved or plan.strict:
                    break
                continue
            self._pinned.add(adapter)
            self.pages -= need
            growing += 1
            slots -= 1
            budget -= tokens
            self._add(request, tokens)

    def _reserve(self) -> bool:
        """Reserve pages for a starved oldest request; False if nobody is admitted before it."""
        view = self.view
        oldest = view.waiting[0]
        # One whose adapter is there goes first: loading that of a younger one could evict it, and
        # so on in turns, for ever.
        if oldest.arrival >= self.starved or self._is_ready(oldest):
            return True
        assert oldest.adapter is not None
        self.pages -= oldest.pages
        if oldest.adapter not in view.loading:
            self.pages -= oldest.adapter_pages
            if self.pages + oldest.pages >= 0:
                self.prefetch.append(oldest.adapter)
        return self.pages >= 0

    def _preempt_for_waiting(self) -> None:
        """Preempt running requests, which the plan leaves out, for the first waiting one."""
        # It is admitted at once and must be older: otherwise two could preempt each other for ever.
        head = next((r for r in self.plan.waiting if self._is_ready(r)), None)
        if head is None or not self._fits(head.adapter):
            return
        younger = [r for r in self.view.running if by_age(r) > by_age(head)]
        if not self._preempt_for(head, younger):
            return
        self.pages = self._free_pages() - self._need(head)
        budget = min(self.tokens, max(1, self.plan.budget))
        self._add(head, self._prompt_tokens(head, budget))

    def _preempt_for_urgent(self) -> None:
        """Preempt running requests without a latency limit for the first urgent one, if it fits."""
        limits = self.view.limits
        head = next((r for r in self.plan.urgent if self._is_ready(r)), None)
        if head is None:
            return
        able = [r for r in self.view.running if not has_limit(r) and r.arrival >= self.starved]
        if not self._preempt_for(head, able):
            return
        stay = self._kept(self.plan.running)
        adapters = {r.adapter for r in stay} | {None, self.plan.merged, head.adapter}
        if len(adapters) > self._max_adapters or len(stay) >= limits.max_tokens:
            self.preempt.clear()
        self.pages = self._free_pages()

    def _preempt_for(self, head: RequestView, able: Sequence[RequestView]) -> bool:
        """Preempt the youngest of `able` for a waiting request; whether it fits, and some were."""
        slots = self.view.limits.max_requests - len(self.view.running)
        youngest = sorted(able, key=by_age, reverse=True)
        victims, fits = self._victims(youngest, self.plan.running, self._need(head), slots)
        if fits:
            self.preempt += victims
        return bool(victims) and fits

    def _is_ready(self, request: RequestView) -> bool:
        return request.adapter is None or request.adapter in self.view.resident

    def _add_prefetches(self) -> None:
        """Prefetch adapters in the plan's order, then in the queue's, as far as pages are left."""
        view = self.view
        seen = self._pinned | self.adapters | set(self.prefetch)
        pages = self.pages
        plan = self.plan
        # A plan of adapters that are all on the device says nothing about what to load.
        planned = () if all(map(self._is_ready, plan.waiting)) else plan.waiting
        for request in islice(chain(plan.urgent, planned, self.queue), LOOK_AHEAD):
            adapter = request.adapter
            if adapter in seen:
                continue
            seen.add(adapter)
            pages -= request.adapter_pages
            if pages < 0 or len(self.prefetch) + len(view.loading) >= PREFETCHES:
                break
            if adapter is not None and adapter not in view.resident:
                self.prefetch.append(adapter)
