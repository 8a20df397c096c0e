"""``/v1/completions`` and ``/v1/embeddings``: texts are completed, or embedded with images."""

import asyncio
import base64
import json
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve import types
from valora_serve.errors import RequestError, ServeError
from valora_serve.server.access.guard import Access, allow
from valora_serve.server.api import common, requests, schema
from valora_serve.server.api.domain_prompt import measured
from valora_serve.server.context import ServerContext
from valora_serve.server.telemetry.logs import new_id
from valora_serve.tokens import text_and_bytes
from valora_serve.types import Output, PromptLogprobs


def router(context: ServerContext) -> APIRouter:
    """Route of the completions endpoint."""
    routes = APIRouter(tags=["OpenAI"])
    # Texts only, of which JSON escapes take six bytes per character, or tokens.
    max_bytes = 2**20 + 6 * context.settings.max_prompt_chars

    @routes.post(
        "/v1/completions",
        response_model=schema.CompletionAnswer,
        responses=common.STREAMED,
        summary="Complete a text",
    )
    @allow(Access.KEYED, max_body_bytes=max_bytes)
    async def completions(request: Request, body: schema.CompletionRequest) -> Response:
        completion = await _begin(context, request, body)
        return await common.respond(completion, stream=body.stream)

    return routes


@dataclass(eq=False)
class _Completion(common.Answer):
    object = chunk = "text_completion"
    begun: dict[int, int] = field(default_factory=dict)
    """Where answers begin, behind what is echoed."""

    async def choices(self, number: int, output: Output) -> list[dict[str, Any]]:
        """What is new of a choice, which begins with the prompt if that is echoed."""
        start, scored = self.begun.get(number), self.body.max_tokens == 0
        part = _Part(start or 0)
        if self.body.echo and start is None:
            request = self.requests[number]
            text, tokenizer = request.text, self.arrival.context.service.engine.tokenizer
            part.text = tokenizer.decode(request.token_ids) if text is None else text
            if output.prompt is not None:
                await asyncio.to_thread(part.add_prompt, output.prompt, tokenizer)
            part.start = len(part.text)
        if not scored:
            part.add(output)
        self.begun[number] = part.start
        if output.finish is None and not part.text and not part.logprobs["tokens"]:
            return []
        reason = None if output.finish is None else common.finish_reason(output)
        return [{
            "index": number, "text": part.text,
            "logprobs": None if self.body.logprobs is None else part.logprobs,
            "finish_reason": "length" if reason and scored else reason,
        }]  # fmt: skip

    def used(self, lasts: Sequence[Output]) -> schema.UsageAnswer:
        """Token counts; a token that is left out does not count."""
        used = super().used(lasts)
        if self.body.max_tokens != 0:
            return used
        return used.model_copy(update={"completion_tokens": 0, "total_tokens": used.prompt_tokens})


async def _begin(
    context: ServerContext, http: Request, body: schema.CompletionRequest
) -> _Completion:
    arrival = requests.Arrival(context, http, body.valora.deadline)
    model, count = await arrival.find(body), body.n or 1
    if body.best_of not in (None, count):
        raise RequestError(f"best_of is {body.best_of}: only the value of n, {count}, is served")
    grammar = requests.grammar_of(body, context)
    # A domain's head was measured with another prompt; a classifier reads any text.
    head = model.kind == "adapter" and body.valora.head and model.head is not None
    if head:
        requests.check_head(model, as_json=grammar is not None, calls=False)
    limit = body.max_completion_tokens or body.max_tokens or context.settings.answer_tokens
    if body.max_tokens == 0:
        if not body.echo or body.max_completion_tokens:
            raise RequestError("max_tokens is 0: set echo, or ask for at least 1 token")
        limit = 1  # the engine computes it with the prompt; it is left out of the response
    prompts = _several(body.prompt, "prompt", context.settings.max_n, context)
    echo = [0] * len(prompts)
    if body.echo and body.logprobs is not None:
        echo = await asyncio.to_thread(_count_tokens, prompts, context)
    params = requests.sampling(body, context, max_tokens=limit, logprobs=body.logprobs, echoed=echo)
    if body.echo:
        params = replace(params, prompt_logprobs=body.logprobs)
    identity = f"cmpl-{new_id()}"
    given = {"head": head, "sampling": params, **arrival.named}
    each = [
        types.Request(f"{identity}-{number}", **given, **_as_prompt(prompt))
        for number, prompt in enumerate(prompts)
    ]
    several = [copy for one in each for copy in requests.numbered(one, count)]
    asked = await arrival.constrained(several, grammar)
    warnings = [
        f"{measured(model)}, which text completions lack: its accuracy does not hold, ask "
        "/v1/chat/completions instead"
    ] * (model.kind == "domain" and model.form is None)
    return _Completion(arrival, asked, body, identity, prompts=len(prompts), warnings=warnings)


