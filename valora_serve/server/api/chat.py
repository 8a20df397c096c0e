"""``/v1/chat/completions``."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve import types
from valora_serve.errors import RequestError
from valora_serve.server.api.common import answer, error_answers
from valora_serve.server.api.requests import (
    constrained,
    head_wanted,
    read_messages,
    sampling,
    schema_of,
    time_left,
)
from valora_serve.server.api.responses import (
    chat_logprobs,
    finish_reason,
    usage,
    valora_block,
)
from valora_serve.server.api.schema import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
)
from valora_serve.server.api.streams import EventStream
from valora_serve.server.envelope import until_disconnect
from valora_serve.server.service import merged
from valora_serve.server.telemetry.logs import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from valora_serve.server.context import ServerContext
    from valora_serve.types import Output, ServedModel


def router(context: ServerContext) -> APIRouter:
    """Route of the chat endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatAnswer,
        responses=error_answers(event_stream=True),
        summary="Answer a conversation with text, or with a domain's head",
    )
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        since = time.monotonic()
        service = context.service
        model = service.model(body.model)
        request.state.facts["model"] = model.name
        as_json, schema = schema_of(body)
        head = head_wanted(body, model, as_json)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs goes with logprobs: set logprobs, or leave it out")
        limit = body.max_completion_tokens or body.max_tokens or context.settings.answer_tokens
        params = sampling(
            body, context, max_tokens=limit,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )  # fmt: skip
        pixels = request.state.stack.enter_context(context.media.pixels())
        turns, images, videos = await read_messages(body.messages, context, pixels)
        asked = types.Request(
            id=f"chatcmpl-{new_id()}",
            model=model.name,
            messages=turns,
            images=images,
            videos=videos,
            head=head,
            min_score=body.valora.min_score,
            sampling=params,
            deadline=time_left(context, model, body.valora.deadline, since),
        )
        requests = await constrained(service.numbered(asked, body.n or 1), context, as_json, schema)
        sizes = [image.size for image in images]
        chat = _Chat(context, model, requests, sizes, dict(request.headers), body, asked.id)
        if body.stream:
            return EventStream(chat.events())
        return answer(await until_disconnect(request.receive, chat.whole()))

    return routes


class _Chat:
    """Response to one request, complete or streamed."""

    def __init__(
        self,
        context: ServerContext,
        model: ServedModel,
        requests: Sequence[types.Request],
        sizes: Sequence[tuple[int, int]],
        headers: dict[str, str],
        body: ChatRequest,
        identity: str,
    ) -> None:
        self._service = context.service
        self._model = model
        self._requests = requests
        self._sizes = sizes
        self._headers = headers
        self._logprobs = bool(body.logprobs)
        self._usage = body.stream_options is not None and body.stream_options.include_usage
        self._id = identity
        self._created = int(time.time())

    def _admitted(self) -> Any:
        return self._service.admitted(self._model, self._requests[0].deadline, len(self._requests))

    async def whole(self) -> ChatAnswer:
        with self._admitted() as ticket:
            answers = await self._service.ask_all(ticket, self._requests, self._headers)
        lasts = [outputs[-1] for outputs in answers]
        return ChatAnswer(
            id=self._id,
            created=self._created,
            model=self._model.name,
            choices=[self._choice(number, outputs) for number, outputs in enumerate(answers)],
            usage=usage(lasts),
            valora=valora_block(self._model, lasts[0], self._sizes),
        )

    def _choice(self, number: int, outputs: Sequence[Output]) -> ChatChoice:
        last = outputs[-1]
        text = "".join(output.text for output in outputs)
        if last.head is not None:
            text = last.head.text(self._sizes)
        logprobs = None
        if self._logprobs:
            content = [item for output in outputs for item in chat_logprobs(output.logprobs)]
            logprobs = ChatLogprobs(content=content)
        assert last.finish is not None
        return ChatChoice(
            index=number,
            message=AnswerMessage(content=text),
            logprobs=logprobs,
            finish_reason=finish_reason(last.finish),
        )

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        with self._admitted() as ticket:
            streams = [self._service.ask(ticket, one, self._headers) for one in self._requests]
            lasts: dict[int, Output] = {}
            begun: set[int] = set()
            async with contextlib.aclosing(merged(streams)) as outputs:
                async for number, output in outputs:
                    if number not in begun:
                        begun.add(number)
                        yield self._event(number, {"role": "assistant", "content": ""})
                    text = output.text
                    if output.head is not None:
                        text = output.head.text(self._sizes)
                    if text or output.logprobs:
                        yield self._event(number, {"content": text}, output)
                    if output.finish is not None:
                        lasts[number] = output
                        yield self._ending(number, output)
            if self._usage:
                used = usage(lasts[number] for number in sorted(lasts))
                yield self._base([]) | {"usage": used.model_dump()}

    def _base(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def _event(
        self, number: int, delta: dict[str, Any], output: Output | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": number, "delta": delta, "finish_reason": None}
        if output is not None and output.logprobs:
            content = [item.model_dump() for item in chat_logprobs(output.logprobs)]
            choice["logprobs"] = {"content": content}
        return self._base([choice])

    def _ending(self, number: int, output: Output) -> dict[str, Any]:
        assert output.finish is not None
        event = self._event(number, {})
        event["choices"][0]["finish_reason"] = finish_reason(output.finish)
        block = valora_block(self._model, output, self._sizes)
        return event | {"valora": block.model_dump(exclude_none=True)}
