"""Turns the fields of an HTTP request into a request to the engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from valora_serve.errors import DeadlineError, ImageError, RequestError, ServeError
from valora_serve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from PIL.Image import Image

    from valora_serve.server.api.schema import ChatRequest, CompletionRequest, Message, Url
    from valora_serve.server.context import ServerContext
    from valora_serve.server.media.reader import Pixels
    from valora_serve.types import Request, ServedModel

MOST_STOPS = 16


def sampling(
    body: ChatRequest | CompletionRequest,
    context: ServerContext,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Sampling parameters of a request.

    Args:
        body: The request.
        context: Limits and defaults of the server.
        max_tokens: Most tokens to generate.
        logprobs: Number of log probabilities per token; None for none.

    Raises:
        RequestError: A field exceeds a limit, or two fields contradict each other.
    """
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    if len(stop) > MOST_STOPS or not all(stop):
        raise RequestError(f"stop takes up to {MOST_STOPS} texts that are not empty")
    if (body.n or 1) > context.settings.max_n:
        raise RequestError(f"n is {body.n}, more than {context.settings.max_n}: ask for fewer")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options goes with stream: set stream, or leave it out")
    temperature = body.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=context.settings.temperature if temperature is None else temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=body.seed,
        stop=tuple(stop),
        logprobs=logprobs,
        ignore_eos=bool(body.ignore_eos),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=tuple((int(token), value) for token, value in (body.logit_bias or {}).items()),
    )


def schema_of(body: ChatRequest | CompletionRequest) -> tuple[bool, Any]:
    """Whether the answer must be JSON, and its schema (None for any object).

    Raises:
        RequestError: The format is json_schema, and the schema is missing.
    """
    form = body.response_format
    if form is None or form.type == "text":
        return False, None
    if form.type == "json_object":
        return True, None
    if form.json_schema is None:
        raise RequestError("response_format is json_schema, but holds none: put json_schema")
    return True, form.json_schema.schema_


def head_wanted(body: ChatRequest, model: ServedModel, as_json: bool) -> bool:
    """Whether the domain's head answers.

    Raises:
        RequestError: The head would answer, but the request asks for JSON.
    """
    if model.head is not None and body.valora.head and as_json:
        raise RequestError(
            f"{model.name} answers with its {model.head} head, which keeps to no response_format: "
            "set valora.head to false to generate"
        )
    return body.valora.head


def time_left(
    context: ServerContext, model: ServedModel, wanted: float | None, since: float
) -> float | None:
    """Seconds left until a request's deadline; None if it has none.

    Args:
        context: Deadlines of the server.
        model: Model that the request names.
        wanted: The request's own deadline in seconds, None for none.
        since: When the request arrived, in seconds of `time.monotonic`.

    Raises:
        DeadlineError: The deadline has passed.
    """
    deadline = context.service.deadline(model, wanted)
    if deadline is None:
        return None
    left = deadline - (time.monotonic() - since)
    if left <= 0:
        raise DeadlineError(f"The deadline of {deadline:g} s passed before the engine was asked")
    return left


async def read_messages(
    messages: Sequence[Message], context: ServerContext, pixels: Pixels
) -> tuple[list[dict[str, Any]] | None, list[Image], list[list[Image]]]:
    """Read the messages of a chat request.

    Returns:
        Turns for a chat template, and the images and videos in their order. The turns are None if
        the messages hold no text: the domain's own prompt is used then.

    Raises:
        ImageError: An image or video cannot be read, or there are too many.
        RequestError: The text is too long.
    """
    turns: list[dict[str, Any]] = []
    images: list[Coroutine[Any, Any, Image]] = []
    videos: list[Coroutine[Any, Any, list[Image]]] = []
    chars = 0
    try:
        for message in messages:
            role = "system" if message.role == "developer" else message.role
            if isinstance(message.content, str):
                chars += len(message.content)
                turns.append({"role": role, "content": message.content})
                continue
            parts: list[dict[str, Any]] = []
            for part in message.content:
                if part.type == "text":
                    chars += len(part.text)
                    parts.append({"type": "text", "text": part.text})
                elif part.type == "image_url":
                    images.append(context.media.image(_url(part.image_url), pixels))
                    parts.append({"type": "image"})
                elif part.type == "video_url":
                    videos.append(context.media.video(_url(part.video_url), pixels))
                    parts.append({"type": "video"})
                else:
                    urls = [_url(frame) for frame in part.frames]
                    videos.append(context.media.frames(urls, pixels))
                    parts.append({"type": "video"})
            turns.append({"role": role, "content": parts})
        check_text(chars, context)
        check_media(len(images) + len(videos), context, needed=not chars)
    except BaseException:
        for unread in (*images, *videos):
            unread.close()
        raise
    found = await gathered(*images, *videos)
    return turns if chars else None, found[: len(images)], found[len(images) :]


async def gathered(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results of several coroutines, in order; if one fails, the others are cancelled.

    Raises:
        ServeError: The first error of a coroutine.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
    except* ServeError as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


def check_text(chars: int, context: ServerContext) -> None:
    """Refuse a text that is too long to be tokenized.

    Raises:
        RequestError: The text is longer than max_prompt_chars.
    """
    most = context.settings.max_prompt_chars
    if chars > most:
        raise RequestError(f"The text has {chars} characters, more than {most}: send a shorter one")


def check_media(count: int, context: ServerContext, *, needed: bool) -> None:
    """Check the number of images and videos of a request.

    Args:
        count: Number of images and videos.
        context: Limits of the server.
        needed: Whether there must be at least one, because the request has no text.

    Raises:
        ImageError: There are more than max_images.
        RequestError: The request has neither text nor images.
    """
    if needed and not count:
        raise RequestError("messages hold no text and no image: ask something")
    most = context.settings.max_images
    if count > most:
        raise ImageError(f"The request has {count} images and videos, more than {most}: send fewer")


def _url(item: Url | str) -> str:
    return item if isinstance(item, str) else item.url


async def constrained(
    requests: list[Request], context: ServerContext, as_json: bool, schema: Any
) -> list[Request]:
    """Add a JSON constraint to each of the requests if `as_json` is set.

    Raises:
        RequestError: The schema is invalid or not supported.
    """
    if not as_json:
        return requests
    made = await context.grammars.json(schema, len(requests))
    return [
        replace(request, sampling=replace(request.sampling, constraint=constraint))
        for request, constraint in zip(requests, made, strict=True)
    ]
