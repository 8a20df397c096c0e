"""``/v1/responses``: OpenAI's newer form of chat, without state on the server."""

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve.errors import RequestError
from valora_serve.server.api import common, schema
from valora_serve.server.api.chat import Chat, begin
from valora_serve.server.context import ServerContext
from valora_serve.server.telemetry.logs import new_id

_SAME = ("model", "cache_salt", "temperature", "top_p", "tools", "tool_choice",
         "parallel_tool_calls", "store", "valora")  # fmt: skip
"""Fields that chat has, too."""


def router(context: ServerContext) -> APIRouter:
    """Route of the responses endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/responses",
        response_model=schema.ResponseAnswer,
        responses=common.STREAMED,
        summary="Answer a conversation, in the form of OpenAI's Responses API",
    )
    async def responses(request: Request, body: schema.ResponsesRequest) -> Response:
        chat = await begin(context, request, _as_chat(body))
        return await common.respond(_Responses(chat, body), stream=body.stream)

    return routes


def _as_chat(body: schema.ResponsesRequest) -> schema.ChatRequest:
    messages: list[schema.Message] = []
    if body.instructions is not None:
        messages.append(schema.Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.append(schema.Message(role="user", content=body.input))
    for item in [] if isinstance(body.input, str) else body.input:
        if isinstance(item, schema.Message):
            messages.append(item)
        elif isinstance(item, schema.ResponseInputResult):
            messages.append(schema.Message(role="tool", content=item.output))
        elif isinstance(item, schema.ResponseInputCall):  # of the assistant's message before it
            if not messages or messages[-1].role != "assistant":
                messages.append(schema.Message(role="assistant"))
            turn = messages[-1]
            turn.tool_calls = turn.tool_calls or []
            turn.tool_calls.append(schema.ToolCall(function=item))
    if not messages:
        raise RequestError("input holds only reasoning: send a message")
    logprobs = "message.output_text.logprobs" in (body.include or ())
    form = None if body.text is None else body.text.format
    wanted = schema.ResponseFormat(type=form.type, json_schema=form) if form else None
    if form and form.type == "json_schema" and form.schema_ is None:
        raise RequestError("text.format is json_schema, but holds no schema: put schema")
    return schema.ChatRequest.model_construct(  # what is in it is checked
        **{name: getattr(body, name) for name in _SAME},
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        response_format=wanted,
        stream=True,
        stream_options=schema.StreamOptions(include_usage=True),
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
    )


class _Responses:
    """The answer of a chat, whose chunks become items of output, and events that tell of them."""

    def __init__(self, chat: Chat, body: schema.ResponsesRequest) -> None:
        self._chat, self._body = chat, body
        self._id, self._created = f"resp_{new_id()}", time.time()
        self._items: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # text or arguments of the last item
        self._logprobs: list[Any] = []  # of the text
        self._unsent: list[Any] = []  # those of tokens that are no text yet
        self._number = 0  # of the next event

    async def json(self) -> bytes:
        async with contextlib.aclosing(self.events(stream=False)) as events:
            async for event in events:
                last = event
        return common.to_json(last["response"])

    async def events(self, *, stream: bool = True) -> AsyncGenerator[dict[str, Any], None]:
        finish, usage, block = "stop", None, None
        async with contextlib.aclosing(self._chat.events(stream=stream)) as chunks:
            async for chunk in chunks:
                if not self._number:  # only now, so that an earlier error has a status of its own
                    for kind in ("created", "in_progress"):
                        yield self._event(kind, response=self._response("in_progress"))
                usage, block = chunk.get("usage", usage), chunk.get("valora", block)
                for choice in chunk["choices"]:
                    finish = choice["finish_reason"] or finish
                    for event in self._push(choice):
                        yield event
        if not self._items:
            for event in self._begun(_message()):
                yield event
        status = "incomplete" if finish == "length" else "completed"
        for event in self._ended(status):
            yield event
        yield self._event(status, response=self._response(status, usage, block))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _push(self, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of the next part of an answer."""
        delta = choice["delta"]
        self._unsent += (choice.get("logprobs") or {}).get("content") or []
        text = delta.get("content")
        if text or (text is not None and self._unsent):
            if not self._items:
                yield from self._begun(_message())
            yield self._more(text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._ended("completed")
                yield from self._begun({
                    "id": f"fc_{new_id()}", "type": "function_call", "call_id": call["id"],
                    "name": call["function"]["name"], "arguments": "",
                })  # fmt: skip
            else:
                yield self._more(call["function"]["arguments"])

    def _begun(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._items.append(item)
        self._pieces.clear()
        item["status"] = "in_progress"
        yield self._event("output_item.added", output_index=len(self._items) - 1, item={**item})
        if "content" in item:
            yield self._event("content_part.added", **self._ids(), part=_part(""))

    def _ended(self, status: str) -> Iterator[dict[str, Any]]:
        """Events that end the last item, if there is one."""
        if not self._items:
            return
        if self._unsent and "content" in self._items[-1]:
            yield self._more("")
        self._unsent.clear()
        item, ids, text = self._items[-1], self._ids(), "".join(self._pieces)
        item["status"] = status
        if "arguments" in item:
            item["arguments"], name = text, item["name"]
            yield self._event("function_call_arguments.done", **ids, arguments=text, name=name)
        else:
            item["content"] = [_part(text, self._logprobs)]
            logprobs = {"text": text, "logprobs": self._logprobs}
            yield self._event("output_text.done", **ids, **logprobs)
            yield self._event("content_part.done", **ids, part=item["content"][0])
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def _more(self, delta: str) -> dict[str, Any]:
        self._pieces.append(delta)
        new, self._unsent = self._unsent, []
        if "arguments" in self._items[-1]:
            return self._event("function_call_arguments.delta", **self._ids(), delta=delta)
        self._logprobs += new
        return self._event("output_text.delta", **self._ids(), delta=delta, logprobs=new)

    def _ids(self) -> dict[str, Any]:
        item = self._items[-1]
        within = {"content_index": 0} if "content" in item else {}
        return {"item_id": item["id"], "output_index": len(self._items) - 1, **within}

    def _response(
        self, status: str, usage: Mapping[str, Any] | None = None, block: Any = None
    ) -> dict[str, Any]:
        body = self._body
        form = None if body.text is None else body.text.format
        shown = form.model_dump(exclude_none=True, by_alias=True) if form else {"type": "text"}
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        tools = [{"type": one.type} | one.function.model_dump() for one in body.tools or ()]
        found = {
            "id": self._id, "object": "response", "created_at": self._created, "status": status,
            "model": self._chat.arrival.model.name, "output": self._items, "error": None,
            "incomplete_details": cut, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "store": False, "temperature": body.temperature,
            "text": {"format": shown}, "tools": tools, "top_p": body.top_p,
            "tool_choice": (body.tool_choice or "auto") if tools else "none",
            "truncation": "disabled", "usage": None if usage is None else _usage(usage),
        }  # fmt: skip
        return found if block is None else found | {"valora": block}


def _message() -> dict[str, Any]:
    return {"id": f"msg_{new_id()}", "type": "message", "role": "assistant", "content": []}


def _part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": usage["total_tokens"],
    }  # fmt: skip
