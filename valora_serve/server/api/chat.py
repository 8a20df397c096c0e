"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve import types
from valora_serve.errors import RequestError
from valora_serve.server.api import common, schema
from valora_serve.server.api.domain_prompt import as_measured, check_measured_media
from valora_serve.server.api.requests import (
    Arrival,
    answer_tokens,
    check_head,
    grammar_of,
    read_messages,
    sampling,
    url_of,
)
from valora_serve.server.api.tools import AnswerReader, Tools, tools_of
from valora_serve.server.api.vision import bundles_of, looked
from valora_serve.server.context import ServerContext
from valora_serve.server.telemetry.logs import new_id
from valora_serve.types import Output


def router(context: ServerContext) -> APIRouter:
    """Route of the chat endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/chat/completions",
        response_model=schema.ChatAnswer,
        responses=common.STREAMED,
        summary="Answer a conversation with text, or with a domain's head",
    )
    async def chat_completions(request: Request, body: schema.ChatRequest) -> Response:
        named = None if context.service.serves(str(body.model)) else bundles_of(context)
        if named and body.model in named:
            return await _bundle_answer(context, request, body)
        chat = await begin(context, request, body)
        return await common.respond(request, chat, stream=body.stream)

    return routes


async def _bundle_answer(
    context: ServerContext, http: Request, body: schema.ChatRequest
) -> Response:
    """Answer with JSON: what each domain of a bundle finds in the user's images or video."""
    since, many = time.monotonic(), (body.n or 1) > 1
    tools_of(body)  # refuses what no chat may have
    sampling(body, context, max_tokens=None, logprobs=None)
    refused = {"tools": body.tools, "response_format": grammar_of(body, context), "n": many,
               "logprobs": body.logprobs, "top_logprobs": body.top_logprobs,
               "stream": body.stream, "valora.adapters": body.valora.adapters,
               "valora.head": not body.valora.head}  # fmt: skip
    if given := ", ".join(name for name, value in refused.items() if value):
        raise RequestError(
            f"{body.model} is a bundle, whose domains answer at once: leave out {given}, or ask "
            "one of its domains"
        )
    parts: list[Any] = []
    for message in body.messages:
        if message.role == "user" and (content := message.content):
            text = isinstance(content, str)
            parts += [schema.TextPart.model_construct(text=content)] if text else content
    urls = {
        kind: [url for part in parts if isinstance(part, kind) for url in _urls(part)]
        for kind in (schema.ImagePart, schema.VideoPart, schema.FramesPart)
    }
    videos = [part for part in parts if isinstance(part, schema.VideoPart | schema.FramesPart)]
    if len(videos) > 1 or any(isinstance(part, schema.OtherPart) for part in parts):
        raise RequestError(f"{body.model} is a bundle: send images, or one video, and text")
    fields = schema.LookRequest.model_construct(  # what is in it is checked
        domains=[str(body.model)], images=urls[schema.ImagePart], frames=urls[schema.FramesPart],
        video=next(iter(urls[schema.VideoPart]), None),
        min_score=body.valora.min_score, deadline=body.valora.deadline,
        prompt="\n".join(part.text for part in parts if isinstance(part, schema.TextPart)) or None,
        max_tokens=body.max_completion_tokens or body.max_tokens, cache_salt=body.cache_salt,
        store=body.store in (None, True),
    )  # fmt: skip
    found = await looked(context, http, fields, since, own_prompts=True)
    used = [one.usage for one in found.values() if isinstance(one, schema.VisionAnswer)]
    said = {name: one.model_dump(mode="json", exclude_none=True) for name, one in found.items()}
    answer = schema.AnswerMessage(content=json.dumps(said, ensure_ascii=False))
    prompt, completion = (
        sum(getattr(one, f"{part}_tokens") for one in used) for part in ("prompt", "completion")
    )
    return common.answer(
        schema.ChatAnswer(
            id=f"chatcmpl-{new_id()}", created=int(time.time()), model=str(body.model),
            choices=[schema.ChatChoice(index=0, message=answer, finish_reason="stop")],
            usage=common.counted(prompt, completion),
        )
    )  # fmt: skip


def _urls(part: Any) -> list[Any]:
    if isinstance(part, schema.FramesPart):
        return list(map(url_of, part.frames))
    return [url_of(part.image_url if isinstance(part, schema.ImagePart) else part.video_url)]


