"""Endpoint ``/v1/completions``, OpenAI's text completions."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve import types
from valora_serve.errors import RequestError
from valora_serve.server.api.common import answer, error_answers
from valora_serve.server.api.requests import check_text, constrained, sampling, schema_of, time_left
from valora_serve.server.api.responses import finish_reason, usage, valora_block
from valora_serve.server.api.schema import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from valora_serve.server.api.streams import EventStream
from valora_serve.server.envelope import until_disconnect
from valora_serve.server.service import merged
from valora_serve.server.telemetry.logs import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from valora_serve.server.context import ServerContext
    from valora_serve.types import Output, SamplingParams, ServedModel


def router(context: ServerContext) -> APIRouter:
    """Route of the completions endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/completions",
        response_model=CompletionAnswer,
        responses=error_answers(event_stream=True),
        summary="Complete a text",
    )
    async def completions(request: Request, body: CompletionRequest) -> Response:
        since = time.monotonic()
        service = context.service
        model = service.model(body.model)
        request.state.facts["model"] = model.name
        count = body.n or 1
        if body.best_of is not None and body.best_of != count:
            raise RequestError(
                f"best_of is {body.best_of}: only the value of n, {count}, is served"
            )
        as_json, schema = schema_of(body)
        limit = body.max_completion_tokens or body.max_tokens or context.settings.answer_tokens
        params = sampling(body, context, max_tokens=limit, logprobs=body.logprobs)
        deadline = time_left(context, model, body.valora.deadline, since)
        identity = f"cmpl-{new_id()}"
        prompts = _prompts(body.prompt, context)
        plain = [
            one
            for number, prompt in enumerate(prompts)
            for one in service.numbered(
                _request(f"{identity}-{number}", prompt, model, params, deadline), count
            )
        ]
        requests = await constrained(plain, context, as_json, schema)
        completion = _Completion(
            context, model, requests, len(prompts), identity, dict(request.headers), body
        )
        if body.stream:
            return EventStream(completion.events())
        return answer(await until_disconnect(request.receive, completion.whole()))

    return routes


def _prompts(prompt: str | list[Any], context: ServerContext) -> list[str | list[int]]:
    """List of the prompts, each a text or a list of tokens.

    Raises:
        RequestError: There is no prompt, there are too many, or one is empty or too long.
    """
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


def _request(
    identity: str,
    prompt: str | list[int],
    model: ServedModel,
    params: SamplingParams,
    deadline: float | None,
) -> types.Request:
    as_text = isinstance(prompt, str)
    return types.Request(
        id=identity,
        model=model.name,
        text=prompt if isinstance(prompt, str) else None,
        token_ids=None if as_text else tuple(int(token) for token in prompt),
        head=False,
        sampling=params,
        deadline=deadline,
    )


class _Completion:
    """Response to one request, complete or streamed."""

    def __init__(
        self,
        context: ServerContext,
        model: ServedModel,
        requests: Sequence[types.Request],
        prompts: int,
        identity: str,
        headers: dict[str, str],
        body: CompletionRequest,
    ) -> None:
        self._service = context.service
        self._model = model
        self._requests = requests
        self._prompts = prompts
        self._headers = headers
        self._logprobs = body.logprobs is not None
        self._usage = body.stream_options is not None and body.stream_options.include_usage
        self._id = identity
        self._created = int(time.time())

    def _admitted(self) -> Any:
        return self._service.admitted(self._model, self._requests[0].deadline, len(self._requests))

    async def whole(self) -> CompletionAnswer:
        with self._admitted() as ticket:
            answers = await self._service.ask_all(ticket, self._requests, self._headers)
        choices = []
        for number, outputs in enumerate(answers):
            finish = outputs[-1].finish
            assert finish is not None
            logprobs = None
            if self._logprobs:
                logprobs = CompletionLogprobs(**_logprobs(outputs, 0))
            choices.append(
                CompletionChoice(
                    index=number,
                    text="".join(output.text for output in outputs),
                    logprobs=logprobs,
                    finish_reason=finish_reason(finish),
                )
            )
        lasts = [outputs[-1] for outputs in answers]
        return CompletionAnswer(
            id=self._id,
            created=self._created,
            model=self._model.name,
            choices=choices,
            usage=usage(lasts, self._prompts),
            valora=valora_block(self._model, lasts[0], ()),
        )

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        with self._admitted() as ticket:
            streams = [self._service.ask(ticket, one, self._headers) for one in self._requests]
            lasts: dict[int, Output] = {}
            offsets = [0] * len(streams)
            async with contextlib.aclosing(merged(streams)) as outputs:
                async for number, output in outputs:
                    choice: dict[str, Any] = {
                        "index": number, "text": output.text, "logprobs": None,
                        "finish_reason": None,
                    }  # fmt: skip
                    if self._logprobs:
                        choice["logprobs"] = _logprobs([output], offsets[number])
                    offsets[number] += sum(len(item.chosen.text) for item in output.logprobs)
                    if output.finish is not None:
                        lasts[number] = output
                        choice["finish_reason"] = finish_reason(output.finish)
                    elif not output.text and not output.logprobs:
                        continue
                    yield self._event([choice])
            if self._usage:
                used = usage((lasts[number] for number in sorted(lasts)), self._prompts)
                yield self._event([]) | {"usage": used.model_dump()}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }


def _logprobs(outputs: Iterable[Output], offset: int) -> dict[str, Any]:
    """Log probabilities in this endpoint's format; `offset` is the first token's, in characters."""
    found: dict[str, Any] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
    }  # fmt: skip
    for output in outputs:
        for item in output.logprobs:
            found["tokens"].append(item.chosen.text)
            found["token_logprobs"].append(max(item.chosen.logprob, -9999.0))
            found["top_logprobs"].append({top.text: max(top.logprob, -9999.0) for top in item.top})
            found["text_offset"].append(offset)
            offset += len(item.chosen.text)
    return found
