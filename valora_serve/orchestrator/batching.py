"""Fills the batch of a step within its limits; all policies share this.

Running requests that decode come first, then running requests that still prefill, then waiting
requests in the policy's order. The batch counts pages, adapters, tokens and requests. Requests that
have starved get their memory reserved, and adapters of waiting requests are prefetched into the
pages that are left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from valora_serve.orchestrator.decision import RequestView, View
    from valora_serve.types import Mode

FOREVER = math.inf
PREFETCHES = 32  # adapters being loaded at a time; the prompts of a step may all use different ones
LOOK_AHEAD = 256  # waiting requests considered for prefetching and for shares

by_arrival = attrgetter("arrival")


def waiting_since(request: RequestView) -> float:
    """Return the time in seconds since which a request waits for its next token."""
    served = request.served
    return request.arrival if served is None else served


@dataclass(slots=True)
class BatchPlan:
    """What a policy wants of a step: the requests that may take part, and the inference mode.

    Attributes:
        mode: Inference mode of the step.
        merged: Adapter to merge into the base weights, None for pristine weights.
        running: Running requests that may take part.
        waiting: Waiting requests that may be admitted, in this order.
        reason: Explanation for the decision trace.
        until: Time until which the decision holds if the step prefills nothing and leaves no
            request out.
        budget: Most prompt tokens of the step, None for as many as the limits allow.
        admit: Most waiting requests to admit, None for as many as the limits allow.
        strict: Whether a request that does not fit blocks those behind it.
    """

    mode: Mode
    merged: str | None
    running: Sequence[RequestView]
    waiting: Sequence[RequestView]
    reason: str
    until: float = FOREVER
    budget: int | None = None
    admit: int | None = None
    strict: bool = False


class BatchBuilder:
    """A batch that is filled by a plan within the limits of a view.

    Args:
        view: State before the step.
        plan: The policy's plan of the batch.
        starved: Requests that arrived before this time may not be overtaken.

    Attributes:
        items: Request ids with the number of tokens to compute.
        requests: The requests of `items`.
        preempt: Running requests to preempt.
        prefetch: Adapters to load.
        rotating: Whether not all running requests fit, so that they take turns.
        prompt_tokens: Prompt tokens in the batch.
        tokens: Tokens that the step can still take.
        pages: Pages that are still free.
        adapters: Adapters that the batch may use without counting them again.
    """

    def __init__(self, view: View, plan: BatchPlan, starved: float) -> None:
        self.view = view
        self.plan = plan
        self.starved = starved
        self.items: list[tuple[str, int]] = []
        self.requests: list[RequestView] = []
        self.preempt: list[RequestView] = []
        self.prefetch: list[str] = []
        self.rotating = False
        self.prompt_tokens = 0
        self.tokens = view.limits.max_tokens
        self._merge_pages = self._count_merge_pages()
        self.pages = view.limits.free_pages - self._merge_pages
        self.adapters: set[str | None] = {None, plan.merged}
        self._max_adapters = view.limits.max_adapters + 1  # None, the base model, is one of them

    def run(self) -> None:
        """Add running requests, then waiting requests, then prefetch adapters."""
        self._add_running()
        if self.plan.waiting and not self.preempt:
            self._add_waiting()
        if not self.items and self.plan.waiting and self.view.running and not self.preempt:
            self._preempt_for_waiting()
        if self.view.waiting:
            self._add_prefetches()

    def _add_running(self) -> None:
        plan, limits = self.plan, self.view.limits
        running = plan.running
        prefilling = self._add_decoding(running)
        if self.rotating or len(running) > limits.max_tokens:
            # Not all running requests fit at once: those that waited longest go first.
            self._restart()
            self.rotating = True
            prefilling = self._add_decoding(sorted(running, key=waiting_since))
        if prefilling is None:
            preempted = self._choose_victims()
            self._restart()
            gone = {r.id for r in preempted}
            self.preempt = preempted
            self.pages += sum(r.held for r in preempted)
            running = [r for r in running if r.id not in gone]
            prefilling = self._add_decoding(sorted(running, key=by_arrival), skip=True)
        budget = self.tokens if plan.budget is None else min(plan.budget, self.tokens)
        for request in prefilling or ():
            tokens = min(request.prompt_left, limits.chunk, budget)
            if tokens <= 0:
                break
            if self._fits(request.adapter) and request.pages <= self.pages:
                self.pages -= request.pages
                self._add(request, tokens)
                budget -= tokens

    def _count_merge_pages(self) -> int:
        """Count the pages of an adapter that becomes pinned only by being merged in this step."""
        merged = self.plan.merged
        if merged is None or merged == self.view.merged:
            return 0
        if any(r.adapter == merged for r in self.view.running):
            return 0
        return next((r.adapter_pages for r in self.view.waiting if r.adapter == merged), 0)

    def _restart(self) -> None:
        self.items.clear()
        self.requests.clear()
        self.tokens = self.view.limits.max_tokens
        self.pages = self.view.limits.free_pages - self._merge_pages
        self.adapters = {None, self.plan.merged}

    def _add_decoding(
        self, running: Iterable[RequestView], *, skip: bool = False
    ) -> list[RequestView] | None:
        """Add the running requests that decode.

        Args:
            running: Running requests, in order of precedence.
            skip: Leave out requests that get no page, instead of giving up.

        Returns:
            The running requests that prefill; None if there are too few pages and not `skip`.
        """
        prefilling = []
        adapters, resident = self.adapters, self.view.resident
        items, requests = self.items, self.requests
        most, tokens, pages = self._max_adapters, self.tokens, self.pages
        most += self.plan.merged is None and None not in adapters
        for request in running:
            if request.prompt_left:
                prefilling.append(request)
                continue
            adapter = request.adapter
            if adapter not in adapters:
                if adapter not in resident:
                    continue
                if len(adapters) >= most:
                    self.rotating = True
                    continue
                adapters.add(adapter)
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
        return prefilling

    def _choose_victims(self) -> list[RequestView]:
        """Choose running requests to preempt, youngest first, until the rest have pages."""
        free = self.view.limits.free_pages - self._merge_pages
        taking = {r.id for r in self.plan.running}
        need = sum(r.pages for r in self.plan.running)
        victims: list[RequestView] = []
        for request in sorted(self.view.running, key=by_arrival, reverse=True)[:-1]:
            if need <= free:
                break
            victims.append(request)
            free += request.held
            if request.id in taking:
                need -= request.pages
        return victims

    def _fits(self, adapter: str | None) -> bool:
        """Return whether the batch may use an adapter, and count the adapter if so."""
        if adapter in self.adapters:
            return True
        if adapter not in self.view.resident or len(self.adapters) >= self._max_adapters:
            return False
        self.adapters.add(adapter)
        return True

    def _add(self, request: RequestView, tokens: int) -> None:
        self.items.append((request.id, tokens))
        self.requests.append(request)
        self.tokens -= tokens
        self.prompt_tokens += tokens

    def _add_waiting(self) -> None:
        plan, view = self.plan, self.view
        limits, resident = view.limits, view.resident
        slots = limits.max_requests - len(view.running)
        if plan.admit is not None:
            slots = min(slots, plan.admit)
        if slots <= 0:
            return
        budget = self.tokens
        if plan.budget is not None:
            budget = min(budget, plan.budget - self.prompt_tokens)
        pinned = self._pinned()
        if not self._reserve():
            return
        for request in plan.waiting:
            if slots <= 0 or budget <= 0:
                break
            adapter = request.adapter
            if adapter is not None and adapter not in resident:
                continue
            starved = request.arrival < self.starved
            need = request.pages
            if adapter is not None and adapter not in pinned:
                need += request.adapter_pages
            if need > self.pages or not self._fits(adapter):
                if starved or plan.strict:
                    break
                continue
            pinned.add(adapter)
            self.pages -= need
            slots -= 1
            tokens = min(max(1, request.prompt_left), limits.chunk, budget)
            budget -= tokens
            self._add(request, tokens)

    def _pinned(self) -> set[str | None]:
        """Return the adapters that are pinned, so that their pages do not count as free."""
        pinned = {r.adapter for r in self.view.running}
        pinned.update((self.view.merged, self.plan.merged))
        pinned.update(self.view.loading)
        return pinned

    def _reserve(self) -> bool:
        """Reserve pages for the oldest starved request whose adapter is not resident.

        Returns:
            Whether there are enough pages; if not, no request is admitted until there are.
        """
        view = self.view
        for request in view.waiting:
            adapter = request.adapter
            if request.arrival >= self.starved:
                return True
            if adapter is None or adapter in view.resident:
                continue
            self.pages -= request.pages
            if adapter not in view.loading:
                self.pages -= request.adapter_pages
                if self.pages + request.pages >= 0:
                    self.prefetch.append(adapter)
            return self.pages >= 0
        return True

    def _preempt_for_waiting(self) -> None:
        """Preempt running requests, youngest first, until the first waiting request fits.

        Called when the plan leaves out all running requests and the waiting ones do not fit, since
        the running ones hold the pages or the slots.
        """
        head = next((r for r in self.plan.waiting if self._is_ready(r)), None)
        if head is None:
            return
        pages = self.view.limits.free_pages - self._merge_pages
        slots = self.view.limits.max_requests - len(self.view.running)
        need = head.pages + (head.adapter_pages if head.adapter not in self._pinned() else 0)
        for request in sorted(self.view.running, key=by_arrival, reverse=True):
            if need <= pages and slots > 0:
                break
            self.preempt.append(request)
            pages += request.held
            slots += 1

    def _is_ready(self, request: RequestView) -> bool:
        return request.adapter is None or request.adapter in self.view.resident

    def _add_prefetches(self) -> None:
        """Prefetch the adapters of the oldest waiting requests, as far as pages are left."""
        view = self.view
        seen = self._pinned() | self.adapters | set(self.prefetch)
        pages = self.pages
        for request in islice(view.waiting, LOOK_AHEAD):
            adapter = request.adapter
            if adapter in seen:
                continue
            seen.add(adapter)
            pages -= request.adapter_pages
            if pages < 0 or len(self.prefetch) + len(view.loading) >= PREFETCHES:
                break
            if adapter is not None and adapter not in view.resident:
                self.prefetch.append(adapter)
