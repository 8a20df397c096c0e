"""The engine: takes requests in, computes them in batches, hands outputs out (VaLoRA §4.3, §4.4).

Before every step a policy of `orchestrator` decides which tokens are computed and in which mode. On
a GPU a step is decided and launched while the one before still runs; tokens that the device has
chosen and the host has not read yet are `pending`. `Engine` belongs to one thread.
"""

import contextlib
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from valora_data.contract.results import HeadResult
from valora_kernels.operators import operator
from valora_serve import errors
from valora_serve.catalogue.store import Store
from valora_serve.engine import sizing
from valora_serve.engine.adapter_registry import AdapterRegistry, MergeState
from valora_serve.engine.compress import Write, prepare_compression
from valora_serve.engine.images import ImageEncoder
from valora_serve.engine.requests import Requests
from valora_serve.engine.sequence import Prepared, SequenceState
from valora_serve.engine.settings import BY_MATRIX, LAZY, UNMERGEABLE, EngineSettings
from valora_serve.engine.tuning import make_tuning
from valora_serve.engine.warm_up import WarmUp
from valora_serve.engine.workers import Workers
from valora_serve.memory.block_manager import BlockManager, Owner, PagePool
from valora_serve.memory.unified import AdapterMemory, PageShape, PrefixMemory, UnifiedMemory
from valora_serve.model.attention.base import KVCache
from valora_serve.model.heads import launch_heads
from valora_serve.model.lmm import Lmm
from valora_serve.model.prompt import prepare_prompt
from valora_serve.model.runner import ModelRunner
from valora_serve.model.sampler import BROKEN, StepLogprobs
from valora_serve.model.work import StepResult, Work
from valora_serve.orchestrator.cost_model import CostModel, load_or_estimate
from valora_serve.orchestrator.decision import Decision, DecisionTrace, StepLimits, View, window
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.parallel.group import Group
from valora_serve.tokens import text_and_bytes
from valora_serve.types import (
    EngineStats,
    Finish,
    Logprob,
    Mode,
    NewContext,
    Output,
    Request,
    ServedModel,
    Times,
    TokenLogprobs,
    Usage,
)

log = logging.getLogger(__name__)

SEEN = 1024  # most waiting requests that a policy sees at a time
MASK_SECONDS = 0.005  # time of a step in which the masks of constraints are computed
Shares = list[tuple[SequenceState, int]]  # requests of a batch, and the tokens computed of each


@dataclass(slots=True)
class Flight:
    """A step that was launched and whose results the host has not read yet."""

    choosing: list[SequenceState]  # get the tokens of `result`
    result: StepResult
    answering: list[SequenceState]  # get the results of `heads`, riders included
    heads: Callable[[], list[HeadResult | errors.ServeError]] | None  # reads theirs
    mode: Mode
    merged: str | None  # key of the adapter in the weights


