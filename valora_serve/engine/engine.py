"""The engine: takes requests in, computes them in batches, hands outputs out (VaLoRA §4.3, §4.4).

It does continuous batching, one step at a time. Before every step a policy of `orchestrator`
decides which tokens are computed and in which inference mode. On a GPU a step is decided and
launched while the step before it still runs, so that the device never waits for the host; tokens
that the device has chosen and the host has not read yet are `pending`.

The parts:

- `sizing`: what follows from the settings and the machine: device, pages, graph sizes;
- `named`: what requests can name, and the adapters behind the names;
- `intake`: checks what comes in, and makes sequences of it;
- `requests`: waiting and running requests, and the memory that they hold;
- `merge`: which adapter is merged into the base weights;
- `launch`: from a decision to a step on the device; `images` encodes what it needs;
- `answers`: from a step's results to outputs;
- `workers`, `worker`: the other processes of a tensor-parallel group, which do the same;
- `warm_up`: graphs and kernels that are prepared before and between requests;
- `profile`: measures the costs that decisions are made with, before there are requests;
- `tuning`: measures tilings of the kernels on a GPU for which none are shipped.

`Engine` belongs to one thread; `async_engine` runs it behind an event loop.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.contract.quantized import NF4
from valora_kernels.operators import operator
from valora_serve.catalogue.store import Store
from valora_serve.engine import sizing
from valora_serve.engine.answers import Answers
from valora_serve.engine.compress import prepare_compression
from valora_serve.engine.images import ImageEncoder
from valora_serve.engine.intake import Intake
from valora_serve.engine.launch import Launcher
from valora_serve.engine.merge import MergeState
from valora_serve.engine.named import Named
from valora_serve.engine.requests import Requests
from valora_serve.engine.sequence import Prepared, SequenceState
from valora_serve.engine.settings import BY_MATRIX, FP8, LAZY, NF4_PACKED, UNMERGEABLE
from valora_serve.engine.tuning import make_tuning
from valora_serve.engine.warm_up import WarmUp
from valora_serve.engine.workers import Workers
from valora_serve.errors import (
    CancelledRequestError,
    DeadlineError,
    OverloadedError,
    RequestError,
    ServeError,
    SettingsError,
    StoppedError,
)
from valora_serve.memory.adapter_memory import AdapterMemory
from valora_serve.memory.block_manager import BlockManager, Owner, PagePool
from valora_serve.memory.prefix_memory import PrefixMemory
from valora_serve.memory.unified import PageShape, UnifiedMemory
from valora_serve.model.attention.base import KVCache
from valora_serve.model.lmm import Lmm
from valora_serve.model.prompt import prepare_prompt
from valora_serve.model.runner import ModelRunner
from valora_serve.model.split_runner import SplitRunner
from valora_serve.model.work import AdapterTable
from valora_serve.orchestrator.cost_model import load_or_estimate
from valora_serve.orchestrator.decision import StepLimits, View, window
from valora_serve.orchestrator.registry import make_policy, modes_of
from valora_serve.orchestrator.trace import DecisionTrace
from valora_serve.parallel.partition import LoraParallel
from valora_serve.types import EngineStats, Finish, Mode, Output, Request

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from valora_serve.engine.compress import Compression
    from valora_serve.engine.launch import Flight
    from valora_serve.engine.settings import EngineSettings
    from valora_serve.orchestrator.cost_model import CostModel
    from valora_serve.orchestrator.decision import Decision
    from valora_serve.parallel.group import Group
    from valora_serve.types import NewContext

log = logging.getLogger(__name__)

SEEN = 1024
"""Most waiting requests that a policy sees at a time."""


class Engine:
    """A base model with its adapters and heads, and the requests on them.

    Args:
        settings: Settings of the engine.
        lmm: The base model; loaded as the settings say if None.
        cost_model: Predicts what steps cost; if None, the measured costs of this machine, or an
            estimate if there are none.
        group: The tensor-parallel group of this process, if it is a worker of one; rank 0
            starts the group itself.

    Attributes:
        settings: Settings of the engine.
        device: Device of the base model.
        lmm: The base model.
        context_length: Longest prompt and answer together, in tokens.
        store: Names that requests can use.
        named: Loads and unloads what has a name.
        memory: KV pages and adapters on the device.
        pool: Free and used pages of `memory`; without those that are kept for adapters alone.
        blocks: Pages of each running request, and the prefix cache.
        adapters: Adapters, on the host and on the device.
        prefixes: Prefixes of contexts, on the host and on the device.
        requests: Unfinished requests.
        images: Cache of encoded images.
        merge_state: Inference mode and merged adapter.
        runner: Runs steps on the device.
        cost: Cost model that the policy uses.
        policy: Decides every step.
        workers: The other processes of a tensor-parallel group; None on one GPU, and in a worker.
        start_up: What is prepared before and between requests, and the time that the start takes.
        tuning: Measures the tilings of the GPU; None where some are shipped, and in a
            tensor-parallel group, whose processes must all choose the same ones.

    Raises:
        SettingsError: Settings contradict each other, or ask for what the machine has not.
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
        self._modes = modes_of(settings.policy)
        if not settings.policy_settings.mixture:
            self._modes -= {Mode.MIXTURE}
        if settings.quantize in UNMERGEABLE:
            self._modes = frozenset({Mode.UNMERGED})
        self.start_up = WarmUp(sizing.lora_terms(self._modes), lazy=settings.capture == LAZY)
        self.workers: Workers | None = None
        if settings.tensor_parallel > 1 and group is None:
            if lmm is not None:
                raise SettingsError(
                    "tensor_parallel: expected no model, as each process reads its own part"
                )
            self.workers = Workers(settings)
            group = self.workers.group
        try:
            with self._explained():
                self._open(lmm, cost_model, group)
                if self.workers is not None:
                    self.workers.lead(self)
        except BaseException:
            if self.workers is not None:
                self.workers.close()
            raise
        terms = sizing.lora_terms(self._modes)
        self.tuning = (
            make_tuning(settings, self.device, self.lmm.linears, self.runner, terms)
            if group is None
            else None
        )

    def _open(self, lmm: Lmm | None, cost_model: CostModel | None, group: Group | None) -> None:
        """Load what is not given, and make all parts."""
        settings = self.settings
        if lmm is None:
            with self.start_up.phase("base model"):
                lmm = self._load(group)
        self.lmm, self.device = lmm, lmm.device
        sizing.limit_host_threads(self.device)
        lmm.linears.scope.operator = operator(settings.operator)
        lmm.linears.by_matrix = settings.switch == BY_MATRIX
        cuda = self.device.type == "cuda"
        if cuda if settings.compile is None else settings.compile:
            lmm.compile_layers()
        self.context_length = min(settings.context_length or lmm.context_length, lmm.context_length)
        mergeable = self._modes != {Mode.UNMERGED} and lmm.mergeable
        with self.start_up.phase("memory"):
            self.memory = self._make_memory(group, mergeable=mergeable)
        kept = self._kept_for_adapters()
        self.pool = own = PagePool(self.memory.pages - kept)
        if kept:
            own = PagePool(kept, first=self.memory.pages - kept)
        # Rows that only fill a graph up write to page 0.
        self.pool.take(1, Owner.RESERVED)
        self.blocks = BlockManager(self.pool, settings.block_size, caching=settings.prefix_cache)
        self.adapters = AdapterMemory(self.memory, own, host_bytes=settings.host_bytes)
        self.prefixes = PrefixMemory(self.memory, self.adapters.room)
        self.requests = Requests(self.blocks, self.adapters, self.prefixes, settings.max_requests)
        self.adapters.wanted = self.requests.wanted
        self.prefixes.wanted = self.requests.wanted_prefixes
        self.merge_state = MergeState(lmm.linears, self.adapters)
        self.store = Store(
            lmm.base,
            lmm.targets,
            width=lmm.width,
            device=self.device,
            quantize=lmm.quantize,
            config=lmm.config.get_text_config(),
        )
        self.named = Named(
            lmm,
            self.store,
            self.memory,
            self.adapters,
            self.prefixes,
            self.merge_state,
            in_use=self.requests.wanted,
            prefixes_in_use=self.requests.wanted_prefixes,
            mergeable=mergeable,
            on_change=self._weights_changed,
        )
        with self.start_up.phase("attention"):
            self.runner = self._make_runner(group)
        self.images = ImageEncoder(self.runner, self.adapters, settings.image_cache_bytes)
        # A tokenizer is not thread-safe, and prompts are prepared in another thread.
        self._tokenizer = copy.deepcopy(lmm.tokenizer)
        self._intake = Intake(
            settings,
            lmm,
            self._tokenizer,
            self.context_length,
            self.named,
            self.pool,
            self.adapters,
            self.prefixes,
        )
        self._answers = Answers(
            lmm,
            self._tokenizer,
            self.requests,
            self.context_length,
            self._ended,
            self._broken,
        )
        self._launcher = Launcher(
            lmm,
            self.runner,
            self.requests,
            self.images,
            self.merge_state,
            self.memory,
            self._answers.fail,
        )
        self.cost = cost_model or load_or_estimate(
            sizing.cost_folder(settings), sizing.machine_of(settings, self.device), lmm.base
        )
        self.policy = make_policy(settings.policy, self.cost, settings.deciding)
        path = settings.decision_trace
        try:
            self._trace_file = Path(path).open("a") if path else None  # noqa: SIM115
        except OSError as error:
            raise SettingsError(
                f"the decision trace {path} cannot be written ({error.strerror}): name another file"
            ) from error
        self._trace = DecisionTrace(self._trace_file) if self._trace_file else None
        self._overlap = cuda if settings.overlap is None else settings.overlap
        self._flight: Flight | None = None
        self._arrived: list[float] = []  # arrival times that the policy has not seen
        self._idle = False
        self._warm = False

    def _load(self, group: Group | None) -> Lmm:
        """Load the base model, or this process's part of it."""
        settings = self.settings
        packed = settings.quantize == NF4_PACKED
        quantize = NF4 if packed or settings.quantize == NF4 else None
        if group is None:
            device = sizing.find_device(settings.device)
            dtype = sizing.find_dtype(settings.dtype, device)
            fp8 = settings.quantize == FP8
            return Lmm.load(settings.base, dtype, device, quantize, fp8=fp8, packed=packed)
        dtype = sizing.find_dtype(settings.dtype, group.device)

        lora = LoraParallel(settings.lora_parallel)
        return Lmm.load_part(settings.base, dtype, group, lora, quantize)

    def _make_memory(self, group: Group | None, *, mergeable: bool) -> UnifiedMemory:
        """Make the memory of pages, of the same number on every GPU."""
        settings, lmm = self.settings, self.lmm
        page = PageShape(settings.block_size, lmm.layers, lmm.kv_heads, lmm.head_dim)
        pages = settings.pages or sizing.pages_that_fit(settings, lmm, page, mergeable=mergeable)
        if group is not None:
            pages = group.least(pages)
        return UnifiedMemory(
            pages,
            page,
            [group.spec for group in lmm.linears.groups.values()],
            slots=settings.slots,
            max_rank=settings.max_rank,
            dtype=lmm.dtype,
            device=self.device,
        )

    def _kept_for_adapters(self) -> int:
        """Return the number of pages that hold adapters alone."""
        share, pages = self.settings.adapter_share, self.memory.pages
        kept = math.ceil(share * pages)
        if pages - kept < 2:  # one of them is for rows that fill a step up
            raise SettingsError(
                f"adapter_share {share:g} of {pages} pages leaves too few for keys and values: "
                "lower it"
            )
        return kept

    def _make_runner(self, group: Group | None) -> ModelRunner:
        """Make the runner: one of a tensor-parallel group also talks with the others."""
        settings, lmm = self.settings, self.lmm
        make = ModelRunner if group is None else partial(SplitRunner, group)
        return make(
            lmm,
            KVCache(self.memory.kv, settings.block_size, lmm.heads),
            AdapterTable(self.adapters.ranks, self.adapters.scalings),
            backend=settings.attention,
            max_tokens=settings.max_tokens,
            max_requests=settings.max_requests,
            max_adapters=settings.max_adapters,
            graphs=sizing.decode_sizes(settings),
            prompt_graphs=sizing.prompt_sizes(settings, self.device),
            vision_graphs=sizing.image_counts(settings, self.device),
        )

    # ------------------------------------------------------------------ before requests come

    def load(
        self, folder: Path, name: str | None = None, *, decode_only: bool = False
    ) -> list[str]:
        """Load a bundle, or an adapter under a name; see `Named.load`."""
        with self.start_up.phase("adapters"):
            return self.named.load(folder, name, decode_only=decode_only)

    def interrupt_start(self) -> None:
        """End `warm_up` after what it prepares now; may be called from any thread."""
        self.start_up.interrupted = True
        self.runner.interrupt()

    def warm_up(self) -> None:
        """Prepare for requests: capture CUDA graphs and compile kernels.

        With ``capture=lazy``, only the likeliest graphs; `settle` and `step` prepare the others.
        """
        self._warm = True
        with self._explained():
            self.start_up.start(self.runner)

    def settle(self) -> bool:
        """Prepare one thing more while there are no requests.

        It takes up to a second, some seconds where kernels are compiled for the first time.

        Returns:
            False if nothing is left to prepare.
        """
        with self._explained():
            return self.start_up.settle(self.runner)

    def tune(self) -> bool:
        """Measure one tiling more while there are no requests, which takes up to a second.

        Returns:
            False if there is nothing to do now.
        """
        tuning = self.tuning
        if tuning is None or not self._warm:
            return False
        adopted = tuning.adopted
        try:
            found = tuning.go_on()
        except Exception:  # requests can be answered without it
            log.exception("tilings are not measured any more")
            tuning.close()
            self.tuning = None
            return False
        if tuning.adopted > adopted:  # steps cost less from now on
            self.cost = replace(self.cost, measured=False)
        return found

    def use(self, cost_model: CostModel) -> None:
        """Decide with another cost model from now on."""
        self.cost = cost_model
        self.policy = make_policy(self.settings.policy, cost_model, self.settings.deciding)

    def _weights_changed(self, language: bool) -> None:
        """Weights have moved, or take adapters from now on: what was captured is out of date.

        Args:
            language: Whether they are the language model's; no graph holds other weights.
        """
        if self.runner.has_lora and not language:
            return
        self.runner.has_lora = True
        if self.tuning is not None:
            self.tuning.restart()
        if self._warm:
            self.runner.forget_graphs()
            self.warm_up()

    # ------------------------------------------------------------------ requests

    def prepare(self, request: Request) -> Prepared:
        """Tokenize the prompt and preprocess its images; may be called from any thread.

        Raises:
            ServeError: The request cannot be answered.
        """
        target = self.store.mix(request.model, request.adapters)
        self._intake.check_characters(request)
        prompt = prepare_prompt(self.lmm, request, target.model.prompt, target.context)
        return Prepared(request, target, prompt)

    def prepare_all(self, requests: Sequence[Request]) -> dict[str, Prepared | ServeError]:
        """Prepare requests about the same images; may be called from any thread.

        Returns:
            By id, each one prepared or why it cannot be answered. Equal prompts are made once.
        """
        if len(requests) > 1:
            with self.lmm.images_once():
                return self._prepare_all(requests)
        return self._prepare_all(requests)

    def _prepare_all(self, requests: Sequence[Request]) -> dict[str, Prepared | ServeError]:
        prompts: dict[str, Prepared] = {}
        found: dict[str, Prepared | ServeError] = {}
        for request in requests:
            try:
                target = self.store.mix(request.model, request.adapters)
                key = repr((request.messages or target.model.prompt, bool(request.videos)))
                if key in prompts and target.context is None:
                    found[request.id] = replace(prompts[key], request=request, target=target)
                else:
                    found[request.id] = prompts[key] = self.prepare(request)
            except ServeError as error:
                found[request.id] = error
            except Exception as error:
                log.exception("request %s", request.id)
                found[request.id] = ServeError(f"request {request.id} failed: {error}")
        return found

    def prepare_compression(self, wanted: NewContext, name: str) -> Compression:
        """Prepare the request that makes a context of a document; may be called from any thread.

        Args:
            wanted: The context.
            name: Id of the request.

        Raises:
            ServeError: It cannot be made.
        """
        self._intake.check_characters(Request(name, text=wanted.document), "document")
        return prepare_compression(self.lmm, self.store, wanted, name, self.context_length)

    def add_all(self, asked: Sequence[Prepared]) -> dict[str, ServeError]:
        """Put requests about the same images in the queue; return why some cannot be answered."""
        failed: dict[str, ServeError] = {}
        together: list[SequenceState] = []
        for prepared in asked:
            try:
                together.append(self.add(prepared, together))
            except ServeError as error:
                failed[prepared.request.id] = error
        return failed

    def add(self, prepared: Prepared, together: Sequence[SequenceState] = ()) -> SequenceState:
        """Put a request in the queue, beside others about the same images.

        Raises:
            RequestError: The request cannot be answered, or its id is in use.
            QuarantinedError: Its adapter is quarantined.
            TooLongError: Prompt and answer do not fit.
        """
        request_id = prepared.request.id
        if self.requests.find(request_id) is not None:
            raise RequestError(f"request id {request_id} is in use: choose another one")
        sequence = self._intake.sequence(prepared)
        self.requests.add(sequence, together)
        if sequence.carrier is None:
            self._arrived.append(sequence.arrival)
        return sequence

    def cancel(self, request_id: str, error: ServeError | None = None) -> bool:
        """End a request and release what it holds.

        Args:
            request_id: Its id.
            error: Why; None if the client cancelled it.

        Returns:
            False if there is no unfinished request of this id.
        """
        sequence = self.requests.find(request_id)
        if sequence is None:
            return False
        reason = error or CancelledRequestError(f"request {request_id} was cancelled")
        finish = Finish.CANCELLED if error is None else Finish.ERROR
        self._answers.end(sequence, finish, error=reason)
        return True

    def fail_all(self, reason: str) -> list[Output]:
        """End all requests, as the engine cannot go on.

        Returns:
            Their last outputs.
        """
        self._flight = None
        if self.workers is not None and self.workers.lost is not None:
            self._answers.pending.clear()  # what a lost process left behind is no answer
        for sequence in self.requests.all():
            self._answers.fail(sequence, StoppedError(reason))
        return self._answers.take()

    def _ended(self, sequence: SequenceState) -> None:
        """Note that a request has left `requests`."""
        for key in sequence.adapters:
            if key not in self.requests.wanted:
                self.named.released(key)
        prefix = sequence.prefix
        if prefix is not None and prefix not in self.requests.wanted_prefixes:
            self.named.released_prefix(prefix)
        self.policy.finished(sequence.id)

    def _broken(self, sequence: SequenceState, merged: str | None) -> None:
        """Keep what made a request's outputs infinite or NaN from later requests."""
        self.blocks.forget(sequence.keys)
        if merged is not None and not sequence.adapters:
            # Without an adapter of its own, the merged one is the likeliest cause.
            reason = "a request of the base model was not finite beside it"
            log.error("adapter %s is not merged any more: %s", merged, reason)
            self.adapters.bar(merged, reason)

    # ------------------------------------------------------------------ steps

    @property
    def busy(self) -> bool:
        """Whether there are unfinished requests or outputs that `step` has not returned yet."""
        requests = self.requests
        return bool(requests.waiting or requests.running or self._flight or self._answers.pending)

    @property
    def stalled(self) -> bool:
        """Whether the last step had nothing to compute.

        Only a new request, or an adapter that has finished loading, changes that.
        """
        return self._flight is None and not self._answers.pending and self._idle

    def step(self) -> list[Output]:
        """Decide and launch the next step, then read the results of the step before it.

        Returns:
            New outputs, in order.

        Raises:
            StoppedError: A process of the tensor-parallel group has ended.
        """
        with self._explained():
            return self._step()

    def _explained(self) -> AbstractContextManager[object]:
        """Context in which the end of a process of the group is told as such."""
        return contextlib.nullcontext() if self.workers is None else self.workers.explained()

    def _step(self) -> list[Output]:
        self.start_up.beside(self.runner)
        now = time.monotonic()
        answers = self._answers
        for key, wrong in self.adapters.poll().items():
            self._launcher.fail_adapter(key, wrong)
        starved = now - self.settings.policy_settings.patience
        for key, wrong in self.requests.load_prefixes(starved).items():
            for sequence in self.requests.of_prefix(key):
                answers.fail(sequence, wrong)
        for late in self.requests.overdue(now):
            error = DeadlineError(f"request {late.id} missed its deadline: allow it more time")
            answers.fail(late, error)
        decision = self._decide(now)
        flight = self._launcher.launch(decision) if decision is not None else None
        if self._flight is not None:
            answers.collect(self._flight)
            self._idle = False
        if flight is not None and not self._overlap:
            answers.collect(flight)
            flight = None
        self._flight = flight
        return answers.take()

    def _decide(self, now: float) -> Decision | None:
        """Ask the policy, and carry out its decision up to the weights' mode.

        Returns:
            The decision, whose batch is still to be launched; None if there is nothing to decide.
        """
        self._idle = False
        if self._is_full():
            return None
        view = self._view(now)
        if view is None:
            self._idle = True
            if self.requests.waiting and not self.prefixes.loading:
                self._release_merged()  # a prefix may need its pages
            return None
        decision = self.policy.decide(view)
        if self._trace is not None:
            self._trace.write(view, decision)
        for request_id, reason in decision.abort:
            self.cancel(request_id, OverloadedError(f"request {request_id} was given up: {reason}"))
        if decision.preempt:
            self._preempt(decision.preempt)
        merged = decision.merged
        if merged is not None and merged not in self.adapters.resident:
            merged = None
        if (
            not self.merge_state.switch(decision.mode, merged)
            and merged is not None
            and merged in self.adapters.quarantined
        ):
            self._launcher.fail_adapter(merged, self.named.quarantined(merged))
        self._idle = not decision.batch
        if self._idle and not view.running and not self.adapters.loading:
            self._release_merged()
        return decision

    def _is_full(self) -> bool:
        """Whether all places are held by requests that only wait for the host to read them."""
        running = self.requests.running.values()
        return len(running) >= self.settings.max_requests and not any(
            map(self._schedulable, running)
        )

    def _release_merged(self) -> None:
        """Unmerge the adapter, which is pinned while it is merged, so that others have room."""
        self.merge_state.switch(Mode.UNMERGED, None)

    def _view(self, now: float) -> View | None:
        """Return what the policy sees of the engine; None if no request can be computed."""
        requests = self.requests
        schedulable, pages_needed = self._schedulable, self.blocks.pages_needed
        running, held = [], 0
        for sequence in requests.running.values():
            if schedulable(sequence):
                seen = sequence.view
                if not seen.prompt_left:
                    seen.pages = pages_needed(sequence.id, sequence.computed + 1)
                running.append(seen)
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
                lacking = [key for key in needed - loading if not self.adapters.pinned(key)]
                for sequence in members.values():
                    sequence.view.adapter_pages = sum(map(self.adapters.pages, lacking))
        arrived, self._arrived = self._arrived, []
        return View(
            now=now,
            running=running,
            waiting=waiting,
            mode=self.merge_state.mode,
            merged=self.merge_state.adapter,
            resident=resident,
            loading=loading,
            limits=StepLimits(
                max_requests=settings.max_requests - held,
                max_tokens=settings.max_tokens,
                free_pages=self.pool.free + (self.adapters.idle_pages if self._unified else 0),
                max_adapters=settings.max_adapters,
                chunk=settings.chunk,
            ),
            arrived=arrived,
            switchable=mergeable,
        )

    @property
    def _unified(self) -> bool:
        """Whether keys, values and adapters share all pages."""
        return self.adapters.room.pool is self.pool

    def _schedulable(self, sequence: SequenceState) -> bool:
        """Return whether a running request has a token to compute, as far as the host knows."""
        if sequence.place is None:
            return False  # its head computes its result
        if not sequence.pending:
            return True
        if sequence.generated >= sequence.max_new or sequence.length >= self.context_length:
            return False  # it ends when the host reads its token
        return not sequence.request.sampling.needs_history

    def _preempt(self, ids: Sequence[str]) -> None:
        """Preempt running requests; they are recomputed later."""
        if self._flight is not None:  # recomputing needs their last tokens
            self._answers.collect(self._flight)
            self._flight = None
        for request_id in ids:
            sequence = self.requests.running.get(request_id)
            if sequence is not None:
                self.requests.preempt(sequence)

    # ------------------------------------------------------------------ state

    def stats(self) -> EngineStats:
        """Return the state of the engine and its counters."""
        requests, named, merged = self.requests, self.named, self.merge_state.adapter
        own = self.adapters.room.pool
        return EngineStats(
            running=len(requests.running),
            waiting=len(requests.waiting),
            mode=self.merge_state.mode,
            merged_adapter=None if merged is None else named.name(merged),
            switches=self.merge_state.switches,
            steps=self._launcher.steps,
            pages_total=self.memory.pages - 1,
            pages_free=self.pool.free + (0 if self._unified else own.free),
            pages_kv=self.pool.count(Owner.KV),
            pages_adapters=own.count(Owner.ADAPTER),
            pages_contexts=own.count(Owner.CONTEXT),
            contexts_resident=len(self.prefixes.resident),
            contexts_known=self.named.contexts,
            context_loads=self.prefixes.loads,
            adapters_resident=tuple(sorted(map(named.name, self.adapters.resident))),
            adapters_known=len(self.adapters),
            on_device=named.names(self.adapters.resident),
            on_disk=named.names(self.adapters.dropped - self.adapters.resident),
            prefix_hits=requests.prefix_hits,
            prefix_queries=requests.prefix_queries,
            image_hits=self.images.hits,
            image_queries=self.images.queries,
            preemptions=requests.preemptions,
            adapter_loads=self.adapters.loads,
            finished=dict(self._answers.finished),
            prompt_tokens=self._launcher.prompt_tokens,
            generated_tokens=self._answers.generated_tokens,
            shared_passes=self._launcher.shared,
            non_finite=self._answers.non_finite,
            unmergeable=tuple(sorted(named.by_name(self.adapters.unmergeable))),
            quarantined=named.by_name(self.adapters.quarantined),
            start_seconds=dict(self.start_up.seconds),
            prepared=self.start_up.done,
            preparations=self.start_up.done + len(self.start_up.left) + self.runner.provisional,
            tilings_measured=0 if self.tuning is None else self.tuning.progress[0],
            tilings_wanted=0 if self.tuning is None else self.tuning.progress[1],
        )

    def close(self) -> None:
        """Stop the workers and reading adapters from their files, and close the trace."""
        if self.tuning is not None:
            self.tuning.close()
        if self.workers is not None:
            with contextlib.suppress(ServeError):  # a process has ended
                self.runner.forget_graphs()  # NCCL does not end while graphs hold its calls
            self.workers.close()
        self.adapters.close()
        self.prefixes.close()
        if self._trace_file is not None:
            try:
                self._trace_file.close()
            except OSError as error:  # its last lines do not fit on the disk
                log.warning("the end of the decision trace is lost: %s", error)
