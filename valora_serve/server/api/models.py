"""Models, contexts and examples: what is served, and loading and unloading it at run time."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter
from fastapi import Path as InPath
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model
from starlette.responses import Response

from valora_data.contract.files import UnreadableError, read_bytes
from valora_serve.errors import UnknownModelError
from valora_serve.server.access.guard import Access, allow
from valora_serve.server.api.common import answer
from valora_serve.server.api.requests import check_text
from valora_serve.server.api.schema import Body, Done, Listed, Text, fields_of, optional
from valora_serve.server.context import ServerContext
from valora_serve.server.loading.golden import IMAGE_BYTES, Example, TeacherAnswer, read_examples
from valora_serve.server.service import last_part
from valora_serve.server.telemetry.metrics import adapter_states
from valora_serve.types import NewContext, ServedModel

MAX_BODY_BYTES = 64 * 1024  # names and paths only
PNG = b"\x89PNG\r\n\x1a\n"  # first bytes of a file
_Path = Annotated[str, Field(min_length=1, max_length=4096)]
_Name = Annotated[str | None, Field(max_length=256)]
_Size = Annotated[int, BeforeValidator(lambda size: size or 0)]
_NewName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class LoadAdapterRequest(Body):
    """Body of ``/v1/load_lora_adapter``."""

    lora_name: _NewName
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
    __config__=ConfigDict(from_attributes=True),
    **fields_of(
        ServedModel, "name", "prompted", "images", "max_tokens", "memory_bytes", "loaded_at"
    ),
)


class ModelCard(_Served):  # type: ignore[misc]
    """A model that requests can name: the base model, an adapter or a domain."""

    id: str = Field(validation_alias="name")
    object: Literal["model"] = "model"
    created: Annotated[int, BeforeValidator(int)] = Field(validation_alias="loaded_at")
    owned_by: str = "valora"
    root: Annotated[str, AfterValidator(last_part)]  # without folders of this machine
    kind: Literal["base", "adapter", "domain"]
    state: Literal["disk", "host", "device"] | None = optional(
        "where an adapter is; those on disk are read when they are named"
    )
    resolver: str | None = optional("kind of the source that a request loaded the adapter from")
    quarantined: str | None = None
    max_model_len: int = 0


class Loaded(BaseModel):
    """Response to a load: the models that were loaded."""

    status: Literal["ok"] = "ok"
    models: list[ModelCard]


def _disabled(context: ServerContext, verb: str) -> str | None:
    if context.settings.allow_runtime_loading:
        return None
    return f"This server {verb} nothing at run time: start it with --allow-runtime-loading"


def router(context: ServerContext) -> APIRouter:
    """Routes that list, load and unload models."""
    routes = APIRouter()
    engine, served, loader = context.service.engine, context.served, context.on_request
    disabled, whole = _disabled(context, "loads"), context.service.changed
    admin = allow(Access.ADMIN, max_body_bytes=MAX_BODY_BYTES, disabled=disabled)

    def card(model: ServedModel, **more: Any) -> ModelCard:
        found = {"max_model_len": engine.context_length, **more}
        made: ModelCard = ModelCard.model_validate(model).model_copy(update=found)
        return made

    def cards_of(models: Sequence[ServedModel]) -> list[ModelCard]:
        stats = engine.stats()
        states = adapter_states(models, stats)
        return [
            card(
                one, quarantined=stats.quarantined.get(one.name), state=states.get(one.name),
                resolver=None if loader is None else loader.source(one.name),
            )
            for one in models
        ]  # fmt: skip

    def on_disk() -> list[ModelCard]:
        """Cards of the adapters that the next request that names them loads from the cache."""
        found = [] if loader is None else loader.waiting()
        facts: dict[str, Any] = {"parent": last_part(engine.base), "loaded_at": time.time()}
        return [
            card(
                ServedModel(one.name, "adapter", one.name, adapter=one.name, **facts),
                state="disk", resolver=one.source,
            )
            for one in found
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
        return Loaded(models=cards_of([await whole(loading)]))

    @routes.post("/v1/unload_lora_adapter", tags=["loading"], summary="Unload an adapter")
    @admin
    async def unload_adapter(body: UnloadAdapterRequest) -> Done:
        await whole(served.unload("adapter", body.lora_name))
        return Done(message=f"adapter {body.lora_name} is no longer served")

    @routes.post("/v1/load_bundle", tags=["loading"], summary="Load a bundle with its domains")
    @admin
    async def load_bundle(body: LoadBundleRequest) -> Loaded:
        return Loaded(models=cards_of(await whole(served.load_bundle(body.bundle_path))))

    @routes.post("/v1/unload_bundle", tags=["loading"], summary="Unload a bundle")
    @admin
    async def unload_bundle(body: UnloadBundleRequest) -> Done:
        await whole(served.unload_bundle(body.bundle_name))
        return Done(message=f"bundle {body.bundle_name} is no longer served")

    return routes


class ContextRequest(Body):
    """Body of ``POST /v1/contexts``."""

    name: _NewName
    document: Text = Field(description="text of the document")
    form: Literal["prefix", "memory_tokens"] = Field(
        default="prefix",
        description="`prefix`: the document's own keys and values; `memory_tokens`: those that an "
        "encoder of a bundle makes of it",
    )
    tokens: int | None = optional("tokens that a prefix keeps; all by default", ge=1, le=2**20)
    encoder: _Name = optional("bundle/encoder; by default the only one")
    adapter: _Name = optional("adapter that answers; by default the base model")
    replace: bool = Field(default=False, description="replace the context of this name")


class ContextCard(BaseModel, from_attributes=True):
    """A context: a document that requests can ask about without sending it."""

    id: str = Field(validation_alias="name")
    object: Literal["context"] = "context"
    created: Annotated[int, BeforeValidator(int)] = Field(validation_alias="loaded_at")
    form: str = Field(description="prefix, memory_tokens or adapter")
    tokens: _Size = Field(description="tokens of its memory", validation_alias="memory_tokens")
    bytes: _Size = Field(description="size of its memory", validation_alias="memory_bytes")
    source_tokens: _Size = Field(description="tokens of the document")
    adapter: str | None = None
    decode_only: bool = False
    bundle: str | None = None
    accuracy: float | None = None
    required: float | None = None


def contexts(context: ServerContext) -> APIRouter:
    """Routes that list, make and delete contexts."""
    routes, served = APIRouter(tags=["contexts"]), context.served
    admin = allow(Access.ADMIN, disabled=_disabled(context, "makes"))

    @routes.get("/v1/contexts", summary="List the contexts that a request can name")
    async def all_contexts() -> Listed[ContextCard]:
        found = [model for model in context.service.models() if model.form]
        return Listed(data=list(map(ContextCard.model_validate, found)))

    @routes.post("/v1/contexts", summary="Make a context of a document, without training")
    @admin
    async def make(body: ContextRequest) -> ContextCard:
        check_text(len(body.document), context)
        wanted = NewContext(**body.model_dump(exclude={"replace"}))
        making = served.make_context(wanted, replace=body.replace)
        return ContextCard.model_validate(await context.service.changed(making))

    @routes.delete("/v1/contexts/{name}", summary="Delete a context that was made at run time")
    @admin
    async def delete(
        name: Annotated[str, InPath(description="name of a context", max_length=256)],
    ) -> Done:
        await context.service.changed(served.forget_context(name))
        return Done(message=f"context {name} is no longer served")

    return routes


class ExampleCard(BaseModel):
    """A golden example of a served domain."""

    domain: str
    number: int = Field(description="from 0, within the domain")
    video: bool = Field(description="whether the images are the frames of a video")
    question: str | None = Field(description="its own prompt; None for the domain's")
    images: list[str] = Field(description="paths of its images or frames, in order")
    teacher: TeacherAnswer | None = optional(
        "the domain's small model; null if the bundle does not hold it"
    )


def examples(context: ServerContext) -> APIRouter:
    """Routes of the examples."""
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/examples", summary="Examples of the domains")
    async def all_examples() -> Listed[ExampleCard]:
        found = await asyncio.to_thread(_by_domain, context)
        return Listed(data=[
            ExampleCard(
                domain=name, number=number, video=example.media == "video",
                question=example.question, teacher=example.teacher,
                images=[f"v1/examples/{quote(name, safe='')}/{number}/{at}"
                        for at in range(len(example.files))],
            )
            for name, several in found.items()
            for number, example in enumerate(several)
        ])  # fmt: skip

    @routes.get(
        "/v1/examples/{domain:path}/{number}/{image}", response_class=Response,
        responses={200: {"content": {"image/png": {}}, "description": "The image or frame"}},
        summary="An image of an example",
    )  # fmt: skip
    async def picture(
        domain: Annotated[str, InPath(description="name of a domain")],
        number: Annotated[int, InPath(ge=0, le=1000)],
        image: Annotated[int, InPath(ge=0, le=1000, description="index of the image or frame")],
    ) -> Response:
        found = (await asyncio.to_thread(_by_domain, context)).get(domain, [])
        files = found[number].files if number < len(found) else ()
        if image >= len(files):
            raise UnknownModelError(
                f"There is no such image of an example of {domain[:100]!a}: /v1/examples lists all"
            )
        content = await asyncio.to_thread(read_bytes, files[image], IMAGE_BYTES)
        if not content.startswith(PNG):  # a bundle may name any of its files, such as weights
            raise UnknownModelError(f"An image of an example of {domain[:100]!a} is no PNG file")
        kept = {"Cache-Control": "private, max-age=3600"}
        return Response(content, media_type="image/png", headers=kept)

    return routes


def _by_domain(context: ServerContext) -> dict[str, list[Example]]:
    """Examples of each served domain that has some; damaged ones are left out."""
    domains = [model for model in context.service.models() if model.kind == "domain"]
    names, found = {model.name for model in domains}, defaultdict(list)
    for folder in sorted({model.root for model in domains}):
        try:
            examples = read_examples(Path(folder))
        except (UnreadableError, OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # checked when the bundle was loaded; since then somebody has changed it
        for example in examples:
            if example.domain in names and example.files:  # questions about documents have none
                found[example.domain].append(example)
    return {name: found[name] for name in (model.name for model in domains) if name in found}
