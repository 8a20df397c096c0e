"""Requests are checked against the limits of an engine, and become sequences."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Collection
from typing import Any

from valora_data.wording import plural
from valora_serve.catalogue.contexts import Context
from valora_serve.engine.adapter_registry import AdapterRegistry
from valora_serve.engine.requests import Requests
from valora_serve.engine.sequence import Prepared, SequenceState
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import RequestError, TooLongError, UnknownModelError
from valora_serve.model.detokenizer import Detokenizer
from valora_serve.model.heads import EMBEDDING, check_visual
from valora_serve.model.lmm import Lmm
from valora_serve.model.sampler import TokenCounts, bias_arrays, make_generator
from valora_serve.orchestrator.decision import RequestView
from valora_serve.types import Request, SamplingParams, ServedModel


class Preprocessing:
    """Makes sequences of requests; its `tokenizer` is for the engine's thread alone."""

    def __init__(
        self,
        settings: EngineSettings,
        lmm: Lmm,
        context_length: int,
        registry: AdapterRegistry,
        requests: Requests,
    ) -> None:
        self.tokenizer: Any = copy.deepcopy(lmm.tokenizer)
        self._settings, self._lmm, self._context_length = settings, lmm, context_length
        self._registry, self._pool = registry, requests.blocks.pool
        self._adapters, self._prefixes = requests.adapters, requests.prefixes
        self._longest_token = max(map(len, lmm.tokenizer.get_vocab()))  # in characters

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
            check_visual(head, visual, len(prompt.visuals))
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
        self._check_sampling(sampling, context)
        adapters = {self._registry.key(adapter): weight for adapter, weight in target.terms}
        for key in adapters:
            if key not in self._adapters:
                raise UnknownModelError(f"{key.rpartition('#')[0]} was unloaded: ask again")
            if key in self._adapters.quarantined:
                raise self._registry.quarantined(key)
        prefix = self._prefix_of(context)
        adapter_pages, prefix_pages = self._pages(adapters, prefix)
        size = self._settings.block_size
        own = prompt.given // size  # pages that the request shares with others of the context
        needed = -(-(len(ids) + max(max_new, 1)) // size) - own + adapter_pages + prefix_pages
        if needed > self._pool.pages - 1:
            raise TooLongError.told(
                self._context_length,
                f"prompt, answer, adapter and context need {plural(needed, 'page')}, the memory "
                f"has {self._pool.pages - 1}: ask for fewer tokens",
            )
        now = time.monotonic()
        waited = 0.0 if request.arrival is None else now - request.arrival
        left = None if request.deadline is None else request.deadline - waited
        vision = b"".join(adapter.vision_content.encode() for adapter, _ in target.terms)
        whole = self._lmm.block > 0
        spans = [span for item in prompt.visuals for span in item.spans(vision, whole=whole)]
        view = RequestView(
            id=request.id,
            adapter=" + ".join(k if w == 1 else f"{k}*{w!r}" for k, w in adapters.items()) or None,
            pair=len(adapters) > 1,
            rank=sum(adapter.rank for adapter, _ in target.terms),
            arrival=now,
            prompt_left=len(ids) - prompt.given,
            output_left=max_new,
            pages=-(-(len(ids) + 1) // size) - own,
            adapter_pages=adapter_pages,
            images=len(prompt.visuals),
            blocks=[(span.start, span.stop) for span in spans if span.whole],
            deadline=None if left is None else now + left,
            domain=request.model if target.model.kind == "domain" else None,
            latency_limit=left,
            client=self._client(request, target.model, next(iter(adapters), None)),
        )
        due = self._settings.policy_settings.due(view)
        if due is not None:
            view.latency_limit = due - now
        # What keys in the prefix and image caches begin with.
        salt = request.cache_salt
        tenant = b"" if salt is None else hashlib.sha256(b"tenant|" + salt.encode()).digest()
        memory = b"" if context is None or prefix is None else bytes.fromhex(context.content)
        return SequenceState(
            request, prompt, adapters, head, view, ids, len(ids),
            salt=target.salt,
            spans=spans if prompt.memory is None else [prompt.memory.span, *spans],
            vision=vision,
            own_from=len(ids) - 1 if target.model.decode_only else prompt.given,
            prefix=prefix,
            tenant=tenant,
            root=tenant + memory,
            text=Detokenizer(self.tokenizer, sampling.stop, sampling.min_tokens),
            generator=make_generator(sampling, self._lmm.device),
            max_new=max_new,
            counts=TokenCounts(prompt.words) if sampling.penalised else None,
            bias=bias_arrays(sampling),
            scores=None if head or sampling.prompt_logprobs is None else [],
        )  # fmt: skip

    def _check_sampling(self, sampling: SamplingParams, context: Context | None) -> None:
        if sampling.prompt_logprobs is not None and context is not None:
            raise RequestError(
                f"prompt_logprobs: the tokens of context {context.name} have none: ask for those "
                "of the answer (logprobs)"
            )
        last = self._lmm.vocabulary - 1
        if wrong := [token for token, _ in sampling.logit_bias if not 0 <= token <= last]:
            raise RequestError(f"logit_bias: expected tokens 0 to {last}, got {wrong[0]}")

    def _pages(self, keys: Collection[str], prefix: str | None) -> tuple[int, int]:
        """Return the pages that a request's adapters and prefix take from keys and values."""
        named = " and ".join(map(self._registry.name, keys))
        if len(keys) > self._settings.slots:
            raise RequestError(f"adapters {named} do not fit at a time: raise slots")
        pages, own = sum(map(self._adapters.pages, keys)), self._adapters.budget.pool
        prefix_pages = 0 if prefix is None else self._prefixes.pages(prefix)
        if own is self._pool:
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
        key = self._registry.prefix_key(context)
        if key not in self._prefixes:
            raise UnknownModelError(f"context {context.name} was deleted: make it again")
        return key

    def _client(self, request: Request, model: ServedModel, adapter: str | None) -> str | None:
        if self._settings.share_by != "adapter":
            return request.client if self._settings.share_by == "key" else None
        if model.kind == "adapter":  # names of the same content have accounts of their own
            return model.name
        return "base" if adapter is None else self._registry.name(adapter)
