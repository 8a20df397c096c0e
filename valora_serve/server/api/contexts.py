"""``/v1/contexts``: documents that requests can ask about without sending them."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from valora_serve.server.access.guard import Access, allow
from valora_serve.server.api.requests import check_text
from valora_serve.server.api.schema import Body, Done, Listed, ResponseBody, Text
from valora_serve.server.context import ServerContext
from valora_serve.server.service import last_part
from valora_serve.types import NewContext

_Name = Annotated[str | None, Field(max_length=256)]
_Size = Annotated[int, BeforeValidator(lambda size: size or 0)]


class ContextRequest(Body):
    """Body of ``POST /v1/contexts``."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    document: Text = Field(description="text of the document")
    form: Literal["prefix", "memory_tokens"] = Field(
        default="prefix",
        description="`prefix`: the document's own keys and values; `memory_tokens`: those that an "
        "encoder of a bundle makes of it",
    )
    tokens: int | None = Field(
        default=None, ge=1, le=2**20, description="tokens that a prefix keeps; all by default"
    )
    encoder: _Name = Field(default=None, description="bundle/encoder; by default the only one")
    adapter: _Name = Field(
        default=None, description="adapter that answers; by default the base model"
    )
    replace: bool = Field(default=False, description="replace the context of this name")


class ContextCard(ResponseBody):
    """A context: a document that requests can ask about without sending it."""

    model_config = ConfigDict(from_attributes=True)

    id: Annotated[str, AfterValidator(last_part)] = Field(validation_alias="name")
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


def router(context: ServerContext) -> APIRouter:
    """Routes that list, make and delete contexts."""
    routes = APIRouter(tags=["contexts"])
    served = context.served
    disabled = None
    if not context.settings.allow_runtime_loading:
        disabled = "This server makes nothing at run time: start it with --allow-runtime-loading"
    admin = allow(Access.ADMIN, disabled=disabled)

    @routes.get("/v1/contexts", summary="List the contexts that a request can name")
    async def contexts() -> Listed[ContextCard]:
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
        name: Annotated[str, Path(description="name of a context", max_length=256)],
    ) -> Done:
        await context.service.changed(served.forget_context(name))
        return Done(message=f"context {name} is no longer served")

    return routes
