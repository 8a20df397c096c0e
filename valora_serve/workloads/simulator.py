"""Simulates a workload under a policy on one machine, without a GPU.

The policies are those of the engine, and so are pages and residency (`memory`); the cost model
predicts how long steps, switches and loads take. Steps that repeat the one before
(`Decision.until`) are simulated together. `valora_serve.workloads.cluster` simulates replicas.
"""

from __future__ import annotations

import math
from bisect import insort, insort_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valora_serve.errors import ServeError
from valora_serve.memory.block_manager import Owner, PagePool
from valora_serve.memory.residency import Entry, MemoryBudget, Residency
from valora_serve.orchestrator.base import BasePolicy
from valora_serve.orchestrator.cost_model import DECODE_TERMS, CostModel, step_shape
from valora_serve.orchestrator.decision import (
    Decision,
    DecisionTrace,
    RequestView,
    StepLimits,
    View,
    window,
)
from valora_serve.types import Mode
from valora_serve.workloads.traces import Workload

KV_TOKEN = DECODE_TERMS.index("kv_token")


@dataclass(slots=True)
class SimulatedRequest(RequestView):
    """A request of the simulation."""

    left: int = 0  # tokens still to generate, which the policy knows only by `output_left`
    kv_pages: list[int] = field(default_factory=list)  # its pages of keys and values


class SimulationError(ServeError):
    """The simulation cannot continue: a request can never fit, or a policy broke a rule."""


@dataclass(frozen=True, slots=True)
class SimSettings:
    """The simulated machine; the defaults are a 7B model in 16 bits on an H200."""

    max_requests: int = 512  # most requests that hold pages at a time
    max_tokens: int = 8192  # most tokens in a step
    chunk: int = 8192  # most prompt tokens of a request in a step
    max_adapters: int = 128  # most distinct adapters in a step
    pages: int = 13_000  # of the unified memory
    page_tokens: int = 16  # per KV page
    rank_pages: float = 0.25  # pages per unit of an adapter's rank
    slots: int = 4096  # most adapters on the device at a time, those being loaded included
    window: int = 512  # most waiting requests that the policy sees
    slo: float = 6.0  # seconds to the first token, for requests without a latency limit
    # Tokens that policies expect of every answer, as of requests with this limit whose answers end
    # by themselves; None if they know how long each answer gets.
    answer_limit: int | None = None