async def begin(context: ServerContext, http: Request, body: schema.ChatRequest) -> Chat:
    """Check a chat request, read its images, and make the requests to the engine."""
    arrival = Arrival(context, http, body.valora.deadline)
    model = await arrival.find(body)
    grammar, tools = grammar_of(body, context), tools_of(body)
    head = body.valora.head and model.head is not None
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
    messages, said = as_measured(model, body.messages, head=head, told=tools is not None)
    plain = types.Request(
        f"chatcmpl-{new_id()}", **arrival.named, head=body.valora.head,
        min_score=body.valora.min_score, sampling=params, store=body.store in (None, True),
    )  # fmt: skip
    # First, as a schema that is refused costs no image.
    copies = await arrival.constrained(context.service.numbered(plain, body.n or 1), grammar)
    pixels = http.state.stack.enter_context(context.media.pixels())
    told = tools.instruction() if tools else ""
    turns, images, videos = await arrival.within(read_messages(messages, context, pixels, told))
    # A head that finds boxes was measured with single images.
    groups = [[one] for one in images] if head and model.boxes and not videos else [images]
    frames = [len(video) for video in videos]
    warnings += said
    for group in groups:
        warnings += check_measured_media(model, len(group), frames, head=head)
    given = {"messages": turns, "images": images, "videos": videos}
    parts: list[dict[str, Any]] = [given]
    if len(groups) > 1:  # the prompt with each of the images
        text = None if turns is None else [p for p in turns[0]["content"] if p["type"] == "text"]
        turn = None if text is None else [{"role": "user", "content": [*text, {"type": "image"}]}]
        parts = [{"messages": turn, "images": group} for group in groups]
    left = arrival.time_left()
    requests = [
        replace(copy, id=f"{copy.id}.{number}" if number else copy.id, deadline=left, **part)
        for copy in copies
        for number, part in enumerate(parts)
    ]
    sizes, unique = [image.size for image in images], list(dict.fromkeys(warnings))
    return Chat(arrival, requests, body, plain.id, len(groups), sizes, tools, unique)


@dataclass(eq=False)
class Chat:
    """Response to one request, complete or streamed."""

    arrival: Arrival
    requests: Sequence[types.Request]
    body: schema.ChatRequest
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

    async def json(self) -> bytes:
        """Wait for the whole answer, as JSON."""
        lasts, choices = await self._answers(), []
        for number, last in enumerate(lasts):
            message = AnswerReader(self.tools).message(self._text(last))
            reason = common.finish_reason(last, call=bool(message.tool_calls))
            choices.append(schema.ChatChoice(index=number, message=message, finish_reason=reason))
        body = schema.ChatAnswer(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=common.usage(lasts),
            valora=common.valora_block(self.arrival.model, lasts[0], self.sizes, self.warnings),
        ).model_dump()

        def made() -> bytes:
            for last, choice in zip(lasts, body["choices"], strict=True):
                if self.body.logprobs:
                    content = common.chat_logprobs(last.logprobs)
                    choice["logprobs"] = {"content": content, "refusal": None}
            return common.to_json(body)

        return await asyncio.to_thread(made) if self.body.logprobs else made()

    async def events(self, *, stream: bool = True) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as chunks of OpenAI's API."""
        lasts: dict[int, Output] = {}
        readers: dict[int, AnswerReader] = {}
        async with contextlib.aclosing(self._outputs(stream=stream)) as outputs:
            async for number, output in outputs:
                if (reader := readers.get(number)) is None:
                    reader = readers[number] = AnswerReader(self.tools)
                    begun = {"role": "assistant", "content": None if self.tools else ""}
                    yield self._event(number, begun)
                deltas = reader.push(self._text(output), last=output.finish is not None)
                for place, delta in enumerate(deltas or [{}] * bool(output.logprobs)):
                    yield self._event(number, delta, None if place else output)
                if output.finish is not None:
                    lasts[number] = output
                    event = self._event(number, {})
                    reason = common.finish_reason(output, call=reader.calls > 0)
                    event["choices"][0]["finish_reason"] = reason
                    block = common.valora_block(
                        self.arrival.model, output, self.sizes, self.warnings
                    )
                    yield event | {"valora": block.model_dump(exclude_none=True)}
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            used = common.usage(lasts[number] for number in sorted(lasts))
            yield self._event(0, {}) | {"choices": [], "usage": used.model_dump()}

    def _text(self, output: Output) -> str:
        return output.text if output.head is None else output.head.text(self.sizes)

    async def _outputs(self, *, stream: bool) -> AsyncGenerator[tuple[int, Output], None]:
        """Outputs of all choices as they come, each with the number of its choice."""
        if not stream or self.groups > 1:
            for found in enumerate(await self._answers()):
                yield found
            return
        async with contextlib.aclosing(self.arrival.outputs(self.requests)) as outputs:
            async for found in outputs:
                yield found

    async def _answers(self) -> list[Output]:
        lasts, each = await self.arrival.ask_all(self.requests), self.groups
        if each == 1:
            return lasts
        return [common.joined(lasts[at : at + each]) for at in range(0, len(lasts), each)]

    def _event(
        self, number: int, delta: dict[str, Any], output: Output | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": number, "delta": delta, "finish_reason": None}
        if output is not None and output.logprobs:
            choice["logprobs"] = {"content": common.chat_logprobs(output.logprobs)}
        return {
            "id": self.id, "object": "chat.completion.chunk", "created": self.created,
            "model": self.model, "choices": [choice],
        }  # fmt: skip
