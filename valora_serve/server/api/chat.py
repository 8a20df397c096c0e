"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from dataclasses import replace
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
    answer_tokens,
    check_head,
    constrained,
    constraints,
    find_models,
    grammar_of,
    read_messages,
    sampling,
    time_left,
    within_deadline,
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
from valora_serve.server.service import merged
from valora_serve.server.telemetry.logs import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from PIL.Image import Image

    from valora_serve.server.api.schema import ValoraAnswer
    from valora_serve.server.api.tools import Tools
    from valora_serve.server.context import ServerContext
    from valora_serve.server.service import Ticket
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
        chat = await begin(context, request, body)
        if body.stream:
            return EventStream(chat.events())
        return answer(await until_disconnect(request.receive, chat.json()))

    return routes


async def begin(context: ServerContext, request: Request, body: ChatRequest) -> Chat:
    """Check a chat request, read its images, and make the requests to the engine.

    Args:
        context: Parts of the server.
        request: The HTTP request.
        body: Its body.

    Raises:
        ServeError: The request cannot be answered.
    """
    since = time.monotonic()
    service = context.service
    model, named = await find_models(context, request, body)
    request.state.facts["model"] = model.name
    grammar = grammar_of(body, context)
    tools = tools_of(body)
    head = answers_with_head(model, body.valora.head)
    warnings: dict[str, None] = {}
    if head:
        check_head(model, as_json=grammar is not None, calls=tools is not None and not tools.text)
        if tools is not None:
            tools = None
            warnings[f"{model.name} answers with its {model.head} head: ignored the tools"] = None
    if tools is not None:
        grammar = tools.grammar(grammar, strict=context.settings.strict_schemas)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs goes with logprobs: set logprobs, or leave it out")
    limit = body.max_completion_tokens or body.max_tokens or answer_tokens(model, context)
    params = sampling(
        body, context, max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )  # fmt: skip
    made = await constraints(
        grammar, body.n or 1, request, context, model, body.valora.deadline, since
    )
    asked = as_measured(model, body.messages, head=head, told=tools is not None)
    pixels = request.state.stack.enter_context(context.media.pixels())
    turns, images, videos = await within_deadline(
        read_messages(asked.messages, context, pixels, tools.instruction() if tools else ""),
        request.receive, context, model, body.valora.deadline, since,
    )  # fmt: skip
    # A head that finds boxes was measured with single images.
    groups = [[image] for image in images] if head and model.boxes and not videos else [images]
    warnings |= dict.fromkeys(asked.warnings)
    for group in groups:
        frames = [len(video) for video in videos]
        warnings |= dict.fromkeys(check_measured_media(model, len(group), frames, head=head))
    wanted = types.Request(
        id=f"chatcmpl-{new_id()}",
        **named,
        messages=turns,
        images=images,
        videos=videos,
        head=body.valora.head,
        min_score=body.valora.min_score,
        sampling=params,
        deadline=time_left(context, model, body.valora.deadline, since),
        cache_salt=body.cache_salt,
    )
    copies = service.numbered(wanted, body.n or 1)
    plain = [one for copy in copies for one in _for_each_group(copy, groups)]
    requests = constrained(plain, made)
    return Chat(
        context,
        model,
        requests,
        body,
        wanted.id,
        groups=len(groups),
        sizes=[image.size for image in images],
        headers=dict(request.headers),
        tools=tools,
        warnings=list(warnings),
    )


def _for_each_group(request: types.Request, groups: Sequence[list[Image]]) -> list[types.Request]:
    """Copies of a request, each with some of its images; the request itself if there is one group.

    Args:
        request: A request to a head, whose only turn holds a text and images.
        groups: Images of each copy.
    """
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