class _Part:
    """A part of an answer: its text, and log probabilities in this endpoint's format."""

    def __init__(self, start: int = 0) -> None:
        self.text = ""
        self.start = start
        self.logprobs: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip

    def add(self, output: Output) -> None:
        self.text += output.text if output.head is None else output.head.text(())
        for item in output.logprobs:
            top = _by_text((top.text, top.logprob) for top in item.top)
            chosen, at = item.chosen, self.start + item.offset
            self._token(chosen.text, common.json_logprob(chosen.logprob), top, at)

    def add_prompt(self, prompt: PromptLogprobs, tokenizer: Any) -> None:
        """Add the tokens of a prompt; nothing precedes the first one, whose entries are None."""
        ids = np.unique(np.concatenate([prompt.ids, prompt.top_ids.ravel()])).tolist()
        texts = {token: text_and_bytes(tokenizer, token) for token in ids}
        told, others, values = (
            [None, *part.tolist()]
            for part in (prompt.logprobs, prompt.top_ids, prompt.top_logprobs)
        )
        decoder, at = getincrementaldecoder("utf-8")("replace"), 0
        for number, token in enumerate(prompt.ids.tolist()):
            text, raw = texts[token]
            if number:
                likely = zip((texts[one][0] for one in others[number]), values[number], strict=True)
                self._token(text, common.json_logprob(told[number]), _by_text(likely), at)
            else:
                self._token(text, None, None, at)
            # The text has neither a token of its beginning nor the space that words begin with.
            shown = text if raw is None else decoder.decode(raw)
            if not at and not self.text.startswith(shown):
                shown = shown.removeprefix(" ")
            if raw is not None or self.text.startswith(shown, at):
                at = min(at + len(shown), len(self.text))

    def _token(self, *facts: Any) -> None:
        for items, fact in zip(self.logprobs.values(), facts, strict=True):
            items.append(fact)


def _by_text(found: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Log probabilities by text; of tokens with the same text the first, likeliest one counts."""
    top: dict[str, float] = {}
    for text, logprob in found:
        top.setdefault(text, common.json_logprob(logprob))
    return top


def embeddings(context: ServerContext) -> APIRouter:
    """Route of the embeddings endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/embeddings",
        response_model=schema.EmbeddingAnswer,
        summary="Embed texts, or a conversation with images",
    )
    async def embed(request: Request, body: schema.EmbeddingRequest) -> Response:
        arrival = requests.Arrival(context, request, body.valora.deadline)
        await arrival.find(body)
        prompts = await arrival.within(_prompts(arrival, body))
        identity = f"embd-{new_id()}"
        asked = [
            types.Request(f"{identity}-{number}", embed=True, **arrival.named, **prompt)
            for number, prompt in enumerate(prompts)
        ]
        lasts = await arrival.ask_all(asked)
        # A thread, as many long vectors take seconds.
        return common.answer(await asyncio.to_thread(_encoded, lasts, arrival.model.name, body))

    return routes


async def _prompts(
    arrival: requests.Arrival, body: schema.EmbeddingRequest
) -> list[dict[str, Any]]:
    if (body.input is None) == (body.messages is None):
        raise RequestError("Send input, which are texts or tokens, or messages: one of them")
    if body.messages is None:
        limit = arrival.context.settings.max_waiting
        return list(map(_as_prompt, _several(body.input or [], "input", limit, arrival.context)))
    turns, images, videos = await requests.read_messages(body.messages, arrival)
    if turns is None:
        parts = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
        turns = [{"role": "user", "content": parts}]
    return [{"messages": turns, "images": images, "videos": videos}]


def _encoded(lasts: Sequence[Output], model: str, body: schema.EmbeddingRequest) -> bytes:
    data = []
    for number, last in enumerate(lasts):
        assert last.head is not None
        assert last.head.logits is not None
        hidden = last.head.logits[0].astype(np.float64)
        length, width = float(np.sqrt((hidden**2).sum())), len(hidden)
        if not np.isfinite(length):
            raise ServeError(f"The hidden state of {model} is not finite: check the adapter")
        if body.dimensions not in (None, width):
            raise RequestError(
                f"dimensions is {body.dimensions}, but embeddings of {model} have {width}, and "
                "shorter ones were not trained: leave it out"
            )
        vector = (hidden / max(length, 1e-12)).astype("<f4")
        shown: Any = vector.tolist()
        if body.encoding_format == "base64":
            shown = base64.b64encode(vector.tobytes()).decode()
        data.append(json.dumps({"object": "embedding", "index": number, "embedding": shown}))
    tokens = sum(last.usage.prompt for last in lasts if last.usage is not None)
    rest = {"model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return f'{{"object":"list","data":[{",".join(data)}],{json.dumps(rest)[1:]}'.encode()


def _several(given: str | list[Any], name: str, limit: int, context: ServerContext) -> list[Any]:
    """Texts, or lists of tokens, of a field that holds one or several of either."""
    several: list[Any] = [given] if isinstance(given, str) else given
    if several and isinstance(several[0], int):
        several = [several]
    if not several or not all(several):
        raise RequestError(f"{name} is empty, or holds an empty text: send a text, or tokens")
    if len(several) > limit:
        raise RequestError(f"{name} holds {len(several)} texts, more than {limit}: send fewer")
    requests.check_text(sum(map(len, several)), context)
    return several


def _count_tokens(prompts: Sequence[str | list[int]], context: ServerContext) -> list[int]:
    engine = context.service.engine
    count, most = engine.count_tokens, 8 * engine.context_length  # longer texts hardly fit
    return [count(one) if isinstance(one, str) and len(one) < most else len(one) for one in prompts]


def _as_prompt(item: str | list[int]) -> dict[str, Any]:
    """A text or its tokens as fields of a request to the engine."""
    return {"text": item} if isinstance(item, str) else {"token_ids": tuple(item)}