Spread = tuple[float, float, float, float]  # mean, p50, p95 and p99


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a simulation; times are in seconds."""

    requests: int
    finished: int  # answered
    aborted: int
    preempted: int
    seconds: float  # from the first arrival to the end of the last request
    steps: int
    switches: int  # of the merged adapter
    loads: int  # of adapters
    token_latency: float  # sum of latencies over the sum of input, image and output tokens
    throughput: float  # requests answered per second
    token_throughput: float  # tokens generated per second
    first_token: Spread
    end_to_end: Spread
    attainment: float  # share of requests with the first token within their limit, or `slo`
    satisfaction: float  # S-LoRA's: mean of 1 − (first token / limit)², 0 from the limit on
    modes: dict[str, float]  # share of the busy time by inference mode
    served: dict[str, int]  # tokens that ended before the last arrival, by adapter


def simulate(
    workload: Workload,
    policy: BasePolicy,
    cost_model: CostModel,
    settings: SimSettings | None = None,
    trace: DecisionTrace | None = None,
) -> Report:
    """Simulate a workload under a new policy, which is asked before every step with a `trace`."""
    first, end = np.full(len(workload), np.nan), np.full(len(workload), np.nan)
    machine = Machine(workload, policy, cost_model, settings or SimSettings(), first, end, trace)
    for index, arrival in enumerate(machine.arrivals):
        machine.advance(arrival)
        machine.submit(index)
    machine.advance(math.inf)
    return report([machine], workload, np.arange(len(workload)))


class _Adapters(Residency[Any]):
    """The adapters of a machine, which are loaded one after the other beside the steps."""

    kind = "adapter"
    owner = Owner.ADAPTER

    def __init__(self, machine: Machine) -> None:
        super().__init__(MemoryBudget(machine.pool), slots=machine.settings.slots)
        self._machine = machine
        self._free = machine.now
        self.started = 0
        self.ends: dict[str, float] = {}

    def copy(self, entry: Entry[Any]) -> Any:
        machine, packed = self._machine, entry.packed
        assert packed is not None
        self._free = end = max(machine.now, self._free) + machine.cost.load(packed.rank)
        self.started += 1
        self.ends[entry.key] = end
        return SimpleNamespace(query=lambda: end <= machine.now)

    def arrived(self, entry: Entry[Any]) -> None:
        super().arrived(entry)
        del self.ends[entry.key]


@dataclass(eq=False, repr=False)
class Machine:
    """A simulated machine, whose clock is advanced from one arrival to the next.

    `workload` holds all requests, also those that other machines answer; `first` and `end`
    ([requests] float64) receive the times of the first tokens and at which requests end.
    """

    workload: Workload
    policy: BasePolicy
    cost: CostModel
    settings: SimSettings
    first: NDArray[np.float64]
    end: NDArray[np.float64]
    trace: DecisionTrace | None = None

    def __post_init__(self) -> None:
        workload, settings = self.workload, self.settings
        self.ranks = dict(zip(workload.adapters, workload.ranks, strict=True))
        self.adapter_pages = {a: math.ceil(r * settings.rank_pages) for a, r in self.ranks.items()}
        self._check()
        self.arrivals: list[float] = workload.arrival.tolist()  # an array is slow to read from
        self.now: float = self.arrivals[0]  # of the next decision: the end of the last step
        self.last = self.now  # when a request last ended
        self.until = self.now  # the next event that is not this machine's own
        self.running: list[SimulatedRequest] = []
        self.queue: list[SimulatedRequest] = []
        self.arrived: list[float] = []  # arrival times that the policy has not seen
        self.views: dict[str, SimulatedRequest] = {}  # unfinished, by their index as text
        self.pool = PagePool(settings.pages)
        self.adapters = _Adapters(self)
        for name, rank in self.ranks.items():
            pages = self.adapter_pages[name]
            packed = SimpleNamespace(content=name, rank=rank, pages=pages, bytes=0)
            self.adapters.add(name, packed)
        self.mode = Mode.UNMERGED
        self.merged: str | None = None
        self.steps = self.switches = self.aborted = self.preempted = 0
        self.ended = 0  # requests that the last step ended
        self.mode_time = dict.fromkeys(Mode, 0.0)
        self.idle_rounds = 0

    def _check(self) -> None:
        for name, lowest in (("max_requests", 1), ("answer_limit", 1), ("slots", 2)):
            value = getattr(self.settings, name)  # one of the slots may be merged
            if value is not None and value < lowest:
                raise SimulationError(f"{name}: expected at least {lowest}, got {value}.")
        tokens = self.workload.prompt.astype(np.int64) + self.workload.output
        pages = np.ceil((tokens + 1) / self.settings.page_tokens)
        own = np.array([*self.adapter_pages.values(), 0])
        need = pages + own[self.workload.adapter] + max(own)  # the last: a merged adapter
        worst = int(np.argmax(need))
        if need[worst] > self.settings.pages:
            most = self.settings.pages
            raise SimulationError(f"request {worst} needs more than {most} pages: raise `pages`")

    def _enter(self, view: SimulatedRequest) -> None:
        self.views[view.id] = view
        if view.adapter is not None:
            self.adapters.wanted[view.adapter] += 1
        insort(self.queue, view, key=attrgetter("arrival"))

    def _leave(self, key: str) -> SimulatedRequest:
        view = self.views.pop(key)
        if view.adapter is not None:
            self.adapters.unwant(view.adapter)
        if view.running:
            self._release(view)
        self.policy.finished(key)
        return view

    def submit(self, index: int) -> None:
        """Submit a request of the workload at its arrival, to which the machine was advanced."""
        w = self.workload
        adapter, prompt = w.name(index), int(w.prompt[index])
        limit = float(w.latency_limit[index])
        output = int(w.output[index])
        expected = self.settings.answer_limit if output else 0  # heads generate nothing
        view = SimulatedRequest(
            id=str(index),
            adapter=adapter,
            rank=0 if adapter is None else self.ranks[adapter],
            arrival=self.arrivals[index],
            prompt_left=prompt,
            output_left=output if expected is None else expected,
            left=output,
            pages=self._pages(prompt),
            adapter_pages=0 if adapter is None else self.adapter_pages[adapter],
            images=int(w.images[index]),
            latency_limit=None if math.isnan(limit) else limit,
            client=adapter or "base",  # as where shares are kept by adapter
        )
        self._enter(view)
        self.arrived.append(view.arrival)

    def remove(self, key: str) -> SimulatedRequest:
        """Take an unfinished request out."""
        view = self._leave(key)
        self.running = [r for r in self.running if r is not view]
        self.queue = [r for r in self.queue if r is not view]
        return view

    def outstanding(self, time: float) -> int:
        """Count the requests that are not answered at a time, at most that of the next step's end.

        A step is simulated when it begins, so that what it ends is no longer in `views`.
        """
        return len(self.views) + (self.ended if self.now > time else 0)

    def advance(self, until: float) -> None:
        """Make all decisions before a time in seconds, at which something arrives somewhere."""
        self.until = until
        while self.now < until and (self.views or until < math.inf):
            self.ended = 0
            self.adapters.poll()
            seen = self._view()
            decision = self.policy.decide(seen)
            if self.trace is not None:
                self.trace.write(seen, decision)
            self._carry_out(decision)

    def _pages(self, tokens: int) -> int:  # of a prompt and its first token
        return (tokens + self.settings.page_tokens) // self.settings.page_tokens

    def _view(self) -> View:
        s, free = self.settings, self.pool.free + self.adapters.budget.idle_pages
        most = min(s.max_adapters, s.slots)
        arrived, self.arrived = self.arrived, []
        return View(
            now=self.now,
            running=self.running,
            waiting=window(self.queue, s.window),
            mode=self.mode,
            merged=self.merged,
            resident=self.adapters.resident,
            loading=self.adapters.loading,
            limits=StepLimits(s.max_requests, s.max_tokens, free, most, s.chunk),
            arrived=arrived,
        )

    def _carry_out(self, decision: Decision) -> None:
        for key, _ in decision.abort:
            self.remove(key)
            self.aborted += 1
            self.last = self.now
        if decision.preempt:
            for key in decision.preempt:
                self._preempt(self.views[key])
            self.running = [r for r in self.running if r.running]
        before = self.merged
        if decision.merged != before:
            rank = self.ranks[decision.merged] if decision.merged is not None else 0
            seconds = self.cost.switch(before, decision.merged, rank)
            self.now += seconds
            self.mode_time[decision.mode] += seconds
            self.switches += 1
            if before is not None:
                self.adapters.unpin(before)
            if decision.merged is not None:
                self.adapters.pin(decision.merged)
        self.mode, self.merged = decision.mode, decision.merged
        batch = [(self.views[key], tokens) for key, tokens in decision.batch]
        self._take_pages(batch)
        # As in the engine: the adapters of the batch are in use by now, and only the first of these
        # may evict one that a waiting request names.
        for number, adapter in enumerate(decision.prefetch):
            self.adapters.load(adapter, urgent=number == 0)
        if batch:
            self.idle_rounds = 0
            self._step(decision, batch)
        else:
            self._wait(decision)

    def _release(self, view: SimulatedRequest) -> None:
        for page in view.kv_pages:
            self.pool.give(page)
        view.kv_pages.clear()
        if view.adapter is not None:
            self.adapters.unpin(view.adapter)

    def _preempt(self, view: SimulatedRequest) -> None:
        self._release(view)
        self.preempted += 1
        # All is recomputed, with the newest token of an answer, whose key is not there yet.
        view.prompt_left += view.kv_tokens + (not view.prompt_left)
        view.kv_tokens = view.held = 0
        view.running = False
        view.pages = self._pages(view.prompt_left)
        insort_left(self.queue, view, key=attrgetter("arrival"))

    def _wait(self, decision: Decision) -> None:
        times = [end for end in self.adapters.ends.values() if end > self.now]
        if self.until < math.inf:
            times.append(self.until)
        if self.now < decision.until < math.inf:
            times.append(decision.until)
        if times:
            self.now = max(self.now, min(times))
        elif self.views and not (decision.abort or decision.preempt or decision.prefetch):
            self.idle_rounds += 1
            if self.idle_rounds > 3:
                raise SimulationError(f"the policy computes nothing any more ({decision.reason})")

    def _step(self, decision: Decision, batch: list[tuple[SimulatedRequest, int]]) -> None:
        shape = step_shape(decision.mode, decision.merged, batch, self.ranks)
        times, duration = 1, self.cost.step(shape)
        if not shape.prefill and decision.until > self.now and self.trace is None:
            times, duration = self._repeat(batch, duration, decision.until)
        self.now += duration
        self.steps += times
        self.mode_time[decision.mode] += duration
        self._progress(batch, times)

    def _repeat(
        self, batch: list[tuple[SimulatedRequest, int]], seconds: float, until: float
    ) -> tuple[int, float]:
        """How often a decode step repeats until the next event, and the seconds in all."""
        times = min(r.left for r, _ in batch)
        loaded = (end for end in self.adapters.ends.values() if end > self.now)
        horizon = min(until, self.until, *loaded)
        rows = len(batch)
        growth = self.cost.decode_seconds[KV_TOKEN] * rows  # a step's, by a token more in each row
        span = horizon - self.now
        if span < math.inf:
            # The least k with k·seconds + growth·k(k−1)/2 ≥ span.
            half = seconds - growth / 2
            k = span / seconds
            if growth > 0:
                k = (math.sqrt(half * half + 2 * growth * span) - half) / growth
            times = min(times, max(1, math.ceil(k - 1e-9)))
        # Each row takes a page every `page_tokens` steps; these must be free without eviction.
        free = self.pool.free
        times = max(1, min(times, (free // max(1, rows)) * self.settings.page_tokens))
        return times, times * seconds + growth * times * (times - 1) / 2

    def _take_pages(self, batch: list[tuple[SimulatedRequest, int]]) -> None:
        admitted = [view for view, _ in batch if not view.running]
        for view in admitted:
            if view.adapter is not None:
                assert view.adapter in self.adapters.resident, "the policy runs what is not loaded"
                self.adapters.pin(view.adapter)
            view.running = True
        for view, _ in batch:
            if view.pages:
                self._grow(view, view.pages)
                view.pages = 0
        if admitted:
            self.running += admitted
            self.queue = [r for r in self.queue if not r.running]
            assert len(self.running) <= self.settings.max_requests, "the policy admits too many"

    def _grow(self, view: SimulatedRequest, pages: int) -> None:
        taken = self.pool.take(pages, Owner.KV)
        assert taken is not None, "the policy used more pages than there are"
        view.kv_pages += taken
        view.held = len(view.kv_pages)

    def _progress(self, batch: list[tuple[SimulatedRequest, int]], times: int) -> None:
        page = self.settings.page_tokens
        ended = False
        for view, tokens in batch:
            if view.prompt_left:
                view.prompt_left -= tokens
                view.kv_tokens += tokens
                view.images = 0
                if view.prompt_left:
                    continue
                index = int(view.id)
                if math.isnan(self.first[index]):
                    self.first[index] = self.now
                done = min(1, view.left)
            else:
                view.kv_tokens += times
                done = times
            view.left -= done
            # As in the engine: an answer that has not ended goes on for a token at least.
            view.output_left = max(view.output_left - done, min(1, view.left))
            if view.left <= 0:
                ended = True
                self.end[int(view.id)] = self.last = self.now
                self.ended += 1
                self._leave(view.id)
                continue
            held = (view.kv_tokens + page - 1) // page
            if held > view.held:
                self._grow(view, held - view.held)  # during repeated steps
            view.pages = 1 if view.kv_tokens >= view.held * page else 0
        if ended:
            self.running = [r for r in self.running if r.id in self.views]


def report(machines: Sequence[Machine], workload: Workload, indices: NDArray[np.intp]) -> Report:
    """Report on machines that share arrays of times, and the indices of the requests they got."""
    w, settings = workload, machines[0].settings
    end, first_token = machines[0].end[indices], machines[0].first[indices]
    arrival, prompt, output = w.arrival[indices], w.prompt[indices], w.output[indices]
    done = ~np.isnan(end)
    early = end < w.arrival[-1]
    latency = (end - arrival)[done]
    tokens = int(prompt[done].sum()) + int(output[done].sum())
    limit = w.latency_limit[indices]
    limit = np.where(np.isnan(limit), settings.slo, limit)
    seconds = max(max(m.last for m in machines) - float(w.arrival[0]), 1e-12)
    busy = sum(sum(m.mode_time.values()) for m in machines) or 1.0
    late = np.nan_to_num((first_token - arrival) / limit, nan=math.inf)
    in_time = float(np.mean(late <= 1)) if len(indices) else math.nan
    return Report(
        requests=len(indices),
        finished=int(done.sum()),
        aborted=sum(m.aborted for m in machines),
        preempted=sum(m.preempted for m in machines),
        seconds=seconds,
        steps=sum(m.steps for m in machines),
        switches=sum(m.switches for m in machines),
        loads=sum(m.adapters.started for m in machines),
        token_latency=float(latency.sum()) / tokens if tokens else math.nan,
        throughput=int(done.sum()) / seconds,
        token_throughput=int(output[done].sum()) / seconds,
        first_token=_spread((first_token - arrival)[done]),
        end_to_end=_spread(latency),
        attainment=in_time,
        satisfaction=float(np.mean(np.maximum(0, 1 - late**2))) if len(indices) else math.nan,
        modes={str(mode): sum(m.mode_time[mode] for m in machines) / busy for mode in Mode},
        served={
            name: int((prompt + output)[(w.adapter[indices] == number) & early].sum())
            for number, name in enumerate(w.adapters)
        },
    )


def _spread(values: NDArray[np.float64]) -> Spread:
    if not len(values):
        return (math.nan,) * 4
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return float(values.mean()), float(p50), float(p95), float(p99)