class Chat:
    """Response to one request, complete or streamed.

    Args:
        context: Parts of the server.
        model: Model that answers.
        requests: Requests to the engine; those of one choice are adjacent.
        body: The HTTP request.
        identity: Id of the response.
        groups: Number of requests of each choice.
        sizes: (width, height) in pixels of the images as they were sent.
        headers: Headers of the HTTP request.
        tools: What the answers may call; None for nothing.
        warnings: What of the request was ignored or was not measured.
    """

    def __init__(
        self,
        context: ServerContext,
        model: ServedModel,
        requests: Sequence[types.Request],
        body: ChatRequest,
        identity: str,
        *,
        groups: int,
        sizes: Sequence[tuple[int, int]],
        headers: dict[str, str],
        tools: Tools | None,
        warnings: Sequence[str],
    ) -> None:
        self._service = context.service
        self._model = model
        self._requests = requests
        self._groups = groups
        self._sizes = sizes
        self._headers = headers
        self._tools = tools
        self._warnings = warnings
        self._logprobs = bool(body.logprobs)
        self._usage = body.stream_options is not None and body.stream_options.include_usage
        self._id = identity
        self._created = int(time.time())

    @property
    def model(self) -> str:
        """Name of the model that answers."""
        return self._model.name

    def _admitted(self) -> Any:
        return self._service.admitted(self._model, self._requests[0].deadline, len(self._requests))

    async def _joined(self, ticket: Ticket) -> list[Output]:
        """The output of each choice, of which each has several requests."""
        answers = await self._service.ask_all(ticket, self._requests, self._headers)
        lasts = [outputs[-1] for outputs in answers]
        return [
            joined(lasts[start : start + self._groups])
            for start in range(0, len(lasts), self._groups)
        ]

    async def whole(self) -> tuple[ChatAnswer, list[list[str]]]:
        """Wait for the whole answer.

        Returns:
            The answer without log probabilities, and those of each choice as JSON: they become
            text as they come, because there may be very many.
        """
        texts: dict[int, list[str]] = defaultdict(list)
        logprobs: dict[int, list[str]] = defaultdict(list)
        lasts: dict[int, Output] = {}
        with self._admitted() as ticket:
            async with contextlib.aclosing(self._outputs(ticket, stream=False)) as outputs:
                async for number, output in outputs:
                    texts[number].append(output.text)
                    if self._logprobs and output.logprobs:
                        logprobs[number].append(items_json(chat_logprobs(output.logprobs)))
                    if output.finish is not None:
                        lasts[number] = output
        order = sorted(lasts)
        body = ChatAnswer(
            id=self._id,
            created=self._created,
            model=self._model.name,
            choices=[self._choice(n, "".join(texts[n]), lasts[n]) for n in order],
            usage=usage(lasts[n] for n in order),
            valora=self._block(lasts[0]),
        )
        return body, [logprobs[n] for n in order]

    async def json(self) -> bytes:
        """Wait for the whole answer, as JSON."""
        body, logprobs = await self.whole()
        if not self._logprobs:
            return body.model_dump_json().encode()

        def made() -> bytes:
            contents = [
                f'"logprobs":{{"content":[{",".join(one)}],"refusal":null}}' for one in logprobs
            ]
            return filled(body.model_dump_json(), '"logprobs":null', contents).encode()

        return await asyncio.to_thread(made)

    def _block(self, last: Output) -> ValoraAnswer:
        return valora_block(self._model, last, self._sizes, self._warnings)

    def _choice(self, number: int, text: str, last: Output) -> ChatChoice:
        if last.head is not None:
            text = last.head.text(self._sizes)
        assert last.finish is not None
        message = AnswerMessage(content=text)
        if self._tools is not None:
            message = AnswerReader(self._tools).message(text)
        reason = finish_reason(last.finish, call=bool(message.tool_calls))
        return ChatChoice(index=number, message=message, finish_reason=reason)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as chunks of OpenAI's API."""
        with self._admitted() as ticket:
            lasts: dict[int, Output] = {}
            readers: dict[int, AnswerReader | None] = {}
            async with contextlib.aclosing(self._outputs(ticket, stream=True)) as outputs:
                async for number, output in outputs:
                    if number not in readers:
                        readers[number] = AnswerReader(self._tools) if self._tools else None
                        content = None if self._tools else ""
                        yield self._event(number, {"role": "assistant", "content": content})
                    text = output.text
                    if output.head is not None:
                        text = output.head.text(self._sizes)
                    reader = readers[number]
                    if reader is None:
                        deltas = [{"content": text}] if text or output.logprobs else []
                    else:
                        deltas = reader.push(text, last=output.finish is not None)
                    for place, delta in enumerate(deltas or [{}] * bool(output.logprobs)):
                        yield self._event(number, delta, None if place else output)
                    if output.finish is not None:
                        lasts[number] = output
                        yield self._ending(number, output, called=bool(reader and reader.calls))
            if self._usage:
                used = usage(lasts[number] for number in sorted(lasts))
                yield self._base([]) | {"usage": used.model_dump()}

    async def _outputs(
        self, ticket: Ticket, *, stream: bool
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """Outputs of all choices as they come, each with the number of its choice."""
        if self._groups > 1:
            for number, output in enumerate(await self._joined(ticket)):
                yield number, output
            return
        ask = self._service.ask
        streams = [ask(ticket, one, self._headers, stream=stream) for one in self._requests]
        async with contextlib.aclosing(merged(streams)) as outputs:
            async for found in outputs:
                yield found

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
            choice["logprobs"] = {"content": chat_logprobs(output.logprobs)}
        return self._base([choice])

    def _ending(self, number: int, output: Output, *, called: bool) -> dict[str, Any]:
        assert output.finish is not None
        event = self._event(number, {})
        event["choices"][0]["finish_reason"] = finish_reason(output.finish, call=called)
        return event | {"valora": self._block(output).model_dump(exclude_none=True)}
