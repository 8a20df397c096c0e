"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve import types
from valora_serve.errors import RequestError
from valora_serve.server.api.common import answer, error_answers
from valora_serve.server.api.domain_prompt import (
    answers_with_head,
    as_measured,
    check_measured_media,
)
from valora_serve.server.api.requests import (
    Arrival,
    answer_tokens,
    check_head,
    grammar_of,
    read_messages,
    sampling,
)
from valora_serve.server.api.responses import (
    chat_logprobs,
    filled,
    finish_reason,
    items_json,
    joined,
    usage,
    valora_block,
)
from valora_serve.server.api.schema import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatRequest,
)
from valora_serve.server.api.streams import EventStream
from valora_serve.server.api.tools import AnswerReader, tools_of
from valora_serve.server.gather import until_disconnect
from valora_serve.server.telemetry.logs import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from PIL.Image import Image

    from valora_serve.server.api.schema import ValoraAnswer
    from valora_serve.server.api.tools import Tools
    from valora_serve.server.context import ServerContext
    from valora_serve.types import Output


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
        chat = await begin(context, request, body)
        if body.stream:
            return EventStream(chat.events())
        return answer(await until_disconnect(request.receive, chat.json()))

    return routes


async def begin(context: ServerContext, http: Request, body: ChatRequest) -> Chat:
    """Check a chat request, read its images, and make the requests to the engine."""
    arrival = Arrival(context, http, body.valora.deadline)
    model = await arrival.find(body)
    grammar, tools = grammar_of(body, context), tools_of(body)
    head = answers_with_head(model, body.valora.head)
    warnings: list[str] = []
    if head:
        check_head(model, as_json=grammar is not None, calls=tools is not None and not tools.text)
        if tools is not None:
            tools = None
            warnings.append(f"{model.name} answers with its {model.head} head: ignored the tools")
    if tools is not None:
        grammar = tools.grammar(grammar, strict=context.settings.strict_schemas)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs goes with logprobs: set logprobs, or leave it out")
    params = sampling(
        body, context,
        max_tokens=body.max_completion_tokens or body.max_tokens or answer_tokens(model, context),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )  # fmt: skip
    asked = as_measured(model, body.messages, head=head, told=tools is not None)
    warnings += asked.warnings
    plain = types.Request(
        id=f"chatcmpl-{new_id()}", **arrival.named, head=body.valora.head,
        min_score=body.valora.min_score, sampling=params, cache_salt=body.cache_salt,
    )  # fmt: skip
    # First, as a schema that is refused costs no image.
    copies = await arrival.constrained(context.service.numbered(plain, body.n or 1), grammar)
    pixels = http.state.stack.enter_context(context.media.pixels())
    told = tools.instruction() if tools else ""
    turns, images, videos = await arrival.within(
        read_messages(asked.messages, context, pixels, told)
    )
    # A head that finds boxes was measured with single images.
    groups = [[image] for image in images] if head and model.boxes and not videos else [images]
    for group in groups:
        frames = [len(video) for video in videos]
        warnings += check_measured_media(model, len(group), frames, head=head)
    left = arrival.time_left()
    requests = [
        one
        for copy in copies
        for one in _for_each_group(
            replace(copy, messages=turns, images=images, videos=videos, deadline=left), groups
        )
    ]
    sizes = [image.size for image in images]
    unique = list(dict.fromkeys(warnings))
    return Chat(arrival, requests, body, plain.id, len(groups), sizes, tools, unique)


def _for_each_group(request: types.Request, groups: Sequence[list[Image]]) -> list[types.Request]:
    """Copies of a request, each with some of its images; itself if there is one group."""
    if len(groups) < 2:
        return [request]
    made = []
    for number, images in enumerate(groups):
        messages = None
        if request.messages is not None:
            (turn,) = request.messages
            texts = [part for part in turn["content"] if part["type"] == "text"]
            messages = [turn | {"content": [*texts, *[{"type": "image"}] * len(images)]}]
        made.append(replace(request, id=f"{request.id}.{number}", messages=messages, images=images))
    return made


