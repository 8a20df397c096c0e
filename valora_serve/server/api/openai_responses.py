"""``/v1/responses``: OpenAI's newer form of chat, without state on the server."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve.errors import RequestError
from valora_serve.server.api.chat import begin
from valora_serve.server.api.common import answer, error_answers
from valora_serve.server.api.responses import filled, items_json
from valora_serve.server.api.schema import (
    ChatRequest,
    ImagePart,
    JsonSchema,
    Message,
    RefusalPart,
    ResponseAnswer,
    ResponseFormat,
    ResponseInputImage,
    ResponseInputMessage,
    ResponseInputText,
    ResponsesRequest,
    StreamOptions,
    TextPart,
)
from valora_serve.server.api.streams import EventJson, EventStream, event_json
from valora_serve.server.envelope import until_disconnect
from valora_serve.server.telemetry.logs import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from valora_serve.server.api.chat import Chat
    from valora_serve.server.api.schema import ContentPart, ResponseInputItem
    from valora_serve.server.context import ServerContext

LOGPROBS = "message.output_text.logprobs"
_STATELESS = "as this server keeps no conversations: send the whole conversation as input"
_REFUSED = {
    "previous_response_id": f"is not served, {_STATELESS}",
    "conversation": f"is not served, {_STATELESS}",
    "prompt": "is not served, as this server keeps no prompts: send it as input",
    "background": "is not served: wait for the answer, or set stream",
    "moderation": "is not served: leave it out",
    "tools": "are not served here: send them to /v1/chat/completions",
}


def router(context: ServerContext) -> APIRouter:
    """Route of the responses endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/responses",
        response_model=ResponseAnswer,
        responses=error_answers(event_stream=True),
        summary="Answer a conversation, in the form of OpenAI's Responses API",
    )
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        chat = await begin(context, request, _as_chat(body))
        made = _Responses(chat, body)
        if body.stream:
            return EventStream(made.events())
        return answer(await until_disconnect(request.receive, made.json()))

    return routes


