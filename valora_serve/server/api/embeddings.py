"""``/v1/embeddings``: last hidden states of texts, or of a conversation with images."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve import types
from valora_serve.errors import RequestError, ServeError
from valora_serve.server.api.common import answer
from valora_serve.server.api.requests import Arrival, as_prompt, read_messages, several_of
from valora_serve.server.api.schema import EmbeddingAnswer, EmbeddingRequest
from valora_serve.server.context import ServerContext
from valora_serve.server.gather import until_disconnect
from valora_serve.server.telemetry.logs import new_id
from valora_serve.types import Output


def router(context: ServerContext) -> APIRouter:
    """Route of the embeddings endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/embeddings",
        response_model=EmbeddingAnswer,
        summary="Embed texts, or a conversation with images",
    )
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        arrival = Arrival(context, request, body.valora.deadline)
        await arrival.find(body)
        prompts = await arrival.within(_prompts(context, request, body))
        common = {"embed": True, "deadline": arrival.time_left(), **arrival.named}
        identity = f"embd-{new_id()}"
        requests = [
            types.Request(f"{identity}-{number}", **common, **prompt)
            for number, prompt in enumerate(prompts)
        ]
        lasts = await until_disconnect(request.receive, arrival.ask_all(requests))
        # A thread, as many long vectors take seconds.
        return answer(await asyncio.to_thread(_encoded, lasts, arrival.model.name, body))

    return routes


async def _prompts(
    context: ServerContext, request: Request, body: EmbeddingRequest
) -> list[dict[str, Any]]:
    if (body.input is None) == (body.messages is None):
        raise RequestError("Send input, which are texts or tokens, or messages: one of them")
    if body.messages is None:
        texts = several_of(body.input or [], "input", context.settings.max_waiting, context)
        return list(map(as_prompt, texts))
    pixels = request.state.stack.enter_context(context.media.pixels())
    turns, images, videos = await read_messages(body.messages, context, pixels)
    if turns is None:
        parts = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
        turns = [{"role": "user", "content": parts}]
    return [{"messages": turns, "images": images, "videos": videos}]


def _encoded(lasts: Sequence[Output], model: str, body: EmbeddingRequest) -> bytes:
    data = []
    for number, last in enumerate(lasts):
        assert last.head is not None
        assert last.head.logits is not None
        hidden = last.head.logits[0].astype(np.float64)
        length, width = float(np.sqrt((hidden**2).sum())), len(hidden)
        if not np.isfinite(length):
            raise ServeError(f"The hidden state of {model} is not finite: check the adapter")
        if body.dimensions not in (None, width):
            raise RequestError(
                f"dimensions is {body.dimensions}, but embeddings of {model} have {width}, and "
                "shorter ones were not trained: leave it out"
            )
        vector = (hidden / max(length, 1e-12)).astype("<f4")
        shown: Any = vector.tolist()
        if body.encoding_format == "base64":
            shown = base64.b64encode(vector.tobytes()).decode()
        data.append(json.dumps({"object": "embedding", "index": number, "embedding": shown}))
    tokens = sum(last.usage.prompt for last in lasts if last.usage is not None)
    rest = {"model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return f'{{"object":"list","data":[{",".join(data)}],{json.dumps(rest)[1:]}'.encode()
