"""Endpoint ``/v1/completions``, OpenAI's text completions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from codecs import getincrementaldecoder
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve import types
from valora_serve.errors import RequestError
from valora_serve.server.access.rules import Access, allow
from valora_serve.server.api.common import answer, error_answers
from valora_serve.server.api.domain_prompt import answers_with_head, completion_warnings
from valora_serve.server.api.requests import (
    Arrival,
    check_head,
    check_text,
    grammar_of,
    sampling,
)
from valora_serve.server.api.responses import (
    filled,
    finish_reason,
    items_json,
    json_logprob,
    usage,
    valora_block,
)
from valora_serve.server.api.schema import (
    CompletionAnswer,
    CompletionChoice,
    CompletionRequest,
)
from valora_serve.server.api.streams import EventJson, EventStream, event_json
from valora_serve.server.gather import until_disconnect
from valora_serve.server.telemetry.logs import new_id
from valora_serve.tokens import text_and_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from valora_serve.server.api.schema import UsageAnswer, ValoraAnswer
    from valora_serve.server.context import ServerContext
    from valora_serve.types import Output, PromptLogprobs

AT_ONCE = 200
"""Most tokens of a prompt that are turned into text before other requests have their turn."""
_PLACE = '"logprobs":null'  # of an answer without them


def router(context: ServerContext) -> APIRouter:
    """Route of the completions endpoint."""
    routes = APIRouter(tags=["OpenAI"])
    # Texts only, of which JSON escapes take six bytes per character, or tokens.
    most_bytes = 2**20 + 6 * context.settings.max_prompt_chars

    @routes.post(
        "/v1/completions",
        response_model=CompletionAnswer,
        responses=error_answers(event_stream=True),
        summary="Complete a text",
    )
    @allow(Access.KEYED, max_body_bytes=most_bytes)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        arrival = Arrival(context, request, body.valora.deadline)
        model = await arrival.find(body)
        count = body.n or 1
        if body.best_of is not None and body.best_of != count:
            raise RequestError(
                f"best_of is {body.best_of}: only the value of n, {count}, is served"
            )
        grammar = grammar_of(body, context)
        # A domain's head was measured with another prompt; a classifier reads any text.
        if head := model.kind == "adapter" and answers_with_head(model, body.valora.head):
            check_head(model, as_json=grammar is not None, calls=False)
        limit = body.max_completion_tokens or body.max_tokens or context.settings.answer_tokens
        if body.max_tokens == 0:
            if not body.echo or body.max_completion_tokens:
                raise RequestError("max_tokens is 0: set echo, or ask for at least 1 token")
            limit = 1  # the engine computes it with the prompt; it is left out of the response
        params = sampling(body, context, max_tokens=limit, logprobs=body.logprobs)
        if body.echo:
            params = dataclasses.replace(params, prompt_logprobs=body.logprobs)
        identity = f"cmpl-{new_id()}"
        prompts = _prompts(body.prompt, context)
        common = types.Request(
            id="", **arrival.named, head=head, sampling=params, cache_salt=body.cache_salt
        )
        plain = [
            one
            for number, prompt in enumerate(prompts)
            for one in context.service.numbered(
                dataclasses.replace(
                    common, id=f"{identity}-{number}",
                    text=prompt if isinstance(prompt, str) else None,
                    token_ids=None if isinstance(prompt, str) else tuple(prompt),
                ),
                count,
            )
        ]  # fmt: skip
        made = await arrival.constrained(plain, grammar)
        left = arrival.time_left()
        requests = [dataclasses.replace(one, deadline=left) for one in made]
        completion = _Completion(arrival, requests, len(prompts), identity, body)
        if body.stream:
            return EventStream(completion.events())
        return answer(await until_disconnect(request.receive, completion.json()))

    return routes


def _prompts(prompt: str | list[Any], context: ServerContext) -> list[str | list[int]]:
    """List of the prompts, each a text or a list of tokens."""
    several: list[Any] = [prompt] if isinstance(prompt, str) else prompt
    if several and isinstance(several[0], int):
        several = [several]
    if not several or not all(several):
        raise RequestError("prompt is empty: send a text, or tokens")
    if len(several) > context.settings.max_n:
        raise RequestError(
            f"prompt holds {len(several)} prompts, more than {context.settings.max_n}: send fewer"
        )
    check_text(sum(len(item) for item in several), context)
    return several


@dataclass(eq=False)
class _Completion:
    """Response to one request, complete or streamed; there are as many requests to each prompt."""

    arrival: Arrival
    requests: Sequence[types.Request]
    prompts: int
    id: str
    body: CompletionRequest
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def _scored_only(self) -> bool:
        return self.body.max_tokens == 0

    async def json(self) -> bytes:
        """Wait for the whole answer, as JSON."""
        parts: dict[int, _Part] = {}
        lasts: dict[int, Output] = {}
        async with contextlib.aclosing(
            self.arrival.outputs(self.requests, stream=False)
        ) as outputs:
            async for number, output in outputs:
                if number not in parts:
                    echo = self.body.echo
                    parts[number] = await self._prompt(number, output) if echo else _Part()
                if not self._scored_only:
                    parts[number].add(output)
                if output.finish is not None:
                    lasts[number] = output
        order = sorted(lasts)
        body = CompletionAnswer(
            id=self.id,
            created=self.created,
            model=self.arrival.model.name,
            choices=[
                CompletionChoice(
                    index=n, text=parts[n].text, finish_reason=self._finish_reason(lasts[n])
                )
                for n in order
            ],
            usage=self._used([lasts[n] for n in order]),
            valora=self._block(lasts[0]),
        ).model_dump_json()
        if self.body.logprobs is None:
            return body.encode()

        def made() -> bytes:
            return filled(body, _PLACE, [parts[n].logprobs_json() for n in order]).encode()

        return await asyncio.to_thread(made)

    def _finish_reason(self, last: Output) -> str:
        return "length" if self._scored_only else finish_reason(last)

    def _block(self, last: Output) -> ValoraAnswer:
        return valora_block(self.arrival.model, last, (), completion_warnings(self.arrival.model))

    async def events(self) -> AsyncGenerator[dict[str, Any] | EventJson, None]:
        """The answer as chunks of OpenAI's API."""
        logprobs = self.body.logprobs is not None
        lasts: dict[int, Output] = {}
        begun: dict[int, int] = {}  # where the answers begin, behind what is echoed
        async with contextlib.aclosing(self.arrival.outputs(self.requests, stream=True)) as outputs:
            async for number, output in outputs:
                if number in begun or not self.body.echo:
                    part = _Part(begun.get(number, 0))
                else:
                    part = await self._prompt(number, output)
                    begun[number] = part.start
                if not self._scored_only:
                    part.add(output)
                if output.finish is None and not part.text and not part.logprobs["tokens"]:
                    continue
                choice: dict[str, Any] = {
                    "index": number, "text": part.text, "finish_reason": None,
                    "logprobs": part.logprobs if logprobs else None,
                }  # fmt: skip
                event = self._event([choice])
                if output.finish is not None:
                    lasts[number] = output
                    choice["finish_reason"] = self._finish_reason(output)
                    event["valora"] = self._block(output).model_dump(exclude_none=True)
                if logprobs and len(part.logprobs["tokens"]) > AT_ONCE:
                    choice["logprobs"] = None
                    yield await asyncio.to_thread(_filled, event, part)
                else:
                    yield event
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            used = self._used([lasts[number] for number in sorted(lasts)])
            yield self._event([]) | {"usage": used.model_dump()}

    async def _prompt(self, number: int, output: Output) -> _Part:
        """Return the echo of a prompt."""
        request, part = self.requests[number], _Part()
        tokenizer = self.arrival.context.service.engine.tokenizer
        part.text = (
            request.text if request.text is not None else tokenizer.decode(request.token_ids)
        )
        if output.prompt is not None:
            await part.add_prompt(output.prompt, tokenizer)
        part.start = len(part.text)
        return part

    def _used(self, lasts: Sequence[Output]) -> UsageAnswer:
        """Token counts of the response; a token that is left out does not count."""
        used = usage(lasts, self.prompts)
        if not self._scored_only:
            return used
        return used.model_copy(update={"completion_tokens": 0, "total_tokens": used.prompt_tokens})

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": "text_completion", "created": self.created,
            "model": self.arrival.model.name, "choices": choices,
        }  # fmt: skip