@dataclass(eq=False)
class Chat:
    """Response to one request, complete or streamed.

    Attributes:
        arrival: The HTTP request.
        requests: Requests to the engine; those of one choice are adjacent.
        body: Body of the HTTP request.
        id: Id of the response.
        groups: Number of requests of each choice.
        sizes: (width, height) in pixels of the images as they were sent.
        tools: What the answers may call; None for nothing.
        warnings: What of the request was ignored or was not measured.
        created: When the response began, in seconds since 1970.
    """

    arrival: Arrival
    requests: Sequence[types.Request]
    body: ChatRequest
    id: str
    groups: int
    sizes: Sequence[tuple[int, int]]
    tools: Tools | None
    warnings: Sequence[str]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """Name of the model that answers."""
        return self.arrival.model.name

    async def whole(self) -> tuple[ChatAnswer, list[list[str]]]:
        """Wait for the whole answer."""
        texts: dict[int, list[str]] = defaultdict(list)
        logprobs: dict[int, list[str]] = defaultdict(list)
        lasts: dict[int, Output] = {}
        async with contextlib.aclosing(self._outputs(stream=False)) as outputs:
            async for number, output in outputs:
                texts[number].append(output.text)
                if self.body.logprobs and output.logprobs:
                    logprobs[number].append(items_json(chat_logprobs(output.logprobs)))
                if output.finish is not None:
                    lasts[number] = output
        order = sorted(lasts)
        body = ChatAnswer(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(n, "".join(texts[n]), lasts[n]) for n in order],
            usage=usage(lasts[n] for n in order),
            valora=self._block(lasts[0]),
        )
        return body, [logprobs[n] for n in order]

    async def json(self) -> bytes:
        """Wait for the whole answer, as JSON."""
        body, logprobs = await self.whole()
        if not self.body.logprobs:
            return body.model_dump_json().encode()

        def made() -> bytes:
            contents = [
                f'"logprobs":{{"content":[{",".join(one)}],"refusal":null}}' for one in logprobs
            ]
            return filled(body.model_dump_json(), '"logprobs":null', contents).encode()

        return await asyncio.to_thread(made)

    def _block(self, last: Output) -> ValoraAnswer:
        return valora_block(self.arrival.model, last, self.sizes, self.warnings)

    def _choice(self, number: int, text: str, last: Output) -> ChatChoice:
        if last.head is not None:
            text = last.head.text(self.sizes)
        message = AnswerMessage(content=text)
        if self.tools is not None:
            message = AnswerReader(self.tools).message(text)
        reason = finish_reason(last, call=bool(message.tool_calls))
        return ChatChoice(index=number, message=message, finish_reason=reason)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as chunks of OpenAI's API."""
        lasts: dict[int, Output] = {}
        readers: dict[int, AnswerReader | None] = {}
        async with contextlib.aclosing(self._outputs(stream=True)) as outputs:
            async for number, output in outputs:
                if number not in readers:
                    readers[number] = AnswerReader(self.tools) if self.tools else None
                    yield self._event(
                        number, {"role": "assistant", "content": None if self.tools else ""}
                    )
                text = output.text if output.head is None else output.head.text(self.sizes)
                reader = readers[number]
                if reader is None:
                    deltas = [{"content": text}] if text or output.logprobs else []
                else:
                    deltas = reader.push(text, last=output.finish is not None)
                for place, delta in enumerate(deltas or [{}] * bool(output.logprobs)):
                    yield self._event(number, delta, None if place else output)
                if output.finish is not None:
                    lasts[number] = output
                    called = reader is not None and reader.calls > 0
                    event = self._event(number, {})
                    event["choices"][0]["finish_reason"] = finish_reason(output, call=called)
                    block = self._block(output).model_dump(exclude_none=True)
                    yield event | {"valora": block}
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            used = usage(lasts[number] for number in sorted(lasts))
            yield self._base([]) | {"usage": used.model_dump()}

    async def _outputs(self, *, stream: bool) -> AsyncGenerator[tuple[int, Output], None]:
        """Outputs of all choices as they come, each with the number of its choice."""
        if self.groups > 1:
            lasts = [outputs[-1] for outputs in await self.arrival.ask_all(self.requests)]
            for number, start in enumerate(range(0, len(lasts), self.groups)):
                yield number, joined(lasts[start : start + self.groups])
            return
        async with contextlib.aclosing(
            self.arrival.outputs(self.requests, stream=stream)
        ) as outputs:
            async for found in outputs:
                yield found

    def _base(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk"
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "choices": choices,
        }  # fmt: skip

    def _event(
        self, number: int, delta: dict[str, Any], output: Output | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": number, "delta": delta, "finish_reason": None}
        if output is not None and output.logprobs:
            choice["logprobs"] = {"content": chat_logprobs(output.logprobs)}
        return self._base([choice])
