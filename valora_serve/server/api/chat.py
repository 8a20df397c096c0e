"""``/v1/chat/completions``."""

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve import types
from valora_serve.errors import RequestError
from valora_serve.server.api import common, requests, schema
from valora_serve.server.api.domain_prompt import (
    as_measured,
    check_measured_media,
    media_of,
    text_of,
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
        unserved = not context.service.serves(str(body.model))
        if unserved and body.model in bundles_of(context):
            return await _bundle_answer(context, request, body)
        chat = await begin(context, request, body)
        return await common.respond(chat, stream=body.stream)

    return routes


async def _bundle_answer(
    context: ServerContext, http: Request, body: schema.ChatRequest
) -> Response:
    """Answer with JSON: what each domain of a bundle finds in the user's images or video."""
    since, name = time.monotonic(), str(body.model)
    tools_of(body)  # refuses what no chat may have
    params = requests.sampling(body, context, max_tokens=None, logprobs=None)
    refused = {"tools": body.tools, "response_format": requests.grammar_of(body, context),
               "n": (body.n or 1) > 1, "logprobs": body.logprobs, "stream": body.stream,
               "top_logprobs": body.top_logprobs, "valora.adapters": body.valora.adapters,
               "valora.head": not body.valora.head}  # fmt: skip
    if given := ", ".join(field for field, value in refused.items() if value):
        raise RequestError(
            f"{name} is a bundle, whose domains answer at once: leave out {given}, or ask one of "
            "its domains"
        )
    users = [message for message in reversed(body.messages) if message.role == "user"]
    media = next(filter(None, map(media_of, users)), [])
    videos = [part for part in media if not isinstance(part, schema.ImagePart)]
    if len(videos) > 1:
        raise RequestError(f"{name} is a bundle: send images, or one video, and text")
    video = videos[0] if videos else None
    fields = schema.VisionRequest.model_construct(  # what is in it is checked
        images=[part.image_url for part in media if isinstance(part, schema.ImagePart)],
        frames=getattr(video, "frames", []), video=getattr(video, "video_url", None),
        min_score=body.valora.min_score, deadline=body.valora.deadline,
        prompt=next(filter(None, map(text_of, users)), None),
        max_tokens=body.max_completion_tokens or body.max_tokens, cache_salt=body.cache_salt,
        store=body.store in (None, True),
    )  # fmt: skip
    found = await looked(context, http, fields, [name], since, params)
    used = [one.usage for one in found.values() if isinstance(one, schema.VisionAnswer)]
    counts = {
        count: sum(getattr(one, count) for one in used)
        for count in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    said = {name: one.model_dump(mode="json", exclude_none=True) for name, one in found.items()}
    answer = schema.AnswerMessage(content=json.dumps(said, ensure_ascii=False))
    return common.answer(
        schema.ChatAnswer(
            id=f"chatcmpl-{new_id()}", created=int(time.time()), model=name,
            choices=[schema.ChatChoice(index=0, message=answer, finish_reason="stop")],
            usage=schema.UsageAnswer(**counts),
        )
    )  # fmt: skip


@dataclass(eq=False)
class Chat(common.Answer):
    """Text and calls, or what a head has found."""

    tools: Tools | None
    readers: dict[int, AnswerReader] = field(default_factory=dict)
    object, chunk = "chat.completion", "chat.completion.chunk"

    async def choice(self, number: int, output: Output) -> dict[str, Any]:
        """A whole choice."""
        message = AnswerReader(self.tools).message(self._text(output))
        reason, logprobs = common.finish_reason(output, call=bool(message.tool_calls)), None
        if self.body.logprobs:
            content = await asyncio.to_thread(common.chat_logprobs, output.logprobs)
            logprobs = {"content": content, "refusal": None}
        said = {"message": message.model_dump(), "logprobs": logprobs, "finish_reason": reason}
        return {"index": number, **said}

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


async def begin(context: ServerContext, http: Request, body: schema.ChatRequest) -> Chat:
    """Check a chat request, read its images, and make the requests to the engine."""
    arrival = requests.Arrival(context, http, body.valora.deadline)
    model = await arrival.find(body)
    grammar, tools = requests.grammar_of(body, context), tools_of(body)
    head = body.valora.head and model.head is not None
    warnings: list[str] = []
    if head:
        requests.check_head(
            model, as_json=grammar is not None, calls=tools is not None and not tools.text
        )
        if tools is not None:
            tools = None
            warnings.append(f"{model.name} answers with its {model.head} head: ignored the tools")
    if tools is not None:
        grammar = tools.grammar(grammar, strict=context.settings.strict_schemas)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs goes with logprobs: set logprobs, or leave it out")
    limit = body.max_completion_tokens or body.max_tokens or model.max_tokens
    params = requests.sampling(
        body, context, max_tokens=limit or context.settings.answer_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )  # fmt: skip
    messages, said = as_measured(model, body.messages, head=head, told=tools is not None)
    plain = types.Request(
        f"chatcmpl-{new_id()}", **arrival.named, head=body.valora.head,
        min_score=body.valora.min_score, sampling=params, store=body.store in (None, True),
    )  # fmt: skip
    # First, as a schema that is refused costs no image.
    copies = await arrival.constrained(requests.numbered(plain, body.n or 1), grammar)
    told = tools.instruction() if tools else ""
    turns, images, videos = await arrival.within(requests.read_messages(messages, arrival, told))
    frames, sizes = [len(video) for video in videos], [image.size for image in images]
    parts: list[dict[str, Any]] = [{"messages": turns, "images": images, "videos": videos}]
    if head and model.boxes and turns and len(images) > 1 and not videos:
        # A head that finds boxes was measured with single images: the prompt with each of them.
        text = [part for part in turns[0]["content"] if part["type"] == "text"]
        turn = {"role": "user", "content": [*text, {"type": "image"}]}
        parts = [{"messages": [turn], "images": [image]} for image in images]
    warnings += said + check_measured_media(model, len(parts[0]["images"]), frames, head=head)
    asked = [
        replace(copy, id=f"{copy.id}.{number}" if number else copy.id, **part)
        for copy in copies
        for number, part in enumerate(parts)
    ]
    return Chat(
        arrival, asked, body, plain.id, tools, each=len(parts), sizes=sizes, warnings=warnings
    )
