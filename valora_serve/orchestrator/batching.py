"""Fills a batch within the limits of a step; what all policies share.

Running requests that decode come first, then those that still read their prompt, then waiting ones
in the policy's order. Pages, adapters, tokens and requests are counted on the way; whoever has
waited too long gets room made; adapters of those that wait are asked for with what is left.
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
PREFETCHES = 32  # adapters on their way at a time; a step's prompts may all have different ones
LOOK_AHEAD = 256  # waiting requests looked at for prefetching and clustering

by_arrival = attrgetter("arrival")


def since(request: RequestView) -> float:
    """Since when a request waits for its next token."""
    served = request.served
    return request.arrival if served is None else served


@dataclass(slots=True)
class Plan:
    """Who may take part in a step, and how; what a policy hands to `BasePolicy._pack`.

    Attributes:
        mode: Of the step.
        merged: Adapter in the weights.
        running: Running requests that may take part.
        waiting: Waiting requests that may be taken in, in this order.
        reason: Why.
        until: Until when the answer holds, if nothing is prefilled and nobody is left out.
        budget: Most prompt tokens of the step, None for what the limits allow.
        admit: Most requests to take in, None for what the limits allow.
        strict: A request that does not fit holds up those behind it.
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


class Batch:
    """A batch that is being filled within the limits of a view.

    Args:
        view: What the policy sees.
        plan: What it wants.
        starved: Requests that arrived before may not be overtaken.
    """

    def __init__(self, view: View, plan: Plan, starved: float) -> None:
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
        self.merging = self._merging()
        self.pages = view.limits.free_pages - self.merging
        self.adapters: set[str | None] = {None, plan.merged}
        self.room = view.limits.max_adapters + 1

    def run(self) -> None:
        """Take the running requests, then the waiting ones, then prefetch."""
        self._running()
        if self.plan.waiting and not self.preempt:
            self._waiting()
        if not self.items and self.plan.waiting and self.view.running and not self.preempt:
            self._make_way()
        if self.view.waiting:
            self._prefetches()

    def _running(self) -> None:
        plan, limits = self.plan, self.view.limits
        running = plan.running
        prefilling = self._decode(running)
        if self.rotating or len(running) > limits.max_tokens:
            # Not all fit at once: those that waited longest go first.
            self._restart()
            self.rotating = True
            prefilling = self._decode(sorted(running, key=since))
        if prefilling is None:
            preempted = self._free_pages()
            self._restart()
            gone = {r.id for r in preempted}
            self.preempt = preempted
            self.pages += sum(r.held for r in preempted)
            running = [r for r in running if r.id not in gone]
            prefilling = self._decode(sorted(running, key=by_arrival), skip=True)
        budget = self.tokens if plan.budget is None else min(plan.budget, self.tokens)
        for request in prefilling or ():
            tokens = min(request.prompt_left, limits.chunk, budget)
            if tokens <= 0:
                break
            if self._fits(request.adapter) and request.pages <= self.pages:
                self.pages -= request.pages
                self._add(request, tokens)
                budget -= tokens

    def _merging(self) -> int:
        """Pages of an adapter that only now comes to be needed all the time, by its merge."""
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
        self.pages = self.view.limits.free_pages - self.merging
        self.adapters = {None, self.plan.merged}

    def _decode(
        self, running: Iterable[RequestView], *, skip: bool = False
    ) -> list[RequestView] | None:
        """Take the decodes; says who prefills, None if pages ran out (unless `skip`)."""
        prefilling = []
        adapters, resident = self.adapters, self.view.resident
        items, requests = self.items, self.requests
        room, tokens, pages = self.room, self.tokens, self.pages
        room += self.plan.merged is None and None not in adapters
        for request in running:
            if request.prompt_left:
                prefilling.append(request)
                continue
            adapter = request.adapter
            if adapter not in adapters:
                if adapter not in resident:
                    continue
                if len(adapters) >= room:
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

    def _free_pages(self) -> list[RequestView]:
        """Running requests to preempt, youngest first, until the older ones can go on."""
        free = self.view.limits.free_pages - self.merging
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
        """Whether rows of an adapter may be in the batch; then it is one of the batch's."""
        if adapter in self.adapters:
            return True
        if adapter not in self.view.resident or len(self.adapters) >= self.room:
            return False
        self.adapters.add(adapter)
        return True

    def _add(self, request: RequestView, tokens: int) -> None:
        self.items.append((request.id, tokens))
        self.requests.append(request)
        self.tokens -= tokens
        self.prompt_tokens += tokens

    def _waiting(self) -> None:
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
        """Adapters whose pages do not count as free."""
        pinned = {r.adapter for r in self.view.running}
        pinned.update((self.view.merged, self.plan.merged))
        pinned.update(self.view.loading)
        return pinned

    def _reserve(self) -> bool:
        """Keep pages for the oldest starved request whose adapter is missing.

        Returns:
            Whether there are enough; if not, nobody may be taken in until there are.
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

    def _make_way(self) -> None:
        """Nothing can go on: running requests that the mode leaves out hold what is needed.

        The youngest of them give way to the first that waits.
        """
        head = next((r for r in self.plan.waiting if self._present(r)), None)
        if head is None:
            return
        pages = self.view.limits.free_pages - self.merging
        slots = self.view.limits.max_requests - len(self.view.running)
        need = head.pages + (head.adapter_pages if head.adapter not in self._pinned() else 0)
        for request in sorted(self.view.running, key=by_arrival, reverse=True):
            if need <= pages and slots > 0:
                break
            self.preempt.append(request)
            pages += request.held
            slots += 1

    def _present(self, request: RequestView) -> bool:
        return request.adapter is None or request.adapter in self.view.resident

    def _prefetches(self) -> None:
        """Adapters of the oldest that wait, as far as memory goes."""
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