class Engine:
    """A base model with its adapters and heads, and the requests on them; or a `SettingsError`.

    Without `lmm` the base model of the settings is loaded, without `cost_model` costs are those
    measured here, or estimates. `group` is that of a worker; rank 0 starts the group itself.
    """

    def __init__(
        self,
        settings: EngineSettings,
        lmm: Lmm | None = None,
        cost_model: CostModel | None = None,
        *,
        group: Group | None = None,
    ) -> None:
        self.settings = settings
        self._modes = POLICIES[settings.policy].modes
        if not settings.policy_settings.mixture:
            self._modes -= {Mode.MIXTURE}
        if settings.quantize in UNMERGEABLE:
            self._modes = frozenset({Mode.UNMERGED})
        self._outputs: list[Output] = []  # that nobody has taken yet, in order
        self._arrived: list[float] = []  # arrival times that the policy has not seen
        self._flight: Flight | None = None  # the step whose results are not read yet
        self._idle = False  # whether the last step had nothing to compute
        self._warm = False
        self.steps = self.prompt_tokens = self.generated_tokens = 0
        self.shared_passes = self.non_finite = 0
        self.finished: Counter[str] = Counter()  # by the value of `Finish`
        terms_of = {Mode.MERGED: 0, Mode.UNMERGED: 1, Mode.MIXTURE: 2}  # LoRA terms of a row
        terms = list(range(max(terms_of[mode] for mode in self._modes) + 1))
        self.start_up = WarmUp(terms, lazy=settings.capture == LAZY)
        self.workers: Workers | None = None  # of a tensor-parallel group, in rank 0
        # Makes a context in which the end of a process of the group is told as such.
        self._explained: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        if settings.tensor_parallel > 1 and group is None:
            assert lmm is None, "each process reads its own part"
            self.workers = Workers(Engine, settings)
            group, self._explained = self.workers.group, self.workers.explained
        try:
            with self._explained():
                self._open(lmm, cost_model, group)
                if self.workers is not None:
                    self.workers.lead(self)
        except BaseException:
            if self.workers is not None:
                self.workers.close()
            raise
        self.tuning = None
        if group is None:  # whose processes must all choose the same tilings
            self.tuning = make_tuning(settings, self.runner, terms)

    def _open(self, lmm: Lmm | None, cost_model: CostModel | None, group: Group | None) -> None:
        settings = self.settings
        if lmm is None:
            with self.start_up.phase("base model"):
                lmm = sizing.load_model(settings, group)
        self.lmm, self.device = lmm, lmm.device
        sizing.limit_host_threads(self.device)
        lmm.linears.scope.operator = operator(settings.operator)
        lmm.linears.by_matrix = settings.switch == BY_MATRIX
        cuda = self.device.type == "cuda"
        if cuda if settings.compile is None else settings.compile:
            lmm.compile_layers()
        self._overlap = cuda if settings.overlap is None else settings.overlap
        self.context_length = sizing.context_length(settings, lmm)
        mergeable = self._modes != {Mode.UNMERGED} and lmm.mergeable

        # Pages, and what lies in them
        page = PageShape(settings.block_size, lmm.layers, lmm.kv_heads, lmm.head_dim)
        with self.start_up.phase("memory"):
            pages = settings.pages or sizing.pages_that_fit(settings, lmm, page, mergeable)
            self.memory = UnifiedMemory(
                pages if group is None else group.minimum(pages), page,
                [group.spec for group in lmm.linears.groups.values()],
                slots=settings.slots, max_rank=settings.max_rank, dtype=lmm.dtype,
                device=self.device,
            )  # fmt: skip
        lmm.linears.lora = self.memory.lora
        kept = math.ceil(settings.adapter_share * self.memory.pages)  # for adapters alone
        if self.memory.pages - kept < 2:  # one of them is for rows that fill a step up
            raise errors.SettingsError(
                f"adapter_share {settings.adapter_share:g} of {self.memory.pages} pages leaves too "
                "few for keys and values: lower it"
            )
        self.pool = own = PagePool(self.memory.pages - kept)
        if kept:
            own = PagePool(kept, first=self.memory.pages - kept)
        self._unified = not kept
        # Rows that only fill a graph up write to page 0.
        self.pool.take(1, Owner.RESERVED)
        self.blocks = BlockManager(self.pool, settings.block_size, caching=settings.prefix_cache)
        self.adapters = AdapterMemory(self.memory, own, host_bytes=settings.host_bytes)
        self.prefixes = PrefixMemory(self.memory, self.adapters.budget)
        self.merge_state = MergeState(lmm.linears, self.adapters)

        # Requests, and what they can name
        self.store = Store(
            lmm.base, lmm.targets, width=lmm.width, device=self.device, quantize=lmm.quantize,
            config=lmm.config.get_text_config(),
        )  # fmt: skip
        self.registry = AdapterRegistry(
            lmm, self.store, self.prefixes, self.merge_state, mergeable, self._weights_changed
        )
        limits = settings, lmm, self.context_length
        self.requests = Requests(*limits, self.registry, self.blocks)

        # Steps, and what decides them
        with self.start_up.phase("attention"):
            cache = KVCache(self.memory.kv, settings.block_size, lmm.heads)
            self.runner = ModelRunner(
                lmm, cache, self.adapters, backend=settings.attention,
                max_tokens=settings.max_tokens, max_requests=settings.max_requests,
                max_adapters=settings.max_adapters,
                sizes=sizing.graph_sizes(settings, self.device), left=self.start_up.left,
            )  # fmt: skip
        self.images = ImageEncoder(self.runner, self.merge_state, settings.image_cache_bytes)
        self._text_of = functools.cache(partial(text_and_bytes, self.requests.tokenizer))
        machine = sizing.machine_of(settings, self.device, lmm.dtype)
        self.cost = cost_model or load_or_estimate(settings.folder("cost"), machine, lmm.base)
        self.policy = make_policy(settings.policy, self.cost, settings.deciding)
        path = settings.decision_trace
        try:
            self._trace_file = Path(path).open("a") if path else None  # noqa: SIM115
        except OSError as error:
            raise errors.SettingsError(
                f"the decision trace {path} cannot be written ({error.strerror}): name another file"
            ) from error
        self._trace = DecisionTrace(self._trace_file) if self._trace_file else None

    # ------------------------------------------------------------------ before requests come

    def load(
        self, kind: str, folder: Path, name: str = "", *, decode_only: bool = False
    ) -> list[ServedModel]:
        """Load a bundle, an adapter or a context, as `EngineClient.load` does."""
        registry = self.registry
        return registry.register(registry.read(kind, folder, name, decode_only=decode_only))

    def warm_up(self) -> None:
        """Capture CUDA graphs and compile kernels; the likeliest ones if ``capture=lazy``."""
        self._warm = True
        with self._explained():
            self.start_up.start(self.runner)

    def prepare_next(self) -> bool:
        """Prepare one thing more, which takes up to some seconds; False if nothing is left."""
        with self._explained():
            return self.start_up.prepare_next(self.runner)

    def tune(self) -> bool:
        """Measure one tiling more while there are no requests; False if there is none now."""
        tuning = self.tuning
        if tuning is None or not self._warm:
            return False
        adopted = tuning.adopted
        try:
            found = tuning.go_on()
        except Exception:  # requests can be answered without it
            log.exception("tilings are not measured any more")
            tuning.tuner.close()
            self.tuning = None
            return False
        if tuning.adopted > adopted:  # steps cost less from now on
            self.cost = replace(self.cost, measured=False)
        return found

    def use(self, cost_model: CostModel) -> None:
        """Decide with another cost model from now on."""
        self.cost = cost_model
        self.policy = make_policy(self.settings.policy, cost_model, self.settings.deciding)

    def _weights_changed(self) -> None:
        """Capture anew, as weights moved, or take adapters."""
        self.runner.take_lora()
        if self.tuning is not None:
            self.tuning.restart()
        if self._warm:
            self.runner.forget_graphs()
            self.warm_up()

    # ------------------------------------------------------------------ requests come in

    def prepare(self, request: Request) -> Prepared:
        """Tokenize the prompt and process its images, in any thread; or raise a `ServeError`."""
        target = self.store.mix(request.model, request.adapters)
        self.requests.check_characters(request)
        prompt = prepare_prompt(self.lmm, request, target.model.prompt, target.context)
        return Prepared(request, target, prompt)

    def prepare_all(self, requests: Sequence[Request]) -> dict[str, Prepared | errors.ServeError]:
        """Prepare requests about the same images, or say why not, by id; in any thread."""
        prompts: dict[str, Prepared] = {}
        found: dict[str, Prepared | errors.ServeError] = {}
        with self.lmm.images_once() if len(requests) > 1 else contextlib.nullcontext():
            for request in requests:
                try:
                    target = self.store.mix(request.model, request.adapters)
                    given = request.messages, request.text, request.token_ids, request.embed
                    own = target.model.prompt if request.messages is None else None
                    memory = target.context and target.context.content
                    key = repr((*given, own, memory, bool(request.videos)))
                    if key in prompts:
                        found[request.id] = replace(prompts[key], request=request, target=target)
                    else:
                        found[request.id] = prompts[key] = self.prepare(request)
                except Exception as error:  # noqa: BLE001 - its own request gets it
                    found[request.id] = as_serve_error(request.id, error)
        return found

    def prepare_compression(self, wanted: NewContext, name: str) -> tuple[Prepared, Write]:
        """Prepare the request `name` that makes a context of a document; in any thread."""
        self.requests.check_characters(Request(name, text=wanted.document), "document")
        return prepare_compression(self.lmm, self.store, wanted, name, self.context_length)

    def add_all(self, asked: Sequence[Prepared]) -> dict[str, errors.ServeError]:
        """Put requests about the same images in the queue; return why some cannot be answered."""
        failed: dict[str, errors.ServeError] = {}
        together: list[SequenceState] = []
        for prepared in asked:
            try:
                together.append(self.add(prepared, together))
            except Exception as error:  # noqa: BLE001 - its own request gets it
                failed[prepared.request.id] = as_serve_error(prepared.request.id, error)
        return failed

    def add(self, prepared: Prepared, together: Sequence[SequenceState] = ()) -> SequenceState:
        """Put a request in the queue, beside others about its images, or raise a `ServeError`."""
        request_id = prepared.request.id
        if self.requests.find(request_id) is not None:
            raise errors.RequestError(f"request id {request_id} is in use: choose another one")
        sequence = self.requests.sequence(prepared)
        self.requests.add(sequence, together)
        if sequence.carrier is None:
            self._arrived.append(sequence.arrival)
        return sequence

    def cancel(self, request_id: str, error: errors.ServeError | None = None) -> bool:
        """End a request, with an error or as the client cancelled it; False if there is none."""
        sequence = self.requests.find(request_id)
        if sequence is None:
            return False
        reason = error or errors.CancelledRequestError(f"request {request_id} was cancelled")
        self._end(sequence, Finish.CANCELLED if error is None else Finish.ERROR, error=reason)
        return True

    def fail_all(self, reason: str) -> list[Output]:
        """End all requests, as the engine cannot go on; return their last outputs."""
        self._flight = None
        if self.workers is not None and self.workers.lost is not None:
            self._outputs.clear()  # what a lost process left behind is no answer
        for sequence in self.requests.all():
            self._fail(sequence, errors.StoppedError(reason))
        return self._take()

    # ------------------------------------------------------------------ a step

    @property
    def busy(self) -> bool:
        """Whether there are unfinished requests or outputs that `step` has not returned yet."""
        requests = self.requests
        return bool(requests.waiting or requests.running or self._flight or self._outputs)

    @property
    def stalled(self) -> bool:
        """Whether only a new request, or an adapter that has loaded, gives something to compute."""
        return self._flight is None and not self._outputs and self._idle

    def step(self) -> list[Output]:
        """Launch the next step and read the one before; return the outputs, in order."""
        with self._explained():
            self.start_up.prepare_missed(self.runner)
            now = time.monotonic()
            starved = now - self.settings.policy_settings.patience
            failed = self.adapters.poll() | self.requests.load_prefixes(starved)
            for key, wrong in failed.items():
                self._fail_users(key, wrong)
            for late in self.requests.overdue(now):
                said = f"request {late.id} missed its deadline: allow it more time"
                self._fail(late, errors.DeadlineError(said))
            decision = self._decide(now)
            flight = self._launch(decision) if decision is not None else None
            self._make_room()
            if self._flight is not None:
                self._collect(self._flight)
                self._idle = False
            if flight is not None and not self._overlap:
                self._collect(flight)
                flight = None
            self._flight = flight
            return self._take()

    def _take(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # ------------------------------------------------------------------ it is decided

    def _decide(self, now: float) -> Decision | None:
        """Carry out what the policy decides but for its batch; None if nothing is to decide."""
        running = self.requests.running.values()
        self._idle = False
        if len(running) >= self.settings.max_requests and not any(map(self._schedulable, running)):
            return None  # all of them only wait for the host to read them
        view = self._view(now)
        if view is None:
            self._idle = True
            return None
        decision = self.policy.decide(view)
        if self._trace is not None:
            self._trace.write(view, decision)
        for request_id, reason in decision.abort:
            said = f"request {request_id} was given up: {reason}"
            self.cancel(request_id, errors.OverloadedError(said))
        if decision.preempt:
            self._preempt(decision.preempt)
        merged = decision.merged if decision.merged in self.adapters.resident else None
        switched = self.merge_state.switch(decision.mode, merged)
        if not switched and merged is not None and merged in self.adapters.quarantined:
            self._fail_users(merged, self.registry.quarantined(merged))
        self._idle = not decision.batch
        return decision

    def _make_room(self) -> None:
        """Unmerge where only the merged adapter can hold the pages that all requests wait for."""
        requests = self.requests
        loading = self.adapters.loading or self.prefixes.loading
        if self._idle and requests.waiting and not (requests.running or loading):
            self.merge_state.unmerge()

    def _view(self, now: float) -> View | None:
        """Return what the policy sees of the engine; None if no request can be computed."""
        requests = self.requests
        schedulable, pages_needed = self._schedulable, self.blocks.pages_needed
        running, held = [], 0
        for sequence in requests.running.values():
            if schedulable(sequence):
                if not sequence.prompt_left:
                    sequence.pages = pages_needed(sequence.table, sequence.kv_tokens + 1)
                running.append(sequence)
            else:
                held += 1
        waiting = window(requests.queue(), SEEN)
        if not running and not waiting:
            if not requests.waiting:
                self._arrived.clear()
            return None
        settings, resident, loading = self.settings, self.adapters.resident, self.adapters.loading
        barred = self.adapters.unmergeable.keys() & resident
        mergeable = frozenset(resident - barred) if barred or requests.mixes else None
        for label, members in requests.mixes.items():
            needed = next(iter(members.values())).adapters.keys()
            if needed <= self.adapters.resident:
                resident = resident | {label}
            elif needed <= self.adapters.resident | self.adapters.loading:
                loading = loading | {label}
            if self._unified:  # of its pages, those that others do not hold already
                lacking = [key for key in needed - loading if not self.adapters[key].users]
                for sequence in members.values():
                    sequence.adapter_pages = sum(self.adapters[k].page_count for k in lacking)
        arrived, self._arrived = self._arrived, []
        free = self.pool.free + (self.adapters.budget.idle_pages if self._unified else 0)
        limits = StepLimits(
            max_requests=settings.max_requests - held, max_tokens=settings.max_tokens,
            free_pages=free, max_adapters=settings.max_adapters, chunk=settings.chunk,
        )  # fmt: skip
        mode, merged = self.merge_state.mode, self.merge_state.adapter
        return View(
            now, running, waiting, mode, merged, resident, loading, limits, mergeable, arrived
        )

    def _schedulable(self, sequence: SequenceState) -> bool:
        """Return whether a running request has a token to compute, as far as the host knows."""
        if sequence.slot is None:
            return False  # its head computes its result
        if not sequence.pending:
            return True
        if sequence.generated >= sequence.max_new or sequence.length >= self.context_length:
            return False  # it ends when the host reads its token
        return not sequence.request.sampling.needs_history

    def _preempt(self, ids: Sequence[str]) -> None:
        if self._flight is not None:  # recomputing needs their last tokens
            self._collect(self._flight)
            self._flight = None
        for request_id in ids:
            if (sequence := self.requests.running.get(request_id)) is not None:
                self.requests.preempt(sequence)

    # ------------------------------------------------------------------ it is launched

    def _launch(self, decision: Decision) -> Flight | None:
        """Enqueue the batch of a decision in the mode of the weights; None if it has no request."""
        shares, works = self._works(self._shares(decision))
        if not shares:
            return None
        result = self.runner.step(works, self.merge_state.slot)
        self.steps += 1
        now = time.monotonic()
        commit = self.blocks.commit
        choosing: list[SequenceState] = []
        answering: list[SequenceState] = []
        prompts = iter(result.prompts)
        for (sequence, count), work, hidden in zip(shares, works, result.hidden, strict=True):
            if work.targets and sequence.scores is not None:
                sequence.scores.append(next(prompts))
            sequence.started = sequence.started or now
            if sequence.kv_tokens < sequence.prompt_tokens:
                self.prompt_tokens += count
            sequence.kv_tokens += count
            sequence.held = len(work.table) - sequence.prompt.given // self.blocks.block_size
            sequence.prompt_left = max(0, sequence.prompt_left - count)
            # The newest token may be known to the device only.
            commit(sequence.table, min(sequence.kv_tokens, len(sequence.ids)))
            if hidden is not None:
                sequence.hidden.append(hidden)
            if work.choice is not None:
                sequence.pending += 1
                sequence.chosen = True
                sequence.output_left = max(1, sequence.output_left - 1)
                choosing.append(sequence)
            sequence.images = len(sequence.prompt.visuals) - len(sequence.features)
            if not sequence.prompt_left:
                sequence.images = 0
                sequence.features.clear()
                sequence.memory = None
                if sequence.head is not None:
                    answering += self._with_riders(sequence)
        heads = launch_heads([one.head_request() for one in answering]) if answering else None
        for sequence in answering:  # its keys and values are not needed any more
            if sequence.request.keep_kv:
                table = sequence.table.blocks
                sequence.kv = self.memory.read_tokens(table, sequence.prompt_tokens)
            self.requests.release(sequence)
        state = self.merge_state.mode, self.merge_state.adapter
        return Flight(choosing, result, answering, heads, *state)

    def _with_riders(self, sequence: SequenceState) -> list[SequenceState]:
        riders, sequence.riders = sequence.riders, []
        self.shared_passes += len(riders)
        sequence.hidden = [torch.cat(sequence.hidden)]
        for rider in riders:
            rider.carrier, rider.hidden = None, sequence.hidden
            rider.started, rider.cached = sequence.started, sequence.cached
        return [sequence, *riders]

    def _shares(self, decision: Decision) -> Shares:
        """Return the requests of a batch that have their memory and images, and their tokens."""
        requests, reserve = self.requests, self.blocks.reserve
        running, waiting, admit = requests.running, requests.waiting, requests.admit
        shares: Shares = []
        for request_id, tokens in decision.batch:
            sequence = running.get(request_id) or waiting.get(request_id)
            if sequence is None or not admit(sequence):
                continue
            if sequence.pair and self.merge_state.adapter is not None:
                continue  # beside a merged adapter rows have room for one of their own
            count = min(tokens, sequence.length - sequence.kv_tokens)
            if sequence.blocks:  # of which the policy did not know what is cached
                count = sequence.whole(count)
            if count and reserve(sequence.table, sequence.kv_tokens + count):
                shares.append((sequence, count))
        # Only now, as the adapters of the batch are pinned and a prefetch cannot evict them.
        self._prefetch(decision.prefetch)
        for broken, error in self.images.encode(shares):
            self._fail(broken, error)
        return [share for share in shares if share[0].finish is None]

    def _prefetch(self, labels: Sequence[str]) -> None:
        """Start copying adapters to the device; only the first may evict ones that are wanted."""
        adapters = self.adapters
        for number, label in enumerate(labels):
            members = self.requests.mixes.get(label)
            keys = (label,) if members is None else next(iter(members.values())).adapters
            # What is there must not be evicted for what is loaded beside it.
            held = [key for key in keys if key in adapters.resident]
            for key in held:
                adapters.pin(key)
            failed: dict[str, errors.ServeError] = {}
            # Others are unloaded, and the last request that waited for them has ended.
            for key in (key for key in keys if key in adapters):
                try:
                    adapters.load(key, urgent=number == 0)
                except errors.ServeError as error:
                    failed[key] = error
            for key in held:
                adapters.unpin(key)
            for key, wrong in failed.items():
                self._fail_users(key, wrong)

    def _works(self, shares: Shares) -> tuple[Shares, list[Work]]:
        """Return the shares with their works; requests whose constraint fails are ended."""
        kept, works = [], []
        until: float | None = None
        for sequence, count in sorted(shares, key=lambda share: share[0].mask_seconds):
            if sequence.request.sampling.constraint is not None:
                now = time.monotonic()
                until = until or now + MASK_SECONDS
                if now > until:
                    continue
            try:
                works.append(sequence.work(count, self.adapters, self.lmm))
                kept.append((sequence, count))
            except Exception as error:  # noqa: BLE001 - its own request gets it
                self._fail(sequence, as_serve_error(sequence.id, error))
        return kept, works

    # ------------------------------------------------------------------ it is answered

    def _collect(self, flight: Flight) -> None:
        tokens = flight.result.read()
        found, mode = flight.result.logprobs, flight.mode
        logprobs = None if found is None else self._logprobs(flight.choosing, tokens, found)
        for row, (sequence, token) in enumerate(zip(flight.choosing, tokens, strict=True)):
            sequence.pending -= 1
            if token == BROKEN:
                self._broken(sequence, flight)
            if sequence.finish is not None:
                continue  # also if it ended while this step ran
            try:
                self._token(sequence, token, logprobs[row] if logprobs else (), mode)
            except Exception as error:  # noqa: BLE001 - its own request gets it
                self._fail(sequence, as_serve_error(sequence.id, error))
        if flight.heads is not None:
            results = flight.heads()
            for sequence, result in zip(flight.answering, results, strict=True):
                if isinstance(result, errors.NonFiniteError):
                    self._broken(sequence, flight)
                if sequence.finish is not None:
                    continue
                sequence.first_token = time.monotonic()
                if isinstance(result, HeadResult):
                    self._end(sequence, Finish.HEAD, head=result, kv=sequence.kv, mode=mode)
                else:
                    self._fail(sequence, result)

    def _logprobs(
        self, choosing: Sequence[SequenceState], tokens: Sequence[int], found: StepLogprobs
    ) -> list[tuple[TokenLogprobs, ...]]:
        chosen, ids, values = found.chosen.tolist(), found.tokens.tolist(), found.values.tolist()
        rows: list[tuple[TokenLogprobs, ...]] = []
        for row, (sequence, token) in enumerate(zip(choosing, tokens, strict=True)):
            count = sequence.request.sampling.logprobs
            if count is None or sequence.finish is not None or token == BROKEN:
                rows.append(())
                continue
            own, *top = (
                Logprob(one, text, value, raw)
                for one, value in [
                    (token, chosen[row]),
                    *zip(ids[row][:count], values[row][:count], strict=True),
                ]
                for text, raw in [self._text_of(one)]
            )
            rows.append((TokenLogprobs(own, tuple(top), sequence.text.chars),))
        return rows

    def _token(
        self, sequence: SequenceState, token: int, logprobs: tuple[TokenLogprobs, ...], mode: Mode
    ) -> None:
        """Add a token to a request's answer, and end the request if that was the last one."""
        sequence.first_token = sequence.first_token or time.monotonic()
        params = sequence.request.sampling
        sequence.ids.append(token)
        self.generated_tokens += 1
        free = True if params.constraint is None else params.constraint.advance(token)
        prompt = sequence.prompt_logprobs()
        length = len(sequence.ids)
        count = length - sequence.prompt_tokens
        stops = token in self.lmm.stop_ids and (
            # A constraint allows a stop token only at its end, where nothing else can come.
            params.constraint is not None or (not params.ignore_eos and count > params.min_tokens)
        )
        text = "" if stops else sequence.text.push(token, stop=free is not False)
        if free is None and sequence.text.stopped:
            raise errors.RequestError(
                f"request {sequence.id} was given up, as a stop text cut its JSON: leave out stop "
                "or response_format"
            )
        finish = None
        if stops or sequence.text.stopped:
            finish = Finish.STOP
        elif count >= sequence.max_new or length >= self.context_length:
            finish = Finish.LENGTH
        if finish is None:
            self._outputs.append(
                Output(sequence.id, text, (token,), logprobs=logprobs, prompt=prompt, mode=mode)
            )
            return
        text += sequence.text.flush()
        self._end(
            sequence, Finish.STOP if sequence.text.stopped else finish, text=text,
            token_ids=(token,), logprobs=logprobs, prompt=prompt, mode=mode,
        )  # fmt: skip

    def _broken(self, sequence: SequenceState, flight: Flight) -> None:
        """End a request whose outputs are not finite, and keep the cause from later ones."""
        on_adapter = bool(sequence.adapters)
        if sequence.finish is None:
            self.non_finite += 1
            named = " and ".join(name for name, _ in sequence.request.adapters)
            name = named or sequence.request.model or "the base model"
            remedy = (
                "use another model, or train the adapter again" if on_adapter else "see the log"
            )
            said = f"{name} computed NaN or infinity for this request: {remedy}"
            log.warning("request %s in %s mode: %s", sequence.id, flight.mode, said)
            self._fail(sequence, errors.NonFiniteError(said, blame_adapter=on_adapter))
        self.blocks.forget(sequence.table.keys)
        if not (on_adapter or flight.merged is None or flight.merged in self.adapters.unmergeable):
            # Without an adapter of its own, the merged one is the likeliest cause.
            reason = "a request of the base model was not finite beside it"
            log.error("adapter %s is not merged any more: %s", flight.merged, reason)
            self.adapters.unmergeable[flight.merged] = reason

    def _fail(self, sequence: SequenceState, error: errors.ServeError) -> None:
        self._end(sequence, Finish.ERROR, error=error)

    def _fail_users(self, key: str, error: errors.ServeError) -> None:
        """End the requests that run on an adapter or a prefix."""
        for sequence in self.requests.all():
            if key in (used for _, used in sequence.uses):
                self._fail(sequence, error)

    def _end(self, sequence: SequenceState, finish: Finish, **parts: Any) -> None:
        """End a request: release what it holds, and make its last output, with these parts."""
        sequence.finish = finish
        self.requests.remove(sequence)
        self.registry.released(sequence)
        self.policy.finished(sequence.id)
        self.finished[str(finish)] += 1
        image = sum(len(item.at) for item in sequence.prompt.visuals)
        completion = len(sequence.ids) - sequence.prompt_tokens
        usage = Usage(sequence.prompt_tokens, completion, image, sequence.cached)
        begun = sequence.arrival, sequence.started, sequence.first_token
        times = Times(*begun, time.monotonic())
        self._outputs.append(Output(sequence.id, finish=finish, usage=usage, times=times, **parts))

    # ------------------------------------------------------------------ state

    def stats(self) -> EngineStats:
        """Return the state of the engine and its counters."""
        requests, named, merged = self.requests, self.registry, self.merge_state.adapter
        adapters, own = self.adapters, self.adapters.budget.pool
        measured, wanted = (0, 0) if self.tuning is None else self.tuning.progress
        return EngineStats(
            running=len(requests.running),
            waiting=len(requests.waiting),
            mode=self.merge_state.mode,
            merged_adapter=None if merged is None else named.name(merged),
            switches=self.merge_state.switches,
            steps=self.steps,
            pages_total=self.memory.pages - 1,
            pages_free=self.pool.free + (0 if self._unified else own.free),
            pages_kv=self.pool.count(Owner.KV),
            pages_adapters=own.count(Owner.ADAPTER),
            pages_contexts=own.count(Owner.CONTEXT),
            contexts_resident=len(self.prefixes.resident),
            contexts_known=named.contexts,
            context_loads=self.prefixes.loads,
            adapters_resident=tuple(sorted(map(named.name, adapters.resident))),
            adapters_known=len(adapters),
            on_device=named.names(adapters.resident),
            on_disk=named.names(adapters.dropped - adapters.resident),
            prefix_hits=requests.prefix_hits,
            prefix_queries=requests.prefix_queries,
            image_hits=self.images.hits,
            image_queries=self.images.queries,
            preemptions=requests.preemptions,
            adapter_loads=adapters.loads,
            finished=dict(self.finished),
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            shared_passes=self.shared_passes,
            non_finite=self.non_finite,
            unmergeable=tuple(sorted(named.by_name(adapters.unmergeable))),
            quarantined=named.by_name(adapters.quarantined),
            start_seconds=dict(self.start_up.seconds),
            prepared=self.start_up.done,
            preparations=self.start_up.done + len(self.start_up.left) + self.runner.provisional,
            tilings_measured=measured,
            tilings_wanted=wanted,
        )

    def close(self) -> None:
        """Stop the workers and reading adapters from their files, and close the trace."""
        if self.tuning is not None:
            self.tuning.tuner.close()
        if self.workers is not None:
            with contextlib.suppress(errors.ServeError):  # a process has ended
                self.runner.forget_graphs()  # NCCL does not end while graphs hold its calls
            self.workers.close()
        self.adapters.close()
        self.prefixes.close()
        try:
            if self._trace_file is not None:
                self._trace_file.close()
        except OSError as error:  # its last lines do not fit on the disk
            log.warning("the end of the decision trace is lost: %s", error)


def as_serve_error(request_id: str, error: Exception) -> errors.ServeError:
    """Return the error that a request ends with; what nobody expected is logged."""
    if isinstance(error, errors.ServeError):
        return error
    log.error("request %s", request_id, exc_info=error)
    return errors.ServeError(f"request {request_id} failed: {error}")
