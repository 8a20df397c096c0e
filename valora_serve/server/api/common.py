"""What endpoints share: declarations and parts of responses, and server-sent events."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, ClassVar

import pydantic_core
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from valora_data.contract.results import BoxesResult
from valora_serve import types
from valora_serve.errors import CancelledRequestError, DrainingError, ServeError
from valora_serve.server.api.requests import Arrival
from valora_serve.server.api.schema import ErrorAnswer, TokenDetails, UsageAnswer, ValoraAnswer
from valora_serve.server.errors import DRAINED, error_body
from valora_serve.server.gather import until_disconnect
from valora_serve.server.telemetry import logs
from valora_serve.types import Finish, Logprob, Output, TokenLogprobs, Usage

MIN_LOGPROB = -9999.0  # as in OpenAI's responses
_SAID: dict[int, str] = {}
for _kind in ServeError.__subclasses__():
    _text = (_kind.__doc__ or "").partition("\n")[0]
    _SAID[_kind.status] = f"{_SAID.get(_kind.status, '')} {_text}".strip()
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": _ERROR}
    for status, text in _SAID.items()
    if status != 500
}
REFUSALS[400] = {"model": ErrorAnswer, "description": _SAID[400]}
"""OpenAPI declarations of the errors of all routes but open ones; the model once, as FastAPI builds
a validator wherever it is named, 27 ms for all routes."""
_EVENT = {  # as tools that check streams expect
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
    "description": "server-sent events: a chunk as JSON, or [DONE]",
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer", "content": {"text/event-stream": {"schema": _EVENT}}}
}
"""OpenAPI declaration of a route whose answer may be streamed."""


def answer(body: BaseModel | bytes) -> Response:
    """JSON response of a model, or of JSON."""
    content = body if isinstance(body, bytes) else body.model_dump_json()
    return Response(content, media_type="application/json")


async def respond(made: Any, *, stream: bool | None) -> Response:
    """An answer as events, or as JSON once it is complete."""
    if not stream:
        return answer(await made.json())
    events = made.events()
    return EventStream(await anext(events), events)  # an earlier error has a status of its own


@dataclass(eq=False)
class Answer:
    """An answer of OpenAI's API, complete or streamed, to one request, made of several outputs."""

    object: ClassVar[str]
    chunk: ClassVar[str]  # the object of an event
    arrival: Arrival
    requests: Sequence[types.Request]
    body: Any
    id: str
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)
    prompts: int = field(default=1, kw_only=True)  # each with as many answers as the others
    each: int = field(default=1, kw_only=True)  # requests of a choice, each about an image
    sizes: Sequence[tuple[int, int]] = field(default=(), kw_only=True)  # of the images
    warnings: Sequence[str] = field(default=(), kw_only=True)

    async def choices(self, number: int, output: Output) -> list[dict[str, Any]]:
        """What is new of a choice, for an event each."""
        raise NotImplementedError

    async def choice(self, number: int, output: Output) -> dict[str, Any]:
        """A whole choice."""
        return (await self.choices(number, output))[0]

    async def _answers(self) -> list[Output]:
        lasts, each = await self.arrival.ask_all(self.requests), self.each
        if each == 1:
            return lasts
        return [_about_all(lasts[at : at + each]) for at in range(0, len(lasts), each)]

    async def _outputs(self, *, stream: bool) -> AsyncGenerator[tuple[int, Output], None]:
        """Outputs as they come, each with the number of its choice."""
        if stream and self.each == 1:
            async with contextlib.aclosing(self.arrival.outputs(self.requests)) as outputs:
                async for found in outputs:
                    yield found
        else:
            for found in enumerate(await self._answers()):
                yield found

    async def json(self) -> bytes:
        """Wait for the whole answer, as JSON."""
        lasts = await self._answers()
        choices = [await self.choice(*one) for one in enumerate(lasts)]
        usage, block = self.used(lasts).model_dump(), self._block(lasts[0]).model_dump()
        made = self._part(choices, usage=usage, valora=block)
        few = self.requests[0].sampling.logprobs is None
        return to_json(made) if few else await asyncio.to_thread(to_json, made)

    async def events(self, *, stream: bool = True) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in chunks; `stream` is whether they come before it is complete."""
        lasts: dict[int, Output] = {}
        async with contextlib.aclosing(self._outputs(stream=stream)) as outputs:
            async for number, output in outputs:
                if output.finish is not None:
                    lasts[number] = output
                for choice in await self.choices(number, output):
                    event = self._part([choice], object=self.chunk)
                    if choice["finish_reason"] is not None:
                        event["valora"] = self._block(output).model_dump(exclude_none=True)
                    yield event
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            used = self.used([lasts[number] for number in sorted(lasts)])
            yield self._part([], object=self.chunk, usage=used.model_dump())

    def used(self, lasts: Sequence[Output]) -> UsageAnswer:
        """Token counts; a prompt with several answers counts once."""
        return usage(lasts, self.prompts)

    def _part(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id, "object": self.object, "created": self.created,
            "model": self.arrival.model.name, "choices": choices, **more,
        }  # fmt: skip

    def _block(self, last: Output) -> ValoraAnswer:
        """The field ``valora``: model, mode and times, and the head's result."""
        head, times, model = last.head, last.times, self.arrival.model
        fields: dict[str, Any] = {}
        if head is not None:
            fields = {"kind": head.kind, **head.prompt_fields(self.sizes)}
        if times is not None and times.started is not None and times.finished is not None:
            fields["queue_seconds"] = times.started - times.arrival
            fields["seconds"] = times.finished - times.arrival
        mode = None if last.mode is None else str(last.mode)
        return ValoraAnswer(
            model=model.name, adapter=model.adapter, bundle=model.bundle, mode=mode,
            warnings=list(self.warnings), **fields,
        )  # fmt: skip


