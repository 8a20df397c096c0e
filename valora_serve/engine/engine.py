"""The engine: requests in, batches through the model, answers out (VaLoRA §4.3, §4.4; S-LoRA §4).

Continuous batching at the level of single steps. What a step does is decided by a policy
(`orchestrator`); this file carries it out and keeps the books. Where there is a GPU a step is
planned and enqueued while the one before it still runs, so that the device never waits for the
host: tokens that the device has chosen and the host has not seen are `pending`.

`Engine` belongs to one thread; `async_engine` puts it behind an event loop.
"""

from __future__ import annotations

import copy
import heapq
import logging
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from valora_data.contract.heads import HeadResult
from valora_kernels.metadata import NONE
from valora_serve.catalogue.adapters import read_adapter
from valora_serve.catalogue.store import Staged, Store, Target
from valora_serve.engine.images import Images
from valora_serve.engine.profile import measure
from valora_serve.engine.sequence import Sequence
from valora_serve.errors import (
    CancelledRequestError,
    DeadlineError,
    OverloadedError,
    RequestError,
    ServeError,
    StoppedError,
    TooLongError,
)
from valora_serve.memory.adapter_memory import AdapterMemory
from valora_serve.memory.block_manager import BlockManager, Owner, PagePool
from valora_serve.memory.unified import PageShape, UnifiedMemory
from valora_serve.model.attention.base import KVCache
from valora_serve.model.detokenizer import Detokenizer
from valora_serve.model.heads import HeadInput, HeadSet, check_visual
from valora_serve.model.lmm import Lmm
from valora_serve.model.runner import AdapterTable, ModelRunner, Work
from valora_serve.model.sampler import Choice, make_generator
from valora_serve.orchestrator.cost_model import PROMPT_SIZES, load_or_estimate
from valora_serve.orchestrator.decision import RequestView, StepLimits, View
from valora_serve.orchestrator.registry import make_policy
from valora_serve.orchestrator.trace import DecisionTrace
from valora_serve.types import (
    EngineStats,
    Finish,
    Logprob,
    Mode,
    Output,
    Times,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from valora_serve.catalogue.adapters import Adapter
    from valora_serve.engine.settings import EngineSettings
    from valora_serve.memory.unified import PackedAdapter
    from valora_serve.model.heads import HeadLogits
    from valora_serve.model.lmm import Prompt
    from valora_serve.model.runner import StepResult
    from valora_serve.orchestrator.cost_model import CostModel
    from valora_serve.orchestrator.decision import Decision
    from valora_serve.types import Request

log = logging.getLogger(__name__)

SEEN = 1024
"""Waiting requests that a policy sees at a time, the oldest."""

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320,
               384, 448, 512)  # fmt: skip