def _as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request as a chat request.

    Raises:
        RequestError: It asks for something that is not served.
    """
    for name, said in _REFUSED.items():
        if getattr(body, name):
            raise RequestError(f"{name} {said}")
    if body.tool_choice not in (None, "none", "auto"):
        raise RequestError("tool_choice is not served here: use /v1/chat/completions")
    others = [one for one in body.include or () if one != LOGPROBS]
    if others:
        raise RequestError(f"include holds {others[0][:50]!a}: only {LOGPROBS} is served")
    messages = []
    if body.instructions is not None:
        messages.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        messages += [_message(item, number) for number, item in enumerate(body.input)]
    logprobs = LOGPROBS in (body.include or ())
    return ChatRequest(
        model=body.model,
        cache_salt=body.cache_salt,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        response_format=_format(body),
        stream=body.stream,
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        valora=body.valora,
    )


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    if form.schema_ is None:
        raise RequestError("text.format is json_schema, but holds no schema: put schema")
    wanted = JsonSchema(schema=form.schema_, strict=form.strict)
    return ResponseFormat(type="json_schema", json_schema=wanted)


def _message(item: ResponseInputMessage | ResponseInputItem, number: int) -> Message:
    if not isinstance(item, ResponseInputMessage):
        raise RequestError(
            f"input.{number} is of type {item.type[:50]!a}: only messages are served"
        )
    if isinstance(item.content, str):
        return Message(role=item.role, content=item.content)
    parts: list[ContentPart] = []
    for part in item.content:
        if isinstance(part, ResponseInputText):
            parts.append(TextPart(type="text", text=part.text))
        elif isinstance(part, RefusalPart):
            parts.append(part)
        elif isinstance(part, ResponseInputImage) and part.image_url:
            parts.append(ImagePart(type="image_url", image_url=part.image_url))
        elif isinstance(part, ResponseInputImage):
            raise RequestError(
                f"input.{number} has an image without image_url: send one, as no files are kept"
            )
        else:
            raise RequestError(
                f"input.{number} has a part of type {part.type}, which the model cannot read: "
                "send input_text or input_image"
            )
    return Message(role=item.role, content=parts)


class _Responses:
    """Response to one request, complete or streamed.

    Args:
        chat: The chat that answers.
        body: The HTTP request.
    """

    def __init__(self, chat: Chat, body: ResponsesRequest) -> None:
        self._chat = chat
        self._body = body
        self._id = f"resp_{new_id()}"
        self._item = f"msg_{new_id()}"
        self._created = time.time()

    async def json(self) -> bytes:
        """Wait for the whole answer, as JSON."""
        found, [logprobs] = await self._chat.whole()
        choice = found.choices[0]
        body = ResponseAnswer.model_validate(
            self._response(
                choice.finish_reason,
                choice.message.content or "",
                [],
                found.usage.model_dump(),
                None if found.valora is None else found.valora.model_dump(exclude_none=True),
            )
        )
        return _filled(body.model_dump_json(), logprobs).encode()

    async def events(self) -> AsyncGenerator[dict[str, Any] | EventJson, None]:
        """The answer as events of OpenAI's API."""
        number = 0

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"type": kind, "sequence_number": number - 1, **fields}

        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        text, finish = "", "stop"
        logprobs: list[str] = []  # as JSON
        usage = block = None
        begun = False
        async with contextlib.aclosing(self._chat.events()) as chunks:
            async for chunk in chunks:
                if not begun:  # only now, so that an earlier error has a status of its own
                    begun = True
                    for kind in ("response.created", "response.in_progress"):
                        yield event(kind, response=self._response(None, "", [], None, None))
                    item = self._message("in_progress", None, [])
                    yield event("response.output_item.added", output_index=0, item=item)
                    part = _part("", [])
                    yield event("response.content_part.added", **place, part=part)
                usage, block = chunk.get("usage", usage), chunk.get("valora", block)
                for choice in chunk["choices"]:
                    finish = choice["finish_reason"] or finish
                    new = (choice.get("logprobs") or {}).get("content") or []
                    delta = choice["delta"].get("content")
                    if new:
                        logprobs.append(items_json(new))
                    if delta or new:
                        text += delta or ""
                        yield event(
                            "response.output_text.delta", **place, delta=delta, logprobs=new
                        )
        answered = self._response(finish, text, [], usage, block)
        for last in (
            event("response.output_text.done", **place, text=text, logprobs=[]),
            event("response.content_part.done", **place, part=_part(text, [])),
            event("response.output_item.done", output_index=0, item=answered["output"][0]),
            event(f"response.{answered['status']}", response=answered),
        ):
            made = event_json(last)
            yield made._replace(text=_filled(made.text, logprobs))

    def _message(self, status: str, text: str | None, logprobs: Sequence[Any]) -> dict[str, Any]:
        content = [] if text is None else [_part(text, logprobs)]
        return {
            "id": self._item, "type": "message", "role": "assistant", "status": status,
            "content": content,
        }  # fmt: skip

    def _response(
        self,
        finish: str | None,
        text: str,
        logprobs: Sequence[Any],
        usage: Mapping[str, Any] | None,
        block: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """The response object; `finish` is None while the answer is generated."""
        body = self._body
        status = "in_progress"
        if finish is not None:
            status = "incomplete" if finish == "length" else "completed"
        form = None if body.text is None else body.text.format
        shown = {"type": "text"}
        if form is not None:
            shown = form.model_dump(exclude_none=True, by_alias=True)
        found = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._chat.model,
            "output": [] if finish is None else [self._message(status, text, logprobs)],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": shown},
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }
        if status == "incomplete":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        return found if block is None else found | {"valora": dict(block)}


def _filled(body: str, logprobs: Sequence[str]) -> str:
    """JSON of an answer or event with the log probabilities of its only text."""
    return filled(body, '"logprobs":[]', [f'"logprobs":[{",".join(logprobs)}]'])


def _part(text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    details = usage.get("prompt_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": details.get("cached_tokens", 0),
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
