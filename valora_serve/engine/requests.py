"""Requests from their arrival to their end: their checks, their queue, and the memory they hold."""

import copy
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, Final

from valora_data.wording import plural
from valora_serve.catalogue.contexts import Context
from valora_serve.engine.adapter_registry import AdapterRegistry
from valora_serve.engine.sequence import Prepared, SequenceState
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import RequestError, ServeError, TooLongError, UnknownModelError
from valora_serve.memory.block_manager import BlockManager, BlockTable
from valora_serve.memory.residency import Residency
from valora_serve.model.detokenizer import Detokenizer
from valora_serve.model.heads import EMBEDDING
from valora_serve.model.lmm import Lmm
from valora_serve.model.prompt import Prompt
from valora_serve.model.sampler import TokenCounts, bias_arrays, make_generator
from valora_serve.types import Request, SamplingParams

LOOK_AHEAD: Final = 256  # waiting requests whose prefixes are loaded before it is their turn
PREFETCHES: Final = 32  # most prefixes that are loaded at a time


class Requests:
    """All unfinished requests, and the memory that they hold.

    A running request holds a slot in the batch, KV pages, and pins on its adapter and on the
    prefix of its context. It gets them together (`admit`) and gives them back together (`release`).
    """

    def __init__(
        self, settings: EngineSettings, lmm: Lmm, context_length: int, registry: AdapterRegistry,
        blocks: BlockManager,
    ) -> None:  # fmt: skip
        self.settings, self.registry, self.blocks = settings, registry, blocks
        self.adapters, self.prefixes = registry.adapters, registry.prefixes
        self._lmm, self._context_length = lmm, context_length
        self.tokenizer: Any = copy.deepcopy(lmm.tokenizer)  # for the engine's thread alone
        self._longest_token = max(map(len, lmm.tokenizer.get_vocab()))  # in characters
        # By id: the queue (preempted ones first), those with memory, and riders on others' passes.
        self.waiting: OrderedDict[str, SequenceState] = OrderedDict()
        self.running: dict[str, SequenceState] = {}
        self.riding: dict[str, SequenceState] = {}
        # Requests by what policies know their adapters by, where that is no key, and by id.
        self.mixes: dict[str, dict[str, SequenceState]] = {}
        self.free_slots = deque(range(settings.max_requests))  # in the batch
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self._deadlines: dict[SequenceState, float] = {}
        self._starved = False  # a request waits too long for room for its prefix

    def check_characters(self, request: Request, what: str = "prompt") -> None:
        """Refuse a text that cannot fit, before it takes seconds to be tokenized; in any thread."""
        texts = [request.text or ""]
        for message in request.messages or ():
            content = message["content"]
            parts = [{"text": content}] if isinstance(content, str) else content
            texts += [part.get("text") or "" for part in parts]
        limit, chars = self._context_length * self._longest_token, sum(map(len, texts))
        if chars > limit:
            raise TooLongError.told(
                self._context_length,
                f"the {what} has {chars} characters, more than the {limit} that fit: shorten it",
            )

    def sequence(self, prepared: Prepared) -> SequenceState:
        """Make the sequence of a request that arrives now; a `RequestError` says why not."""
        request, target, prompt = prepared.request, prepared.target, prepared.prompt
        sampling, context = request.sampling, target.context
        head = target.head if request.head else None
        if request.embed:
            head = prepared.head or EMBEDDING
        ids = list(prompt.ids)
        if head is not None:
            visual = sum(len(item.read) for item in prompt.visuals)
            if (misfit := head.misfit(visual, len(prompt.visuals))) is not None:
                raise RequestError(misfit)
            if head.reads_visual:  # tokens after the last one that it reads change nothing
                ids = ids[: max(int(item.read.max()) for item in prompt.visuals) + 1]
        # Behind a prefix, positions may go on later than at its last token.
        last = len(ids) + max(prompt.delta if prompt.given else 0, 0)
        room = self._context_length - last
        if room < (head is None):
            raise TooLongError.told(
                self._context_length,
                f"your messages resulted in {last} tokens: shorten them, or send fewer or smaller "
                "images",
            )
        if sampling.max_tokens is not None and sampling.max_tokens < 1 and head is None:
            raise RequestError(f"max_tokens: expected at least 1, got {sampling.max_tokens}")
        max_new = 0 if head is not None else min(sampling.max_tokens or room, room)
        self._check_tokens(prompt, sampling, context)
        adapters = {self.registry.key(adapter): weight for adapter, weight in target.terms}
        for key in adapters:
            if key not in self.adapters:
                raise UnknownModelError(f"{key.rpartition('#')[0]} was unloaded: ask again")
            if key in self.adapters.quarantined:
                raise self.registry.quarantined(key)
        prefix = self._prefix_of(context)
        uses: list[tuple[Residency[Any], str]] = [(self.adapters, key) for key in adapters]
        uses += [] if prefix is None else [(self.prefixes, prefix)]
        adapter_pages, prefix_pages = self._pages(adapters, prefix)
        needed = self.own_pages(prompt, len(ids) + max(max_new, 1)) + adapter_pages + prefix_pages
        if needed > self.blocks.pool.pages - 1:
            raise TooLongError.told(
                self._context_length,
                f"prompt, answer, adapter and context need {plural(needed, 'page')}, the memory "
                f"has {self.blocks.pool.pages - 1}: ask for fewer tokens",
            )
        now = time.monotonic()
        waited = 0.0 if request.arrival is None else now - request.arrival
        left = None if request.deadline is None else request.deadline - waited
        vision = b"".join(adapter.vision_content.encode() for adapter, _ in target.terms)
        whole = self._lmm.block > 0
        spans = [span for item in prompt.visuals for span in item.spans(vision, whole=whole)]
        blocks = [(span.start, span.stop) for span in spans if span.whole]
        if prompt.memory is not None:
            spans.insert(0, prompt.memory.span)
        # What keys in the prefix and image caches begin with.
        salt = request.cache_salt
        tenant = b"" if salt is None else hashlib.sha256(b"tenant|" + salt.encode()).digest()
        memory = b"" if context is None or prefix is None else bytes.fromhex(context.content)
        since = len(ids) - 1 if target.model.decode_only else prompt.given
        sequence = SequenceState(
            id=request.id,
            adapter=" + ".join(k if w == 1 else f"{k}*{w!r}" for k, w in adapters.items()) or None,
            pair=len(adapters) > 1,
            rank=sum(adapter.rank for adapter, _ in target.terms),
            arrival=now,
            prompt_left=len(ids) - prompt.given,
            output_left=max_new,
            pages=self.own_pages(prompt, len(ids) + 1),
            adapter_pages=adapter_pages,
            images=len(prompt.visuals),
            blocks=blocks,
            deadline=None if left is None else now + left,
            domain=request.model if target.model.kind == "domain" else None,
            latency_limit=left,
            client=target.model.client(self.settings.share_by, request.client),
            request=request,
            prompt=prompt,
            adapters=adapters,
            prefix=prefix,
            uses=uses,
            head=head,
            ids=ids,
            table=BlockTable(ids, target.salt, spans, since, root=tenant + memory),
            prompt_tokens=len(ids),
            vision=vision,
            tenant=tenant,
            text=Detokenizer(self.tokenizer, sampling.stop, sampling.min_tokens),
            generator=make_generator(sampling, self._lmm.device),
            max_new=max_new,
            counts=TokenCounts(prompt.words) if sampling.penalised else None,
            bias=bias_arrays(sampling),
            scores=None if head or sampling.prompt_logprobs is None else [],
        )
        due = self.settings.policy_settings.due(sequence)
        if due is not None:
            sequence.latency_limit = due - now
        return sequence

    def _check_tokens(
        self, prompt: Prompt, sampling: SamplingParams, context: Context | None
    ) -> None:
        if sampling.prompt_logprobs is not None and context is not None:
            raise RequestError(
                f"prompt_logprobs: the tokens of context {context.name} have none: ask for those "
                "of the answer (logprobs)"
            )
        last = self._lmm.vocabulary - 1  # tokenizers may have more, without an embedding
        biased = [token for token, _ in sampling.logit_bias]
        for what, tokens in (("prompt", prompt.ids), ("logit_bias", biased)):
            for token in (min(tokens, default=0), max(tokens, default=0)):
                if not 0 <= token <= last:
                    word = self.tokenizer.added_tokens_decoder.get(token, "")
                    text = f"{what}: expected tokens 0 to {last}, got {token} {word}".rstrip()
                    raise RequestError(f"{text}: leave it out")

    def _pages(self, keys: Collection[str], prefix: str | None) -> tuple[int, int]:
        """Return the pages that a request's adapters and prefix take from keys and values."""
        named = " and ".join(map(self.registry.name, keys))
        if len(keys) > self.settings.slots:
            raise RequestError(f"adapters {named} do not fit at a time: raise slots")
        pages, own = sum(self.adapters[key].page_count for key in keys), self.adapters.budget.pool
        prefix_pages = 0 if prefix is None else self.prefixes[prefix].page_count
        if own is self.blocks.pool:
            return pages, prefix_pages
        if pages + prefix_pages > own.pages:
            raise RequestError(
                f"adapter {named or 'none'} and context need {plural(pages + prefix_pages, 'page')}"
                f", {own.pages} are kept for these: raise adapter_share"
            )
        return 0, 0

    def _prefix_of(self, context: Context | None) -> str | None:
        if context is None or not context.has_prefix:
            return None
        key = self.registry.prefix_key(context)
        if key not in self.prefixes:
            raise UnknownModelError(f"context {context.name} was deleted: make it again")
        return key

    def queue(self) -> list[SequenceState]:
        """Return the waiting requests that policies see, oldest first.

        Those that wait for a prefix or carrier are left out; all are if one lacks room for long.
        """
        if self._starved:
            return []
        views = [
            sequence
            for sequence in self.waiting.values()
            if not sequence.early
            and (sequence.prefix is None or self._sees(sequence, sequence.prefix))
        ]
        # Preempted requests stand before others that may be older.
        return sorted(views, key=attrgetter("arrival"))

    def _sees(self, sequence: SequenceState, key: str) -> bool:
        """Update the pages that a request with a prefix needs; False if that is not there."""
        if key not in self.prefixes.resident:
            return False
        pages = self.own_pages(sequence.prompt, len(sequence.ids) + 1)
        if self.prefixes.budget.pool is self.blocks.pool and not self.prefixes[key].users:
            pages += self.prefixes[key].page_count  # admitting it takes them from those that count
        sequence.pages = pages
        return True

    def own_pages(self, prompt: Prompt, tokens: int) -> int:
        """Return how many pages a request has beside its context's with this many tokens."""
        size = self.blocks.block_size
        return -(-tokens // size) - prompt.given // size

    def load_prefixes(self, starved: float) -> dict[str, ServeError]:
        """Start loading prefixes, none before that of a starved request; return errors by key."""
        prefixes = self.prefixes
        failed = prefixes.poll()
        self._starved = False
        if not prefixes.wanted:
            return failed
        oldest = sorted(self.waiting.values(), key=lambda sequence: sequence.arrival)
        for number, sequence in enumerate(oldest[:LOOK_AHEAD]):
            key = sequence.prefix
            if len(prefixes.loading) >= PREFETCHES:
                break
            if key is None or key in failed:
                continue
            if key in prefixes.resident or key in prefixes.loading:
                continue
            try:
                # Only for the oldest may one be evicted that others wait for.
                if not prefixes.load(key, urgent=number == 0):
                    self._starved |= number == 0 and sequence.arrival < starved
            except ServeError as error:
                failed[key] = error
        return failed

    def find(self, request_id: str) -> SequenceState | None:
        """Return an unfinished request, None if there is none of this id."""
        held = self.waiting.get(request_id) or self.running.get(request_id)
        return held or self.riding.get(request_id)

    def all(self) -> list[SequenceState]:
        """Return all unfinished requests."""
        return [*self.waiting.values(), *self.running.values(), *self.riding.values()]

    def add(self, sequence: SequenceState, others: Sequence[SequenceState] = ()) -> None:
        """Put a new request in the queue, or on the pass of another one about the same images."""
        sequence.follow([one for one in others if one.carrier is None and one.finish is None])
        held = self.waiting if sequence.carrier is None else self.riding
        held[sequence.id] = sequence
        for residency, key in sequence.uses:
            residency.wanted[key] += 1
        label = sequence.adapter
        if label is not None and label not in sequence.adapters:
            self.mixes.setdefault(label, {})[sequence.id] = sequence
        if sequence.deadline is not None:
            self._deadlines[sequence] = sequence.deadline

    def overdue(self, now: float) -> list[SequenceState]:
        """Return the unfinished requests whose deadline has passed by now."""
        return [sequence for sequence, deadline in self._deadlines.items() if deadline <= now]

    def admit(self, sequence: SequenceState) -> bool:
        """Give a waiting request its slot, pages, adapter and prefix; False if one is missing."""
        if sequence.slot is not None:
            return True
        prefix, given, blocks = sequence.prefix, sequence.prompt.given, self.blocks
        if not (self.free_slots and all(key in one.resident for one, key in sequence.uses)):
            return False
        self._pin(sequence)
        head = sequence.head
        limit = None
        if head is not None and head.reads_visual:
            # The head needs the hidden states of all visual tokens: compute them.
            limit = int(min(item.at[0] for item in sequence.prompt.visuals))
        elif head is not None:
            limit = max(0, sequence.prompt_tokens - head.last_tokens)
        if sequence.scores is not None:
            limit = 0  # the log probabilities of all tokens are computed
        full, rest = divmod(given, blocks.block_size)
        table = sequence.table
        table.shared = () if prefix is None else self.prefixes[prefix].pages[:full]
        cached = blocks.open(table, limit)
        if not blocks.reserve(table, len(sequence.ids) + (head is None)):
            blocks.close(table)
            self._pin(sequence, release=True)
            return False
        if prefix is not None and rest and cached < given:
            self.prefixes.memory.copy_page(self.prefixes[prefix].pages[-1], table.blocks[full])
        cached = max(cached, given)
        del self.waiting[sequence.id]
        self.running[sequence.id] = sequence
        sequence.slot = self.free_slots.popleft()
        sequence.kv_tokens, sequence.chosen = cached, False
        if not sequence.preemptions:
            sequence.cached = min(cached, sequence.prompt_tokens)
            self.prefix_queries += sequence.prompt_tokens - given
            self.prefix_hits += sequence.cached - given
        sequence.running, sequence.pages = True, 0
        sequence.prompt_left = len(sequence.ids) - cached
        return True

    def _pin(self, sequence: SequenceState, *, release: bool = False) -> None:
        for residency, key in sequence.uses:
            (residency.unpin if release else residency.pin)(key)

    def release(self, sequence: SequenceState) -> None:
        """Give back a request's place, pages and pins, if it has them."""
        if sequence.slot is None:
            return
        self.free_slots.append(sequence.slot)
        sequence.slot = None
        self.blocks.close(sequence.table)
        self._pin(sequence, release=True)
        sequence.features.clear()
        sequence.memory = None

    def preempt(self, sequence: SequenceState) -> None:
        """Put a running request, whose tokens the host knows, back at the front of the queue."""
        self.release(sequence)
        del self.running[sequence.id]
        sequence.preemptions += 1
        self.preemptions += 1
        sequence.hidden.clear()
        if sequence.scores is not None:
            sequence.scores.clear()
        sequence.running, sequence.kv_tokens, sequence.held = False, 0, 0
        sequence.prompt_left = len(sequence.ids) - sequence.prompt.given
        sequence.images = len(sequence.prompt.visuals)
        sequence.pages = self.own_pages(sequence.prompt, len(sequence.ids) + 1)
        self.waiting[sequence.id] = sequence
        self.waiting.move_to_end(sequence.id, last=False)

    def remove(self, sequence: SequenceState) -> None:
        """Take a finished request out and release what it holds; one that it carries goes on."""
        self.waiting.pop(sequence.id, None)
        self.riding.pop(sequence.id, None)
        self._deadlines.pop(sequence, None)
        if sequence.carrier is not None:
            sequence.carrier.riders.remove(sequence)
        if sequence.riders:
            first, *others = sequence.riders
            sequence.riders, first.carrier = [], None
            for one in others:
                one.follow([first])
            self.waiting[first.id] = self.riding.pop(first.id)
        if self.running.pop(sequence.id, None) is not None:
            self.release(sequence)
        label = sequence.adapter
        if label in self.mixes:
            self.mixes[label].pop(sequence.id, None)
            if not self.mixes[label]:
                del self.mixes[label]
        for residency, key in sequence.uses:
            residency.unwant(key)