@dataclass(slots=True)
class Flight:
    """A step under way: who chooses a token in it, and which heads answer."""

    choosing: list[Sequence]
    result: StepResult
    answering: list[Sequence]
    heads: HeadLogits | None
    mode: Mode


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with everything that takes long and can be done in any thread."""

    request: Request
    target: Target
    prompt: Prompt


class Engine:
    """A base model with its adapters and heads, and the requests on it.

    Args:
        settings: How to run.
        lmm: The base model, if it is in memory already.
        cost_model: What steps cost, if that is known.

    Attributes:
        settings: The same.
        lmm: The base model.
        store: What requests can name.
        cost: The cost model that decisions are made with.
    """

    def __init__(
        self,
        settings: EngineSettings,
        lmm: Lmm | None = None,
        cost_model: CostModel | None = None,
    ) -> None:
        self.settings = settings
        self.device = _device(settings.device) if lmm is None else lmm.device
        cuda = self.device.type == "cuda"
        dtype = settings.dtype
        if dtype == "auto":
            dtype = "bfloat16" if cuda else "float32"
        self.lmm = lmm or Lmm(settings.base, getattr(torch, dtype), self.device)
        if cuda if settings.compile is None else settings.compile:
            self.lmm.compile_layers()
        longest = self.lmm.context_length
        self.context_length = min(settings.context_length or longest, longest)
        self.store = Store(
            self.lmm.base, self.lmm.targets, width=self.lmm.width, device=self.device
        )
        page = PageShape(settings.block_size, self.lmm.layers, self.lmm.kv_heads, self.lmm.head_dim)
        self.memory = UnifiedMemory(
            settings.pages or self._room(page),
            page,
            [group.spec for group in self.lmm.linears.groups.values()],
            slots=settings.slots,
            max_rank=settings.max_rank,
            dtype=self.lmm.dtype,
            device=self.device,
        )
        self.pool = PagePool(self.memory.pages)
        # Page 0 takes what rows write that only fill a graph up.
        self.pool.take(1, Owner.RESERVED)
        self.blocks = BlockManager(self.pool, settings.block_size, caching=settings.prefix_cache)
        self.adapters = AdapterMemory(self.memory, self.pool, host_bytes=settings.host_bytes)
        cache = KVCache(self.memory.kv, settings.block_size, self.lmm.heads)
        sizes = [n for n in GRAPH_SIZES if n <= settings.max_requests] if settings.graphs else []
        prompts_too = settings.prompt_graphs
        if prompts_too is None:
            prompts_too = cuda and settings.graphs
        self.runner = ModelRunner(
            self.lmm,
            cache,
            AdapterTable(self.adapters.ranks, self.adapters.scalings),
            backend=settings.attention,
            max_tokens=settings.max_tokens,
            max_requests=settings.max_requests,
            max_adapters=settings.max_adapters,
            graphs=sizes,
            # Up to the first that holds any step.
            prompt_graphs=PROMPT_SIZES[: bisect_left(PROMPT_SIZES, settings.max_tokens) + 1]
            if prompts_too
            else (),
        )
        self.cost = cost_model or load_or_estimate(self._cost_folder, self.machine, self.lmm.base)
        self.policy = make_policy(settings.policy, self.cost, settings.policy_settings)
        self._trace_file = Path(settings.trace).open("a") if settings.trace else None  # noqa: SIM115
        self._trace = DecisionTrace(self._trace_file) if self._trace_file else None
        self._overlap = cuda if settings.overlap is None else settings.overlap
        self._heads = HeadSet()
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: dict[str, Sequence] = {}
        self._places = deque(range(settings.max_requests))
        self._deadlines: list[tuple[float, str]] = []
        self._outputs: list[Output] = []
        self._wanted: Counter[str] = Counter()
        self.adapters.wanted = self._wanted
        self._flight: Flight | None = None
        self._mode = Mode.UNMERGED
        self._merged: str | None = None
        self.images = Images(self.runner, self.adapters, settings.image_cache_bytes)
        # Prompts are prepared in another thread, and a tokenizer is not made for two.
        self._tokenizer = copy.deepcopy(self.lmm.tokenizer)
        self._key_of: dict[str, str] = {}
        self._keys: dict[str, str] = {}  # adapters that something nameable needs, and a name
        self._counts: Counter[str] = Counter()
        self._warm = False
        self._finished: Counter[str] = Counter()

    @property
    def _cost_folder(self) -> Path:
        folder = self.settings.cost_folder
        return Path(folder) if folder else Path.home() / ".cache" / "valora" / "costs"

    @property
    def machine(self) -> str:
        """Name of the device, for the cost model."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        import platform

        return f"{platform.machine()} {torch.get_num_threads()} threads"

    def _room(self, page: PageShape) -> int:
        """Pages that the memory has room for, with the weights, their pristine copy and graphs."""
        size = torch.tensor([], dtype=self.lmm.dtype).element_size()
        if self.device.type != "cuda":
            return max(2, (512 << 20) // (page.elements * size))
        free, total = torch.cuda.mem_get_info(self.device)
        linears = self.lmm.linears.groups.values()
        pristine = 0
        if self.settings.policy not in ("unmerge_only", "slora"):
            pristine = size * sum(
                weight.numel() for g in linears if g.spec.part == "text" for weight in g.weights
            )
        rows = self.settings.max_tokens * (self.lmm.vocabulary * 4 + self.lmm.width * 64)
        left = total * self.settings.memory - (total - free) - pristine - min(rows, 8 << 30)
        pages = int(left // (page.elements * size))
        if pages < 16:
            raise ServeError(
                f"the GPU has {free >> 20} MiB free, too little beside the model: use a smaller "
                "base model or raise engine.memory"
            )
        return pages

    # ------------------------------------------------------------------ what can be named

    def pack(self, staged: Staged) -> dict[str, PackedAdapter]:
        """Lay what was staged out for the device; any thread may.

        Raises:
            AdapterError: Something does not fit.
        """
        return {content: self.memory.pack(one) for content, one in staged.adapters.items()}

    def register(self, staged: Staged, packed: dict[str, PackedAdapter]) -> list[str]:
        """Make what was staged and packed nameable; all or nothing.

        Returns:
            The names.

        Raises:
            AdapterError: A name is taken.
        """
        models = self.store.commit(staged)
        for content, adapter in staged.adapters.items():
            key = self._key(adapter)
            folder = adapter.folder

            def reload(folder: Path = folder) -> PackedAdapter:
                return self.memory.pack(read_adapter(folder, self.lmm.targets))

            self.adapters.add(key, packed[content], reload)
        self._activate({name for one in packed.values() for name in one.groups})
        self._retire(self._refresh_keys())
        return [model.name for model in models]

    def load(self, folder: Path, name: str | None = None) -> list[str]:
        """Stage, pack and register a bundle, or an adapter under a name."""
        store = self.store
        staged = store.stage_bundle(folder) if name is None else store.stage_adapter(name, folder)
        return self.register(staged, self.pack(staged))

    def unregister(self, name: str, *, bundle: bool) -> None:
        """Forget an adapter or a bundle; requests that run on it go on to their end.

        Raises:
            UnknownModelError: There is none of this name.
            BusyError: The adapter belongs to a bundle.
        """
        if bundle:
            self.store.unregister_bundle(name)
        else:
            self.store.unregister_adapter(name)
        self._retire(self._refresh_keys())

    def _key(self, adapter: Adapter) -> str:
        """Readable and, by the content, unique: the same name may come to mean something else."""
        # Folders of the same content are one adapter, by the name of the first.
        named = f"{adapter.folder.name}#{adapter.content[:12]}"
        return self._key_of.setdefault(adapter.content, named)

    def _refresh_keys(self) -> set[str]:
        """Note which adapters are needed; returns those that no longer are."""
        before = set(self._keys)
        self._keys = {}
        for model in self.store.models():
            adapter = self.store.resolve(model.name).adapter
            if adapter is not None:  # adapters are listed before the domains that use them
                self._keys.setdefault(self._key(adapter), model.name)
        return before - set(self._keys)

    def _retire(self, keys: set[str]) -> None:
        """Free what nothing names any more, now or when its last request ends."""
        for key in keys:
            if not self._wanted[key] and key in self.adapters:
                if key == self._merged:
                    self.switch(Mode.UNMERGED, None)
                self.adapters.remove(key)

    def _activate(self, names: set[str]) -> None:
        """Have groups of linears look for adapters from now on, and be merged into."""
        groups = self.lmm.linears.groups
        new = {name for name in names if groups[name].lora is None}
        if not new:
            return
        if self._merged is not None:
            self.switch(Mode.UNMERGED, None)
        for name in new:
            groups[name].lora = self.memory.lora[name]
        if self.settings.policy not in ("unmerge_only", "slora"):
            text = [name for name in groups if name in new and groups[name].spec.part == "text"]
            self.lmm.linears.make_mergeable(text)
            for held in self.lmm.linears.merged:
                found = {module: self.lmm.linears.group_of[module] for module in held.shapes}
                held.bind({
                    module: (self.memory.lora[group.spec.name], index)
                    for module, (group, index) in found.items()
                })  # fmt: skip
        self.runner.has_lora = True
        if self._warm:  # the weights have moved
            self.runner.forget_graphs()
            self.warm_up()

    def known_adapters(self) -> list[str]:
        """Keys of the adapters that something nameable needs."""
        return sorted(self._keys)

    def warm_up(self) -> None:
        """Capture the decode steps, and measure this machine if nobody has yet.

        The first requests need not wait for it then.
        """
        terms: tuple[int, ...] = (0, 1, 2)
        if self.settings.policy in ("unmerge_only", "slora"):
            terms = (0, 1)
        if self.settings.policy == "merge_only":
            terms = (0,)
        self._warm = True
        start = time.monotonic()
        count = self.runner.capture(terms)
        if count:
            log.info("captured %d steps in %.1f s", count, time.monotonic() - start)
        if self.device.type == "cuda":
            start = time.monotonic()
            self.runner.rehearse(terms)
            torch.cuda.synchronize(self.device)
            log.info("compiled kernels for all other steps in %.1f s", time.monotonic() - start)
        if self.settings.profile and not self.cost.measured and not self.busy:
            self.cost = measure(self)
            self._counts.clear()  # switches of the measurement are none that a request needed
            self.cost.save(self._cost_folder)
            self.policy = make_policy(
                self.settings.policy, self.cost, self.settings.policy_settings
            )

    # ------------------------------------------------------------------ requests

    def prepare(self, request: Request) -> Prepared:
        """Do what takes long and needs no state: tokens and pixels; any thread may.

        Raises:
            ServeError: The request cannot be answered.
        """
        target = self.store.resolve(request.model)
        return Prepared(request, target, self.lmm.prepare(request, target.model.prompt))

    def add(self, prepared: Prepared) -> None:
        """Take a request in.

        Raises:
            RequestError: It cannot be answered, or its id is in use.
            TooLongError: Prompt and answer do not fit.
        """
        request, prompt = prepared.request, prepared.prompt
        if request.id in self._waiting or request.id in self._running:
            raise RequestError(f"request {request.id}: an id that is in use, choose another one")
        target = prepared.target
        head = target.head if request.head else None
        ids = list(prompt.ids)
        visual = sum(len(item.at) for item in prompt.visuals)
        if head is not None:
            check_visual(head, visual, len(prompt.visuals))
            if head.reads_visual:  # what comes after what it reads changes nothing
                ids = ids[: max(int(item.at[-1]) for item in prompt.visuals) + 1]
        room = self.context_length - len(ids)
        if room < (head is None):
            raise TooLongError(
                f"the prompt has {len(ids)} tokens, the context length is "
                f"{self.context_length}: shorten it, or send fewer or smaller images"
            )
        wanted = request.sampling.max_tokens
        most = 0 if head is not None else room if wanted is None else min(wanted, room)
        if head is None and most < 1:
            raise RequestError(f"max_tokens: expected at least 1, got {wanted}")
        pages = -(-(len(ids) + 1) // self.settings.block_size)
        key, needed = None, 0
        if target.adapter is not None:
            key = self._key(target.adapter)
            if key not in self.adapters:
                raise RequestError(f"{target.model.name} was unloaded: ask again")
            needed = self.adapters.pages(key)
        total = -(-(len(ids) + max(most, 1)) // self.settings.block_size)
        if total + needed > self.memory.pages - 1:
            raise TooLongError(
                f"prompt, answer and adapter need {total + needed} pages, the memory has "
                f"{self.memory.pages - 1}: ask for fewer tokens"
            )
        now = time.monotonic()
        adapter = target.adapter
        vision = adapter.vision_content.encode() if adapter is not None else b""
        view = RequestView(
            id=request.id,
            adapter=key,
            rank=0 if adapter is None else adapter.rank,
            arrival=now,
            prompt_left=len(ids),
            output_left=most,
            pages=pages,
            adapter_pages=needed,
            images=len(prompt.visuals),
            deadline=None if request.deadline is None else now + request.deadline,
            domain=request.model if target.model.kind == "domain" else None,
        )
        sequence = Sequence(
            request=request,
            prompt=prompt,
            adapter=key,
            head=head,
            view=view,
            ids=ids,
            prompt_tokens=len(ids),
            salt=b"" if adapter is None else bytes.fromhex(adapter.content),
            spans=[span for item in prompt.visuals for span in item.spans(vision)],
            vision=vision,
            text=Detokenizer(self._tokenizer, request.sampling.stop, request.sampling.min_tokens),
            generator=make_generator(request.sampling, self.device),
            max_new=most,
            arrival=now,
        )
        self._waiting[request.id] = sequence
        if key is not None:
            self._wanted[key] += 1
        if view.deadline is not None:
            heapq.heappush(self._deadlines, (view.deadline, request.id))

    def cancel(self, request_id: str, error: ServeError | None = None) -> bool:
        """End a request and free what it holds; False if there is none of this id."""
        sequence = self._waiting.get(request_id) or self._running.get(request_id)
        if sequence is None:
            return False
        reason = error or CancelledRequestError(f"request {request_id} was cancelled")
        self._end(sequence, Finish.CANCELLED if error is None else Finish.ERROR, error=reason)
        return True

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._waiting or self._running or self._flight or self._outputs)

    # ------------------------------------------------------------------ a step

    def step(self) -> list[Output]:
        """Decide and enqueue the next step, and see what the one before has said.

        Returns:
            News of requests, in order.
        """
        now = time.monotonic()
        for key, error in self.adapters.poll().items():
            self._fail_adapter(key, error)
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            late = self._waiting.get(request_id) or self._running.get(request_id)
            if late is not None and late.view.deadline == deadline:  # not another of the same id
                wrong = DeadlineError(
                    f"request {request_id} missed its deadline: allow it more time"
                )
                self._end(late, Finish.ERROR, error=wrong)
        decision = self._decide(now)
        flight = self._launch(decision) if decision is not None else None
        if self._flight is not None:
            self._collect(self._flight)
            self._flight = None
            self._idle = False
        if flight is not None and not self._overlap:
            self._collect(flight)
            flight = None
        self._flight = flight
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def stalled(self) -> bool:
        """Whether the last step had nothing to compute: only arrivals or loads change that."""
        return self._flight is None and not self._outputs and self._idle

    _idle = False

    def _decide(self, now: float) -> Decision | None:
        """Ask the policy, and do what is not computing."""
        self._idle = False
        running, held = [], 0
        for sequence in self._running.values():
            if self._schedulable(sequence):
                seen = sequence.view
                if not seen.prompt_left:
                    seen.pages = self.blocks.pages_needed(sequence.id, sequence.computed + 1)
                running.append(seen)
            else:
                held += 1
        waiting = []
        for sequence in self._waiting.values():
            waiting.append(sequence.view)
            if len(waiting) == SEEN:
                break
        if not running and not waiting:
            self._idle = True
            return None
        settings = self.settings
        view = View(
            now=now,
            running=running,
            waiting=waiting,
            mode=self._mode,
            merged=self._merged,
            resident=self.adapters.resident,
            loading=self.adapters.loading,
            limits=StepLimits(
                max_requests=settings.max_requests - held,
                max_tokens=settings.max_tokens,
                free_pages=self.pool.free + self.adapters.idle_pages,
                max_adapters=settings.max_adapters,
                chunk=settings.chunk,
            ),
        )
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
        self.switch(decision.mode, merged)
        self._idle = not decision.batch
        if self._idle and not running and not self.adapters.loading:
            # The merged adapter is pinned: let it go, or what waits may never have room.
            self.switch(Mode.UNMERGED, None)
        return decision

    def _prefetch(self, decision: Decision) -> None:
        """Have adapters come; those of the batch hold theirs already and are not evicted."""
        for number, key in enumerate(decision.prefetch):
            if key not in self.adapters:
                continue  # unloaded, and the last that waited for it was given up
            try:
                self.adapters.load(key, urgent=number == 0)
            except ServeError as error:
                self._fail_adapter(key, error)

    def _schedulable(self, sequence: Sequence) -> bool:
        """Whether a running request has a next token to compute, as far as the host knows."""
        if sequence.place is None:
            return False  # its head answers
        if not sequence.pending:
            return True
        if sequence.generated >= sequence.max_new or sequence.length >= self.context_length:
            return False  # it ends when the host sees its token
        return sequence.request.sampling.constraint is None

    def _preempt(self, ids: Many[str]) -> None:
        if self._flight is not None:  # their last tokens must be known to be computed again
            self._collect(self._flight)
            self._flight = None
        for request_id in ids:
            sequence = self._running.get(request_id)
            if sequence is None:
                continue
            self._release(sequence)
            del self._running[request_id]
            sequence.preemptions += 1
            self._counts["preemptions"] += 1
            sequence.computed = 0
            sequence.hidden.clear()
            view = sequence.view
            view.running, view.kv_tokens, view.held = False, 0, 0
            view.prompt_left = len(sequence.ids)
            view.images = len(sequence.prompt.visuals)
            view.pages = -(-(len(sequence.ids) + 1) // self.settings.block_size)
            self._waiting[request_id] = sequence
            self._waiting.move_to_end(request_id, last=False)

    def switch(self, mode: Mode, merged: str | None) -> None:
        """Bring the weights to a mode; the only place where that happens."""
        self._mode = mode if merged is not None else Mode.UNMERGED
        if merged == self._merged:
            return
        if merged is not None:
            self.adapters.pin(merged)
            slot = self.adapters.slot(merged)
            rank, scaling = int(self.adapters.ranks[slot]), float(self.adapters.scalings[slot])
            for held in self.lmm.linears.merged:
                held.merge(slot, rank, scaling)
        else:
            for held in self.lmm.linears.merged:
                held.unmerge()
        if self._merged is not None:
            self.adapters.unpin(self._merged)
        self._merged = merged
        self._counts["switches"] += 1

    # ------------------------------------------------------------------ launching

    def _launch(self, decision: Decision) -> Flight | None:
        """Enqueue what was decided."""
        shares, works = self._works(self._shares(decision))
        if not shares:
            return None
        merged = NONE if self._merged is None else self.adapters.slot(self._merged)
        result = self.runner.step(works, merged)
        self._counts["steps"] += 1
        now = time.monotonic()
        choosing, answering, tasks = [], [], []
        for (sequence, count), work, hidden in zip(shares, works, result.hidden, strict=True):
            if sequence.started is None:
                sequence.started = now
            if sequence.computed < sequence.prompt_tokens:
                self._counts["prompt_tokens"] += count
            sequence.computed += count
            view = sequence.view
            view.kv_tokens += count
            view.held = len(work.table)
            view.prompt_left = max(0, view.prompt_left - count)
            known = min(sequence.computed, len(sequence.ids))
            self.blocks.commit(sequence.id, known)
            if hidden is not None:
                sequence.hidden.append(hidden)
            if work.choice is not None:
                sequence.pending += 1
                sequence.chosen = True
                view.output_left = max(1, view.output_left - 1)
                choosing.append(sequence)
            view.images = len(sequence.prompt.visuals) - len(sequence.features)
            if not view.prompt_left:
                view.images = 0
                sequence.features.clear()
                if sequence.head is not None:
                    answering.append(sequence)
                    tasks.append(self._head_input(sequence))
        heads = self._heads.launch(tasks) if tasks else None
        for sequence in answering:  # its keys and values are not needed any more
            self._release(sequence)
        return Flight(choosing, result, answering, heads, self._mode)

    def _shares(self, decision: Decision) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens: those that have their pages, adapter and images."""
        shares: list[tuple[Sequence, int]] = []
        for request_id, tokens in decision.batch:
            sequence = self._running.get(request_id) or self._waiting.get(request_id)
            if sequence is None or not self._admit(sequence):
                continue
            count = min(tokens, sequence.left)
            if self.blocks.reserve(sequence.id, sequence.computed + count):
                shares.append((sequence, count))
        self._prefetch(decision)
        for broken, error in self.images.encode(shares):
            self._end(broken, Finish.ERROR, error=error)
        return [share for share in shares if share[0].finish is None]

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting request its pages; False if they are not there after all."""
        if sequence.place is not None:
            return True
        key = sequence.adapter
        if not self._places or (key is not None and key not in self.adapters.resident):
            return False
        if key is not None:
            self.adapters.pin(key)
        head = sequence.head
        limit = None
        if head is not None and head.reads_visual:
            limit = int(min(item.at[0] for item in sequence.prompt.visuals))
        cached = self.blocks.open(sequence.id, sequence.ids, sequence.salt, sequence.spans, limit)
        if not self.blocks.reserve(sequence.id, len(sequence.ids) + (head is None)):
            self.blocks.close(sequence.id)
            if key is not None:
                self.adapters.unpin(key)
            return False
        del self._waiting[sequence.id]
        self._running[sequence.id] = sequence
        sequence.place = self._places.popleft()
        sequence.computed, sequence.chosen = cached, False
        if not sequence.preemptions:
            sequence.cached = min(cached, sequence.prompt_tokens)
            self._counts["prefix_queries"] += sequence.prompt_tokens
            self._counts["prefix_hits"] += sequence.cached
        view = sequence.view
        view.running, view.pages = True, 0
        view.prompt_left, view.kv_tokens = len(sequence.ids) - cached, cached
        return True

    def _works(
        self, shares: list[tuple[Sequence, int]]
    ) -> tuple[list[tuple[Sequence, int]], list[Work]]:
        """What each request has computed; one whose constraint fails ends here."""
        kept, works = [], []
        for sequence, count in shares:
            try:
                works.append(self._work(sequence, count))
            except Exception as error:
                log.exception("request %s", sequence.id)
                wrong = ServeError(f"request {sequence.id} failed: {error}")
                self._end(sequence, Finish.ERROR, error=wrong)
            else:
                kept.append((sequence, count))
        return kept, works

    def _work(self, sequence: Sequence, count: int) -> Work:
        start, prompt = sequence.computed, sequence.prompt
        end = start + count
        work = Work(
            place=sequence.place if sequence.place is not None else 0,
            start=start,
            count=count,
            tokens=None,
            table=self.blocks.table(sequence.id),
            adapter=NONE if sequence.adapter is None else self.adapters.slot(sequence.adapter),
            delta=prompt.delta,
        )
        if not (sequence.chosen and count == 1):
            work.tokens = sequence.ids[start:end]
        if prompt.positions is not None and start < sequence.prompt_tokens:
            work.positions = sequence.positions(start, end)
        if start < sequence.prompt_tokens:
            work.visuals = sequence.visuals(start, end)
        if sequence.head is not None:
            work.keep = sequence.kept(start, end)
        elif end == sequence.length:
            work.choice = self._choice(sequence)
            work.logprobs = sequence.request.sampling.logprobs
        return work

    def _choice(self, sequence: Sequence) -> Choice:
        params = sequence.request.sampling
        early = sequence.generated < params.min_tokens
        forbidden = tuple(self.lmm.stop_ids) if early else ()
        if params.constraint is None:
            return Choice(params, sequence.generator, forbidden)
        allowed = np.ones(self.lmm.vocabulary, dtype=np.bool_)
        params.constraint.mask(allowed)
        if not allowed.any():
            raise RequestError("its constraint allows no token")
        if np.delete(allowed, list(forbidden)).any():
            return Choice(params, sequence.generator, forbidden, allowed)
        return Choice(params, sequence.generator, (), allowed)  # it must end now

    def _head_input(self, sequence: Sequence) -> HeadInput:
        head = sequence.head
        assert head is not None
        hidden = torch.cat(sequence.hidden)
        sequence.hidden.clear()
        visual = torch.ones(len(hidden), dtype=torch.bool) if head.reads_visual else None
        sizes = [item.size for item in sequence.prompt.visuals] if head.reads_visual else ()
        places = None
        if head.reads_places:
            places = torch.cat([self.lmm.places(item) for item in sequence.prompt.visuals])
        return HeadInput(head, hidden, visual, sizes, sequence.request.min_score, places)

    # ------------------------------------------------------------------ what came out

    def _collect(self, flight: Flight) -> None:
        """Wait for a step and tell its requests."""
        tokens = flight.result.read()
        likely = flight.result.likely
        chosen = top_ids = top_values = None
        if likely is not None:
            chosen = likely.chosen.tolist()
            top_ids, top_values = likely.tokens.tolist(), likely.values.tolist()
        for row, (sequence, token) in enumerate(zip(flight.choosing, tokens, strict=True)):
            sequence.pending -= 1
            if sequence.finish is not None:
                continue  # it ended while this step ran
            logprobs = None
            wanted = sequence.request.sampling.logprobs
            if wanted is not None and chosen and top_ids and top_values:
                pairs = zip(top_ids[row][:wanted], top_values[row][:wanted], strict=True)
                logprobs = TokenLogprobs(
                    self._logprob(token, chosen[row]),
                    tuple(self._logprob(one, value) for one, value in pairs),
                )
            try:
                self._token(sequence, token, logprobs, flight.mode)
            except Exception as error:
                log.exception("request %s", sequence.id)
                wrong = ServeError(f"request {sequence.id} failed: {error}")
                self._end(sequence, Finish.ERROR, error=wrong)
        if flight.heads is not None:
            results = flight.heads.read()
            for sequence, result in zip(flight.answering, results, strict=True):
                if sequence.finish is not None:
                    continue
                sequence.first_token = time.monotonic()
                if isinstance(result, HeadResult):
                    self._end(sequence, Finish.HEAD, head=result, mode=flight.mode)
                else:
                    self._end(sequence, Finish.ERROR, error=result)

    def _logprob(self, token: int, value: float) -> Logprob:
        return Logprob(token, self._tokenizer.decode([token]), value)

    def _token(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, mode: Mode
    ) -> None:
        """A request's next token is there."""
        if sequence.first_token is None:
            sequence.first_token = time.monotonic()
        params = sequence.request.sampling
        sequence.ids.append(token)
        self._counts["generated_tokens"] += 1
        if params.constraint is not None:
            params.constraint.advance(token)
        count = len(sequence.ids) - sequence.prompt_tokens
        ends = token in self.lmm.stop_ids and not params.ignore_eos and count > params.min_tokens
        text = "" if ends else sequence.text.push(token)
        finish = None
        if ends or sequence.text.stopped:
            finish = Finish.STOP
        elif count >= sequence.max_new or len(sequence.ids) >= self.context_length:
            finish = Finish.LENGTH
        kept = () if logprobs is None else (logprobs,)
        if finish is not None:
            self._end(sequence, finish, text=text, tokens=(token,), logprobs=kept, mode=mode)
            return
        self._outputs.append(Output(sequence.id, text, (token,), logprobs=kept, mode=mode))

    def _end(
        self,
        sequence: Sequence,
        finish: Finish,
        *,
        text: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        head: HeadResult | None = None,
        error: ServeError | None = None,
        mode: Mode | None = None,
    ) -> None:
        """A request is over: free what it holds, and say so."""
        if finish in (Finish.STOP, Finish.LENGTH):
            text += sequence.text.flush()
        sequence.finish = finish
        self._waiting.pop(sequence.id, None)
        if self._running.pop(sequence.id, None) is not None:
            self._release(sequence)
        if sequence.adapter is not None:
            self._wanted[sequence.adapter] -= 1
            if not self._wanted[sequence.adapter]:
                del self._wanted[sequence.adapter]
                if sequence.adapter not in self._keys:
                    self._retire({sequence.adapter})
        self.policy.finished(sequence.id)
        self._finished[str(finish)] += 1
        image = sum(len(item.at) for item in sequence.prompt.visuals)
        completion = len(sequence.ids) - sequence.prompt_tokens
        self._outputs.append(
            Output(
                sequence.id,
                text,
                tokens,
                logprobs=logprobs,
                finish=finish,
                head=head,
                error=error,
                usage=Usage(sequence.prompt_tokens, completion, image, sequence.cached),
                times=Times(
                    sequence.arrival, sequence.started, sequence.first_token, time.monotonic()
                ),
                mode=mode,
            )
        )

    def _release(self, sequence: Sequence) -> None:
        """Give back a running request's pages, place and adapter; once is enough."""
        if sequence.place is None:
            return
        self._places.append(sequence.place)
        sequence.place = None
        self.blocks.close(sequence.id)
        if sequence.adapter is not None:
            self.adapters.unpin(sequence.adapter)
        sequence.features.clear()

    def _fail_adapter(self, key: str, error: ServeError) -> None:
        """An adapter could not come: its requests cannot be answered."""
        for sequence in [*self._waiting.values(), *self._running.values()]:
            if sequence.adapter == key:
                self._end(sequence, Finish.ERROR, error=error)

    def fail_all(self, reason: str) -> list[Output]:
        """End everything, as the device has failed."""
        self._flight = None
        for sequence in [*self._waiting.values(), *self._running.values()]:
            self._end(sequence, Finish.ERROR, error=StoppedError(reason))
        outputs, self._outputs = self._outputs, []
        return outputs

    # ------------------------------------------------------------------ how it is doing

    def stats(self) -> EngineStats:
        """How the engine is doing."""
        counts = self._counts
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            mode=self._mode,
            merged_adapter=self._merged and self._keys.get(self._merged, self._merged),
            switches=counts["switches"],
            steps=counts["steps"],
            pages_total=self.memory.pages - 1,
            pages_free=self.pool.free,
            pages_kv=self.pool.count(Owner.KV),
            pages_adapters=self.pool.count(Owner.ADAPTER),
            adapters_resident=tuple(
                sorted(self._keys.get(key, key) for key in self.adapters.resident)
            ),
            adapters_known=len(self.adapters),
            prefix_hits=counts["prefix_hits"],
            prefix_queries=counts["prefix_queries"],
            image_hits=self.images.hits,
            image_queries=self.images.queries,
            preemptions=counts["preemptions"],
            finished=dict(self._finished),
            prompt_tokens=counts["prompt_tokens"],
            generated_tokens=counts["generated_tokens"],
        )

    def close(self) -> None:
        """Stop reading files and close the trace."""
        self.adapters.close()
        if self._trace_file is not None:
            self._trace_file.close()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(0, device=name).device  # with the index of a GPU
