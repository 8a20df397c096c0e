"""Turns the fields of an HTTP request into requests to the engine, and asks it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from PIL.Image import Image
from starlette.requests import Request as HttpRequest

from valora_serve.errors import DeadlineError, ImageError, RequestError, ServeError, TooLongError
from valora_serve.server.access.guard import caller
from valora_serve.server.api import schema
from valora_serve.server.api.domain_prompt import media_of
from valora_serve.server.api.tools import calls_as_text
from valora_serve.server.constrain import Grammar
from valora_serve.server.context import ServerContext
from valora_serve.server.gather import gathered
from valora_serve.types import Output, Request, SamplingParams, ServedModel

T = TypeVar("T")
AT_ONCE = 128
"""Most requests of one HTTP request that the engine has at a time: a thousand that are begun, or
end, together hold up the event loop for a third of a second."""
MAX_LOGPROBS = 200_000  # of an answer: 17 MB, which become JSON in 0.3 s while nothing else runs
_SAMPLING = (
    "min_tokens", "temperature", "top_p", "min_p", "seed", "ignore_eos", "frequency_penalty",
    "presence_penalty", "repetition_penalty",
)  # fmt: skip
_ROLES = {"developer": "system", "tool": "user", "function": "user"}
"""Roles of OpenAI's API by the ones that chat templates know."""


def sampling(
    body: schema.ChatRequest | schema.CompletionRequest,
    context: ServerContext,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echoed: Sequence[int] = (0,),
) -> SamplingParams:
    """Sampling parameters of a request; `echoed` is how many tokens each prompt scores."""
    count, most = body.n or 1, context.settings.max_n
    if logprobs is not None:
        limit = context.service.engine.context_length
        tokens = sum(min(one + (max_tokens or limit), limit) for one in echoed)
        asked = count * tokens * (logprobs + 1)
        if asked > MAX_LOGPROBS:
            raise RequestError(
                f"n, the prompts, max_tokens and the number of log probabilities ask for up to "
                f"{asked} of them, more than {MAX_LOGPROBS}: ask for fewer"
            )
    if (count := count * len(echoed)) > most:
        raise RequestError(f"{count} answers are asked for, more than {most}: ask for fewer")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options goes with stream: set stream, or leave it out")
    given = {"temperature": context.settings.temperature} | {
        name: value for name in _SAMPLING if (value := getattr(body, name)) is not None
    }
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        top_k=max(0, body.top_k or 0),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        logprobs=logprobs,
        logit_bias=tuple((int(token), value) for token, value in (body.logit_bias or {}).items()),
    )


def grammar_of(
    body: schema.ChatRequest | schema.CompletionRequest, context: ServerContext
) -> Grammar | None:
    """The grammar of the answer's format; None for free text."""
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar.json({"type": "object"})
    if form.json_schema is None:
        raise RequestError("response_format is json_schema, but holds none: put json_schema")
    wanted, strict = form.json_schema.schema_, form.json_schema.strict
    strict = bool(strict or context.settings.strict_schemas)
    return Grammar.json(True if wanted is None else wanted, strict=strict)


def check_head(model: ServedModel, *, as_json: bool, calls: bool) -> None:
    """Refuse what a domain's head cannot do."""
    if as_json or calls:
        what = "calls no tools" if calls else "keeps to no response_format"
        raise RequestError(
            f"{model.name} answers with its {model.head} head, which {what}: set valora.head to "
            "false to generate"
        )


