"""``/v1/models``, and loading and unloading adapters and bundles at run time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, create_model
from starlette.responses import Response

from valora_serve.server.access.guard import Access, allow
from valora_serve.server.api.common import answer
from valora_serve.server.api.schema import Body, Done, Listed, ResponseBody, fields_of
from valora_serve.server.context import ServerContext
from valora_serve.server.service import without_folder
from valora_serve.server.telemetry.adapter_states import adapter_states
from valora_serve.types import ServedModel

MAX_BODY_BYTES = 64 * 1024  # names and paths only


_Path = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadAdapterRequest(Body):
    """Body of ``/v1/load_lora_adapter``."""

    lora_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    lora_path: _Path
    load_inplace: bool = Field(default=False, description="replace the adapter of this name")
    decode_only: bool = Field(
        default=False,
        description="apply it only to the last token of a prompt and those after it, so that "
        "prompts share the base model's prefix cache; for adapters that were trained so",
    )


class UnloadAdapterRequest(Body):
    """Body of ``/v1/unload_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=200)  # those that requests load, too


class LoadBundleRequest(Body):
    """Body of ``/v1/load_bundle``."""

    bundle_path: _Path


class UnloadBundleRequest(Body):
    """Body of ``/v1/unload_bundle``."""

    bundle_name: str = Field(min_length=1, max_length=256)


_Served: Any = create_model(
    "_Served",
    __base__=ResponseBody,
    **fields_of(
        ServedModel, "name", "prompted", "images", "max_tokens", "memory_bytes", "loaded_at"
    ),
)


class ModelCard(_Served):  # type: ignore[misc]
    """A model that requests can name: the base model, an adapter or a domain."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "valora"
    kind: Literal["base", "adapter", "domain"]
    state: Literal["disk", "host", "device"] | None = Field(
        default=None, description="where an adapter is; those on disk are read when they are named"
    )
    resolver: str | None = Field(
        default=None, description="kind of the source that a request loaded the adapter from"
    )
    quarantined: str | None = None
    max_model_len: int


class Loaded(ResponseBody):
    """Response to a load: the models that were loaded."""

    status: Literal["ok"] = "ok"
    models: list[ModelCard]


def card(model: ServedModel, context_length: int, **more: Any) -> ModelCard:
    """A served model in the API's format."""
    model = without_folder(model)
    fields = {name: getattr(model, name) for name in ModelCard.model_fields if hasattr(model, name)}
    return ModelCard(
        id=model.name, created=int(model.loaded_at), max_model_len=context_length, **fields | more
    )


def router(context: ServerContext) -> APIRouter:
    """Routes that list, load and unload models."""
    routes = APIRouter()
    engine, served, loader = context.service.engine, context.served, context.on_request
    disabled = None
    if not context.settings.allow_runtime_loading:
        disabled = "This server loads nothing at run time: start it with --allow-runtime-loading"
    admin = allow(Access.ADMIN, max_body_bytes=MAX_BODY_BYTES, disabled=disabled)
    whole = context.service.changed

    def cards_of(models: Sequence[ServedModel]) -> list[ModelCard]:
        stats = engine.stats()
        states = adapter_states(models, stats)
        return [
            card(
                one, engine.context_length,
                quarantined=stats.quarantined.get(one.name), state=states.get(one.name),
                resolver=None if loader is None else loader.source(one.name),
            )
            for one in models
        ]  # fmt: skip

    def on_disk() -> list[ModelCard]:
        """Cards of the adapters that the next request that names them loads from the cache."""
        return [
            card(
                ServedModel(
                    one.name, "adapter", one.name, engine.base, one.name, loaded_at=time.time()
                ),
                engine.context_length, state="disk", resolver=one.source,
            )
            for one in ([] if loader is None else loader.waiting())
            if context.service.sees(one.name)
        ]  # fmt: skip

    @routes.get(
        "/v1/models", tags=["OpenAI"], response_model=Listed[ModelCard],
        summary="List the models that a request can name",
    )  # fmt: skip
    async def models() -> Response:
        known, waiting = context.service.models(), on_disk()

        def made() -> bytes:
            listed = ",".join(one.model_dump_json() for one in cards_of(known) + waiting)
            return f'{{"object":"list","data":[{listed}]}}'.encode()

        return answer(await asyncio.to_thread(made))  # there may be thousands of adapters

    @routes.get("/v1/models/{model:path}", tags=["OpenAI"], summary="Get one model")
    async def one_model(model: str) -> ModelCard:
        if not (context.service.serves(model) and context.service.sees(model)):
            for waiting in on_disk():
                if waiting.id == model:
                    return waiting
        return cards_of([context.service.model(model)])[0]

    @routes.post("/v1/load_lora_adapter", tags=["loading"], summary="Load a PEFT adapter")
    @admin
    async def load_adapter(body: LoadAdapterRequest) -> Loaded:
        loading = served.load_adapter(
            body.lora_name, body.lora_path, replace=body.load_inplace, decode_only=body.decode_only
        )
        return Loaded(models=[card(await whole(loading), engine.context_length)])

    @routes.post("/v1/unload_lora_adapter", tags=["loading"], summary="Unload an adapter")
    @admin
    async def unload_adapter(body: UnloadAdapterRequest) -> Done:
        await whole(served.unload("adapter", body.lora_name))
        return Done(message=f"adapter {body.lora_name} is no longer served")

    @routes.post("/v1/load_bundle", tags=["loading"], summary="Load a bundle with its domains")
    @admin
    async def load_bundle(body: LoadBundleRequest) -> Loaded:
        made = await whole(served.load_bundle(body.bundle_path))
        return Loaded(models=[card(model, engine.context_length) for model in made])

    @routes.post("/v1/unload_bundle", tags=["loading"], summary="Unload a bundle")
    @admin
    async def unload_bundle(body: UnloadBundleRequest) -> Done:
        await whole(served.unload_bundle(body.bundle_name))
        return Done(message=f"bundle {body.bundle_name} is no longer served")

    return routes
