"""Turns the engine's outputs into the parts of HTTP responses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from valora_data.contract.results import BoxesResult
from valora_serve.errors import RequestError
from valora_serve.server.api.schema import (
    TokenDetails,
    UsageAnswer,
    ValoraAnswer,
)
from valora_serve.types import Finish, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from valora_serve.types import Logprob, Output, ServedModel, TokenLogprobs

_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
LEAST_LOGPROB = -9999.0
"""Smallest log probability in responses."""


def finish_reason(last: Output, *, call: bool = False) -> str:
    """OpenAI's name of the reason why an answer ended."""
    if call and last.finish is Finish.STOP:
        return "tool_calls"
    return "length" if last.finish is Finish.LENGTH else "stop"


def usage(lasts: Iterable[Output], prompts: int = 1) -> UsageAnswer:
    """Token counts of a response; a prompt with several answers counts once."""
    used = [last.usage for last in lasts if last.usage is not None]
    firsts = used[:: max(1, len(used) // prompts)]
    prompt = sum(item.prompt for item in firsts)
    completion = sum(item.completion for item in used)
    return UsageAnswer(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=TokenDetails(
            cached_tokens=sum(item.cached for item in firsts),
            image_tokens=sum(item.image for item in firsts),
        ),
    )


def valora_block(
    model: ServedModel,
    last: Output,
    sizes: Sequence[tuple[int, int]],
    warnings: Sequence[str] = (),
) -> ValoraAnswer:
    """The response's field ``valora``: model, mode and times, and the head's result."""
    head, times = last.head, last.times
    fields: dict[str, Any] = {}
    if head is not None:
        fields = {"kind": head.kind, **head.prompt_fields(sizes)}
    if times is not None and times.started is not None and times.finished is not None:
        fields["queue_seconds"] = times.started - times.arrival
        fields["seconds"] = times.finished - times.arrival
    return ValoraAnswer(
        model=model.name,
        adapter=model.adapter,
        bundle=model.bundle,
        mode=str(last.mode) if last.mode is not None else None,
        warnings=list(warnings),
        **fields,
    )


def joined(lasts: Sequence[Output]) -> Output:
    """The answer to several images, of which each was a request of its own."""
    first = lasts[0]
    if len(lasts) == 1:
        return first
    heads = [last.head for last in lasts if isinstance(last.head, BoxesResult)]
    if len(heads) < len(lasts):
        raise RequestError("This domain's head reads one image at a time: send one in a request")
    used = [last.usage for last in lasts if last.usage is not None]
    times = [last.times for last in lasts if last.times is not None]
    return replace(
        first,
        head=replace(heads[0], detections=tuple(one for head in heads for one in head.detections)),
        usage=Usage(
            sum(item.prompt for item in used),
            sum(item.completion for item in used),
            sum(item.image for item in used),
            sum(item.cached for item in used),
        ),
        times=max(times, key=lambda item: item.finished or 0.0, default=None),
    )


def chat_logprobs(items: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """Log probabilities in the chat endpoint's format, each a `TokenLogprob` as a dictionary.

    There may be hundreds of thousands in an answer, which models would hold in many objects.
    """
    return [_one(item.chosen) | {"top_logprobs": [_one(top) for top in item.top]} for item in items]


def items_json(items: list[Any]) -> str:
    """Items as JSON, separated by commas: what may be put into a list of an answer."""
    return _JSON.encode(items)[1:-1]


def filled(body: str, place: str, contents: Sequence[str]) -> str:
    """JSON of an answer whose large parts are JSON already.

    An answer with all of them would be validated and written in one go, which nothing interrupts.
    """
    # The places come first of all: JSON escapes quotes in texts, so that none holds `place`.
    texts = body.split(place, len(contents))
    parts = [texts[0]]
    for content, text in zip(contents, texts[1:], strict=True):
        parts += [content, text]
    return "".join(parts)


def json_logprob(value: float) -> float:
    """A log probability as JSON can hold it, which knows neither infinity nor NaN.

    OpenAI, too, gives -9999 for tokens that cannot come next.
    """
    return value if LEAST_LOGPROB < value < math.inf else LEAST_LOGPROB


def _one(item: Logprob) -> dict[str, Any]:
    value = json_logprob(item.logprob)
    raw = None if item.raw is None else list(item.raw)
    return {"token": item.text, "logprob": value, "bytes": raw}