def _filled(event: dict[str, Any], part: _Part) -> EventJson:
    """An event with many log probabilities."""
    made = event_json(event)
    return made._replace(text=filled(made.text, _PLACE, [part.logprobs_json()]))


class _Part:
    """A part of an answer: its text, and log probabilities in this endpoint's format.

    Attributes:
        text: The text.
        logprobs: Its tokens' texts, log probabilities, alternatives and offsets. A token in the
            middle of a character has that character's offset.
        start: Offset of the answer in the whole text, in characters.
    """

    def __init__(self, start: int = 0) -> None:
        self.text = ""
        self.start = start
        self.logprobs: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip

    def logprobs_json(self) -> str:
        """The log probabilities as JSON, with their name in an answer."""
        fields = []
        for name, items in self.logprobs.items():
            pieces = (items[at : at + AT_ONCE] for at in range(0, len(items), AT_ONCE))
            fields.append(f'"{name}":[{",".join(items_json(piece) for piece in pieces)}]')
        return f'"logprobs":{{{",".join(fields)}}}'

    def add(self, output: Output) -> None:
        """Add what an output of the engine brings."""
        self.text += output.text if output.head is None else output.head.text(())
        for item in output.logprobs:
            top = _by_text((top.text, top.logprob) for top in item.top)
            chosen, at = item.chosen, self.start + item.offset
            self._token(chosen.text, at, json_logprob(chosen.logprob), top)

    async def add_prompt(self, prompt: PromptLogprobs, tokenizer: Any) -> None:
        """Add the tokens of a prompt; nothing precedes the first one, whose entries are None."""
        ids = np.unique(np.concatenate([prompt.ids, prompt.top_ids.ravel()])).tolist()
        texts: dict[int, tuple[str, bytes | None]] = {}
        for start in range(0, len(ids), AT_ONCE):
            some = ids[start : start + AT_ONCE]
            texts |= {token: text_and_bytes(tokenizer, token) for token in some}
            await asyncio.sleep(0)
        told, others, values = (
            [None, *part.tolist()]
            for part in (prompt.logprobs, prompt.top_ids, prompt.top_logprobs)
        )
        decoder, at = getincrementaldecoder("utf-8")("replace"), 0
        for number, token in enumerate(prompt.ids.tolist()):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            text, raw = texts[token]
            if number:
                likely = zip((texts[one][0] for one in others[number]), values[number], strict=True)
                self._token(text, at, json_logprob(told[number]), _by_text(likely))
            else:
                self._token(text, at, None, None)
            # The text has neither a token of its beginning nor the space that words begin with.
            shown = text if raw is None else decoder.decode(raw)
            if not at and not self.text.startswith(shown):
                shown = shown.removeprefix(" ")
            if raw is not None or self.text.startswith(shown, at):
                at = min(at + len(shown), len(self.text))

    def _token(
        self, text: str, at: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        self.logprobs["tokens"].append(text)
        self.logprobs["token_logprobs"].append(logprob)
        self.logprobs["top_logprobs"].append(top)
        self.logprobs["text_offset"].append(at)


def _by_text(found: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Log probabilities by text; of tokens with the same text the first, likeliest one counts."""
    top: dict[str, float] = {}
    for text, logprob in found:
        top.setdefault(text, json_logprob(logprob))
    return top