class Arrival:
    """An HTTP request on its way to the engine; until it has ended, its models are not unloaded."""

    model: ServedModel
    named: dict[str, Any]

    def __init__(self, context: ServerContext, http: HttpRequest, wanted: float | None) -> None:
        self.context, self.http = context, http
        self.wanted, self.since = wanted, time.monotonic()

    async def find(
        self, body: schema.ChatRequest | schema.CompletionRequest | schema.EmbeddingRequest
    ) -> ServedModel:
        """Find, or load, the model of a request, or the first of its adapters with weights."""
        model = await self._found(body.model)
        mixed = [(await self._found(one.name), one.weight) for one in body.valora.adapters or ()]
        weights = tuple((one.name, weight) for one, weight in mixed)
        self.named = {"model": model.name, "adapters": weights, "cache_salt": body.cache_salt}
        self.model = mixed[0][0] if mixed else model
        self.http.state.facts["model"] = self.model.name
        return self.model

    async def _found(self, name: str | None) -> ServedModel:
        service, loader = self.context.service, self.context.on_request
        if loader is not None and name is not None and service.sees(name) and loader.allows(name):
            self.http.state.stack.enter_context(loader.using(name))
            if not service.serves(name) or loader.is_lost(name):
                doing = f"adapter {name} was loaded: ask again, as it is loaded all the same"
                await self.within(loader.load(name), doing, name)
        return service.model(name)

    def time_left(self, name: str | None = None) -> float | None:
        """Seconds left until the deadline, by the `name` of a model yet to load; None for none."""
        admission, spent = self.context.service.admission, time.monotonic() - self.since
        deadline = admission.deadline(name or self.model.name, self.wanted)
        if deadline is not None and deadline <= spent:
            raise DeadlineError(f"The deadline of {deadline:g} s has passed: set a later one")
        return None if deadline is None else deadline - spent

    async def within(
        self,
        work: Coroutine[Any, Any, T],
        doing: str = "its images were read: send smaller ones",
        name: str | None = None,
    ) -> T:
        """Run a coroutine until the deadline."""
        try:
            with contextlib.closing(work):  # which has not begun if the deadline has passed
                async with asyncio.timeout(self.time_left(name)):
                    return await work
        except TimeoutError as error:
            raise DeadlineError(
                f"The request's deadline passed while {doing}, or set a later deadline"
            ) from error

    async def constrained(self, requests: list[Request], grammar: Grammar | None) -> list[Request]:
        """The requests with a constraint each; as they are if there is no grammar."""
        if grammar is None:
            return requests
        client = caller.get() or (self.http.client.host if self.http.client else "")
        made = await self.within(
            self.context.grammars.constraints(grammar, len(requests), client),
            "its JSON schema was compiled: send a simpler one",
        )
        return [
            replace(request, sampling=replace(request.sampling, constraint=constraint))
            for request, constraint in zip(requests, made, strict=True)
        ]

    async def _ask(
        self, requests: Sequence[Request], give: Callable[[int, Output], None], *, stream: bool
    ) -> None:
        """Ask several requests, admitted together, which all end if one fails; `give` outputs."""
        left, service = self.time_left(), self.context.service
        requests = [replace(one, deadline=left, stream=stream) for one in requests]
        with service.admitted([(self.model, requests)]) as admitted:
            if isinstance(ticket := admitted[self.model.name], ServeError):
                raise ticket
            asking = (
                service.ask(ticket, request, partial(give, number))
                for number, request in enumerate(requests)
            )
            await gathered(*asking, at_once=AT_ONCE)

    async def outputs(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """Outputs of several requests as they come, each with the number of its request."""
        queue: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()
        asking = asyncio.ensure_future(
            self._ask(requests, lambda *found: queue.put_nowait(found), stream=True)
        )
        asking.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (item := await queue.get()) is not None:
                yield item
            await asking
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            del asking  # its error refers to this frame, which must not refer to it

    async def ask_all(self, requests: Sequence[Request]) -> list[Output]:
        """The whole answers to several requests."""
        found: dict[int, Output] = {}
        await self._ask(requests, found.__setitem__, stream=False)
        return [found[number] for number in range(len(requests))]


def numbered(request: Request, count: int) -> list[Request]:
    """`count` copies of a request, each with its own id and seed."""
    made, sampling = [], request.sampling
    for number in range(count):
        seed = sampling.seed
        if seed is not None and number:  # not that of any other seed's choice
            digest = blake2b(b"%d|%d" % (seed, number), digest_size=8).digest()
            seed = int.from_bytes(digest, signed=True)
        one = replace(sampling, seed=seed)
        made.append(replace(request, id=f"{request.id}-{number}", sampling=one))
    return made


async def read_messages(
    messages: Sequence[schema.Message], arrival: Arrival, told: str = ""
) -> tuple[list[dict[str, Any]] | None, list[Image], list[list[Image]]]:
    """Read the messages of a chat request, whose system prompt then ends with the text `told`.

    Returns turns for a chat template, None if they hold no text; the images; the videos.
    """
    turns, context = _turns_of(messages), arrival.context
    if told and turns[0]["role"] == "system":
        said, content = f"\n\n{told}", turns[0]["content"]
        turns[0]["content"] += said if isinstance(content, str) else [_text(said)]
    elif told:
        turns.insert(0, {"role": "system", "content": told})
    chars = sum(map(_chars, turns))
    check_text(chars, context)
    media = [part for message in messages for part in media_of(message)]
    if not media and not chars:
        raise RequestError("messages hold no text and no image: ask something")
    if len(media) > (limit := context.settings.max_images):
        raise ImageError(
            f"The request has {len(media)} images and videos, more than {limit}: send fewer"
        )
    reader = context.media
    pixels = arrival.http.state.stack.enter_context(reader.pixels())
    urls = [part.image_url for part in media if isinstance(part, schema.ImagePart)]
    reading = [
        reader.frames(part.frames, pixels)
        if isinstance(part, schema.FramesPart)
        else reader.video(part.video_url, pixels)
        for part in media
        if isinstance(part, schema.VideoPart | schema.FramesPart)
    ]
    images, *videos = await gathered(reader.images(urls, pixels), *reading)
    return turns if chars else None, images, videos


def _turns_of(messages: Sequence[schema.Message]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    follows = False  # whether the last message was a tool's result
    for number, message in enumerate(messages):
        content: Any = message.content
        if isinstance(content, list):
            content = list(map(_part, content))
        if message.role == "assistant":
            calls = calls_as_text(message)
            if not isinstance(content, list):
                content = "\n".join(text for text in (content, message.refusal, calls) if text)
            elif calls:
                content.append(_text(f"\n{calls}"))
        if content is None:
            raise RequestError(
                f"messages.{number}: content is null, which only an assistant's message may be: "
                "send a text"
            )
        result = message.role in ("tool", "function")
        if result:
            begin = "\n" * follows + "<tool_response>\n"
            inner = [_text(content)] if isinstance(content, str) else content
            content = [_text(begin), *inner, _text("\n</tool_response>")]
        if result and follows:  # results share a turn, as in Qwen's template
            turns[-1]["content"] += content
        else:
            turns.append({"role": _ROLES.get(message.role, message.role), "content": content})
        follows = result
    return turns


def _chars(turn: dict[str, Any]) -> int:
    content = turn["content"]
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _part(part: schema.ContentPart) -> dict[str, Any]:
    if isinstance(part, schema.TextPart):
        return _text(part.text)
    return {"type": "image" if isinstance(part, schema.ImagePart) else "video"}


def check_text(chars: int, context: ServerContext) -> None:
    """Refuse a text that is too long to be tokenized."""
    limit = context.settings.max_prompt_chars
    if chars > limit:
        raise TooLongError.told(
            context.service.engine.context_length,
            f"the text has {chars} characters, more than {limit}: send a shorter one",
        )
