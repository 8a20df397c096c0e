"""``/v1/embeddings``: last hidden states of texts, or of a conversation with images."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve import types
from valora_serve.errors import RequestError, ServeError
from valora_serve.server.api.common import error_answers
from valora_serve.server.api.requests import (
    Arrival,
    check_text,
    read_messages,
)
from valora_serve.server.api.schema import EmbeddingAnswer, EmbeddingRequest
from valora_serve.server.gather import until_disconnect
from valora_serve.server.telemetry.logs import new_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from valora_serve.server.context import ServerContext
    from valora_serve.types import Output, ServedModel


def router(context: ServerContext) -> APIRouter:
    """Route of the embeddings endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/embeddings",
        response_model=EmbeddingAnswer,
        responses=error_answers(),
        summary="Embed texts, or a conversation with images",
    )
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        arrival = Arrival(context, request, body.valora.deadline)
        await arrival.find(body)
        prompts = await arrival.within(_prompts(context, request, body))
        common = types.Request(
            id="", **arrival.named, embed=True, deadline=arrival.time_left(),
            cache_salt=body.cache_salt,
        )  # fmt: skip
        identity = f"embd-{new_id()}"
        requests = [
            replace(common, id=f"{identity}-{number}", **prompt)
            for number, prompt in enumerate(prompts)
        ]
        return await until_disconnect(request.receive, _answer(arrival, requests, body))

    return routes


async def _prompts(
    context: ServerContext, request: Request, body: EmbeddingRequest
) -> list[dict[str, Any]]:
    """What is embedded, as fields of requests to the engine."""
    if (body.input is None) == (body.messages is None):
        raise RequestError("Send input, which are texts or tokens, or messages: one of them")
    if body.messages is not None:
        pixels = request.state.stack.enter_context(context.media.pixels())
        turns, images, videos = await read_messages(body.messages, context, pixels)
        if turns is None:
            parts = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
            turns = [{"role": "user", "content": parts}]
        return [{"messages": turns, "images": images, "videos": videos}]
    several: list[Any] = [body.input] if isinstance(body.input, str) else list(body.input or ())
    if several and isinstance(several[0], int):
        several = [several]
    if not several or not all(several):
        raise RequestError("input is empty, or holds an empty text: send a text, or tokens")
    most = context.settings.max_waiting
    if len(several) > most:
        raise RequestError(f"input holds {len(several)} texts, more than {most}: send fewer")
    check_text(sum(len(item) for item in several), context)
    return [
        {"text": item} if isinstance(item, str) else {"token_ids": tuple(item)} for item in several
    ]


async def _answer(
    arrival: Arrival, requests: Sequence[types.Request], body: EmbeddingRequest
) -> Response:
    model, answers = arrival.model, await arrival.ask_all(requests)
    lasts = [outputs[-1] for outputs in answers]
    width = len(_vector(lasts[0], model))
    if body.dimensions not in (None, width):
        raise RequestError(
            f"dimensions is {body.dimensions}, but embeddings of {model.name} have {width}, and "
            "shorter ones were not trained: leave it out"
        )
    tokens = sum(last.usage.prompt for last in lasts if last.usage is not None)
    # A thread, as many long vectors take seconds.
    content = await asyncio.to_thread(
        _encoded, lasts, model, tokens, body.encoding_format == "base64"
    )
    return Response(content, media_type="application/json")


def _vector(last: Output, model: ServedModel) -> NDArray[np.float32]:
    """[width] float32 of length 1."""
    assert last.head is not None
    assert last.head.logits is not None
    hidden = last.head.logits[0].astype(np.float64)
    length = float(np.sqrt((hidden**2).sum()))
    if not np.isfinite(length):
        raise ServeError(f"The hidden state of {model.name} is not finite: check the adapter")
    vector: NDArray[np.float32] = (hidden / max(length, 1e-12)).astype(np.float32)
    return vector


def _encoded(lasts: Sequence[Output], model: ServedModel, tokens: int, as_text: bool) -> str:
    """The response as JSON, one vector at a time."""
    data = []
    for number, last in enumerate(lasts):
        vector = _vector(last, model)
        shown: Any = vector.tolist()
        if as_text:
            shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append(json.dumps({"object": "embedding", "index": number, "embedding": shown}))
    usage = json.dumps({"prompt_tokens": tokens, "total_tokens": tokens})
    listed = ",".join(data)
    return f'{{"object":"list","data":[{listed}],"model":{json.dumps(model.name)},"usage":{usage}}}'