def finish_reason(last: Output, *, call: bool = False) -> str:
    """OpenAI's name of the reason why an answer ended."""
    if call and last.finish is Finish.STOP:
        return "tool_calls"
    return "length" if last.finish is Finish.LENGTH else "stop"


def usage(lasts: Iterable[Output], prompts: int = 1) -> UsageAnswer:
    """Token counts of a response; a prompt with several answers counts once."""
    used = [last.usage for last in lasts if last.usage is not None]
    firsts = used[:: max(1, len(used) // prompts)]
    prompt, completion = sum(one.prompt for one in firsts), sum(one.completion for one in used)
    cached, image = sum(one.cached for one in firsts), sum(one.image for one in firsts)
    return UsageAnswer(
        prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
        prompt_tokens_details=TokenDetails(cached_tokens=cached, image_tokens=image),
    )  # fmt: skip


def _about_all(lasts: Sequence[Output]) -> Output:
    """The answer to several images, of which each was a request of its own."""
    heads = [last.head for last in lasts if isinstance(last.head, BoxesResult)]
    used = [last.usage for last in lasts if last.usage is not None]
    times = [last.times for last in lasts if last.times is not None]
    return replace(
        lasts[0],
        head=replace(heads[0], detections=tuple(one for head in heads for one in head.detections)),
        usage=Usage(*map(sum, zip(*map(astuple, used), strict=True))),
        times=max(times, key=lambda item: item.finished or 0.0, default=None),
    )


def json_logprob(value: float) -> float:
    """A log probability as JSON can hold it, which knows neither infinity nor NaN."""
    return value if MIN_LOGPROB < value < math.inf else MIN_LOGPROB


def chat_logprobs(items: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """Log probabilities in the chat endpoint's format, each a `TokenLogprob` as a dictionary."""

    def one(item: Logprob) -> dict[str, Any]:
        raw = None if item.raw is None else list(item.raw)
        return {"token": item.text, "logprob": json_logprob(item.logprob), "bytes": raw}

    return [one(item.chosen) | {"top_logprobs": list(map(one, item.top))} for item in items]


def to_json(body: dict[str, Any]) -> bytes:
    """An answer or event as JSON in ASCII, as clients split streams at Unicode's line ends, too."""
    return pydantic_core.to_json(body, ensure_ascii=True)


class EventStream(Response):
    """Streamed response; the request is cancelled when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], others: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._others = first, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        # A client that disconnected gets no response.
        with contextlib.suppress(CancelledRequestError):
            try:
                await until_disconnect(receive, self._stream(send))
            except asyncio.CancelledError:  # as uvicorn does with what runs after the drain
                await end_stream(send, DrainingError(DRAINED))

    async def _stream(self, send: Send) -> None:
        failed, start = None, {"status": 200, "headers": self.raw_headers}
        async with contextlib.aclosing(self._others) as events:
            try:
                await send({"type": "http.response.start", **start})
                await send(_body(self._first))
                async for event in events:
                    await send(_body(event))
            except ServeError as error:
                failed = error
        await end_stream(send, failed)


async def end_stream(send: Send, error: ServeError | None) -> None:
    """End a stream of events, with an error as the last one if there is one."""
    if error is not None:
        logs.LOG.warning("%s", error)
        await send(_body({"error": error_body(error)}))
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _body(event: dict[str, Any]) -> dict[str, Any]:
    name = f"event: {event['type']}\n" if "type" in event else ""
    body = name.encode() + b"data: " + to_json(event) + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}
