"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import json
import time
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
    numbered,
    read_messages,
    sampling,
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
    images = [part.image_url for part in parts if isinstance(part, schema.ImagePart)]
    videos = [part for part in parts if isinstance(part, schema.VideoPart | schema.FramesPart)]
    if len(videos) > 1:
        raise RequestError(f"{body.model} is a bundle: send images, or one video, and text")
    video = videos[0] if videos else None
    fields = schema.VisionRequest.model_construct(  # what is in it is checked
        images=images,
        frames=getattr(video, "frames", []), video=getattr(video, "video_url", None),
        min_score=body.valora.min_score, deadline=body.valora.deadline,
        prompt="\n".join(part.text for part in parts if isinstance(part, schema.TextPart)) or None,
        max_tokens=body.max_completion_tokens or body.max_tokens, cache_salt=body.cache_salt,
        store=body.store in (None, True),
    )  # fmt: skip
    found = await looked(context, http, fields, [str(body.model)], since, own_prompts=True)
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
    copies = await arrival.constrained(numbered(plain, body.n or 1), grammar)
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
    return Chat(
        arrival, requests, body, plain.id, tools, each=len(groups), sizes=sizes, warnings=unique
    )


@dataclass(eq=False)
class Chat(common.Answer):
    """Text and calls, or what a head has found."""

    tools: Tools | None
    readers: dict[int, AnswerReader] = field(default_factory=dict)
    object, chunk = "chat.completion", "chat.completion.chunk"

    async def choice(self, number: int, output: Output) -> dict[str, Any]:
        """A whole choice."""
        message = AnswerReader(self.tools).message(self._text(output))
        reason = common.finish_reason(output, call=bool(message.tool_calls))
        logprobs = None
        if self.body.logprobs:
            content = await asyncio.to_thread(common.chat_logprobs, output.logprobs)
            logprobs = {"content": content, "refusal": None}
        return {
            "index": number, "message": message.model_dump(), "logprobs": logprobs,
            "finish_reason": reason,
        }  # fmt: skip

    async def choices(self, number: int, output: Output) -> list[dict[str, Any]]:
        """What is new of a choice, for an event each."""
        deltas: list[dict[str, Any]] = []
        if (reader := self.readers.get(number)) is None:
            reader = self.readers[number] = AnswerReader(self.tools)
            deltas.append({"role": "assistant", "content": None if self.tools else ""})
        begun = len(deltas)
        deltas += reader.push(self._text(output), last=output.finish is not None)
        if output.logprobs and len(deltas) == begun:
            deltas.append({})
        made: list[dict[str, Any]] = [
            {"index": number, "delta": one, "finish_reason": None} for one in deltas
        ]
        if output.logprobs:
            made[begun]["logprobs"] = {"content": common.chat_logprobs(output.logprobs)}
        if output.finish is not None:
            reason = common.finish_reason(output, call=reader.calls > 0)
            made.append({"index": number, "delta": {}, "finish_reason": reason})
        return made

    def _text(self, output: Output) -> str:
        return output.text if output.head is None else output.head.text(self.sizes)
