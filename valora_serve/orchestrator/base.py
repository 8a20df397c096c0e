"""Base class of the policies: fills the batch and turns a plan into a decision.

`batching.BatchBuilder` keeps the limits of a step. A policy says which requests may take part, in
which order, and which adapter is merged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from valora_serve.orchestrator.admission import EarlyAbort, FairShares
from valora_serve.orchestrator.batching import FOREVER, BatchBuilder, BatchPlan
from valora_serve.orchestrator.cost_model import CostModel, StepShape
from valora_serve.orchestrator.decision import Decision, PolicySettings, RequestView, View
from valora_serve.types import Mode

URGENT = 1.5  # a request is urgent while its time left is below this multiple of its predicted time


class BasePolicy:
    """Decides before each step what it computes; a subclass implements `plan`.

    Attributes:
        modes: Inference modes that the decisions can have; the engine prepares only these.
        shares: Whether `PolicySettings.fair` can be kept: its plans leave no waiting request out.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset(Mode)
    shares: ClassVar[bool] = True

    def __init__(self, cost_model: CostModel, settings: PolicySettings) -> None:
        self.cost = cost_model
        self.settings = settings
        self._steady: Sequence[RequestView] = ()
        many, few = StepShape(prefill=1024), StepShape(prefill=512)
        self._per_token = (cost_model.step(many) - cost_model.step(few)) / 512
        self._early_abort = EarlyAbort(settings) if settings.early_abort else None
        self._shares = FairShares(settings.shares) if settings.fair else None

    def plan(self, view: View, waiting: Sequence[RequestView]) -> BatchPlan:
        """Plan a step; at least one request is running or waiting.

        `waiting` may be admitted: in the order of `view.waiting` unless early abort reverses it or
        `PolicySettings.fair` orders it by share; shares and patience are kept in any other order.
        """
        raise NotImplementedError

    def decide(self, view: View) -> Decision:
        """Decide the next step; writes `credit` and `served` of the requests in the view."""
        for request in self._steady:
            request.served = view.now
        self._steady = ()
        self.observe(view.arrived)
        waiting = view.waiting
        abort: tuple[tuple[str, str], ...] = ()
        if self._early_abort is not None:
            waiting, abort = self._early_abort(view)
        if abort:  # no pages are reserved and no adapters loaded for them
            gone = {request_id for request_id, _ in abort}
            view = replace(view, waiting=[r for r in view.waiting if r.id not in gone])
        if not view.running and not waiting:
            until = 0.0 if abort else FOREVER
            return Decision(view.mode, view.merged, abort=abort, reason="idle", until=until)
        if self._shares is not None:
            waiting = self._shares.order(view.running, waiting, view.limits.max_requests)
        plan = self.plan(view, waiting)
        self._keep_order(view, plan, waiting)
        if plan.mode is Mode.MIXTURE:
            taking = [*plan.running, *plan.waiting]
            others = any(r.adapter != plan.merged for r in taking)
            why = "" if self.settings.mixture or not others else "no mixture mode"
            if any(r.pair for r in taking):
                why = "a request has two adapters"
            if why:
                plan.mode, plan.merged = Mode.UNMERGED, None
                plan.reason = f"{why}; {plan.reason}"
        return self._pack(view, plan, waiting, abort)

    def _keep_order(self, view: View, plan: BatchPlan, waiting: Sequence[RequestView]) -> None:
        """Keep shares, clusters and patience, in whichever order a subclass admits."""
        urgent, starved = {r.id for r in plan.urgent}, view.now - self.settings.patience
        if self._shares is not None:
            order = {r.id: number for number, r in enumerate(waiting)}
            plan.waiting = sorted(plan.waiting, key=lambda r: (r.id not in urgent, order[r.id]))
        if self.settings.clusters and plan.waiting:
            plan.waiting = _cluster(view, plan.waiting, self.settings.clusters)
        if self._shares is None and view.waiting and view.waiting[0].arrival < starved:
            plan.waiting = sorted(
                plan.waiting, key=lambda r: (r.id not in urgent, min(r.arrival, starved))
            )

    def observe(self, arrived: Sequence[float]) -> None:
        """Take the arrival times in seconds since the last step, oldest first, before `plan`."""

    def finished(self, request_id: str) -> None:
        """Be notified that a request has ended, for any reason."""
        self._steady = [r for r in self._steady if r.id != request_id]
        if self._early_abort is not None:
            self._early_abort.finished(request_id)
        if self._shares is not None:
            self._shares.finished(request_id)

    def urgent(self, view: View, waiting: Iterable[RequestView]) -> list[RequestView]:
        """Return the waiting requests that must be admitted now to be answered in time.

        By due time, each must end before its own: after those before it, after a step that may be
        under way, and within `URGENT` times the time that it takes at most. Where one has no more
        time than that, it and those before it are urgent. A request that cannot get its first token
        in time takes no precedence.
        """
        settings = self.settings
        limited = [(due, r.id, r) for r in waiting if (due := settings.due(r)) is not None]
        if not limited:
            return []
        step = self.decode_seconds(len(view.running) + 1)
        longest = self.cost.step(StepShape(prefill=view.limits.max_tokens))
        before, found, urgent = 0.0, 0, []
        for due, _, request in sorted(limited):
            left, prompt = due - view.now, request.prompt_left * self._per_token
            if request.adapter is not None and request.adapter not in view.resident:
                prompt += self.cost.load(request.rank)
            if left < prompt + step:
                continue
            output = step * max(1, request.output_left)
            urgent.append(request)
            if left < longest + URGENT * (before + prompt + output):
                found = len(urgent)
            before += prompt + output / view.limits.max_requests
        return urgent[:found]

    def _pack(
        self,
        view: View,
        plan: BatchPlan,
        queue: Sequence[RequestView],
        abort: tuple[tuple[str, str], ...],
    ) -> Decision:
        """Fill the batch as planned; where nothing can be computed, fall back to unmerged mode."""
        now, starved = view.now, view.now - self.settings.patience
        unmerged = partial(BatchPlan, Mode.UNMERGED, None, view.running, plan.waiting)
        batch = BatchBuilder(view, plan, queue, starved)
        if batch.pages < 0:
            plan = unmerged(f"no pages left for {plan.merged}")
            batch = BatchBuilder(view, plan, queue, starved)
        batch.run()
        holds_adapter = bool((plan.merged or view.merged) and (plan.running or plan.waiting))
        stuck = not batch.items and not batch.preempt
        stuck = stuck and (holds_adapter or len(plan.running) < len(view.running))
        if stuck:
            # The merged adapter, or running requests that the plan left out, hold the pages or the
            # slots that the waiting requests need.
            holder = "the merged adapter" if holds_adapter else "other running requests"
            plan = unmerged(f"no room beside {holder}")
            batch = BatchBuilder(view, plan, queue, starved)
            batch.run()
        if self._early_abort is not None:
            self._early_abort.note(batch.requests, now)
        if self._shares is not None:
            self._shares.admitted(batch.requests)
        for request in batch.requests:
            request.served = now
        mode, merged = plan.mode, plan.merged
        if not batch.items and not stuck:
            # An empty batch is no reason to switch the weights.
            mode, merged = view.mode, view.merged
        elif mode is Mode.MIXTURE and all(r.adapter == merged for r in batch.requests):
            mode = Mode.MERGED
        until = plan.until
        if batch.prompt_tokens or batch.rotating or batch.preempt or abort:
            until = 0.0
        if until > now:
            self._steady = batch.requests
        preempt = tuple(r.id for r in batch.preempt)
        items, prefetch = tuple(batch.items), tuple(batch.prefetch)
        return Decision(mode, merged, items, prefetch, abort, preempt, plan.reason, until)

    def decode_seconds(self, rows: int) -> float:
        """Predict an unmerged decode step of rows with adapters of rank 64."""
        return self.cost.step(StepShape(decode=max(1, rows), terms=rows, work=64 * rows, ranks=64))


def can_merge(view: View, adapter: str | None) -> bool:
    """Return whether an adapter is merged or can be merged now."""
    if adapter is None or adapter not in view.resident:
        return False
    return adapter == view.merged or view.switchable is None or adapter in view.switchable


def with_adapter(requests: Iterable[RequestView], adapter: str | None) -> list[RequestView]:
    """Return the requests of one adapter."""
    return [r for r in requests if r.adapter == adapter]


def _cluster(view: View, waiting: Sequence[RequestView], limit: int) -> list[RequestView]:
    """S-LoRA's clustering (§4.2, A.2): requests of `limit` adapters in the batch go first."""
    inside = {r.adapter for r in view.running}
    first, later = [], []
    for request in waiting:
        if request.adapter in inside or len(inside) < limit:
            inside.add(request.adapter)
            first.append(request)
        else:
            later.append(request)
    return first + later
