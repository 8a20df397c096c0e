"""``/v1/contexts``: documents that requests can ask about without sending them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Path

from valora_serve.server.access.rules import Access, allow
from valora_serve.server.api.common import error_answers
from valora_serve.server.api.requests import check_text
from valora_serve.server.api.schema import ContextCard, ContextList, ContextRequest, Done
from valora_serve.server.loading.changes import Changes
from valora_serve.server.service import last_part
from valora_serve.types import NewContext

if TYPE_CHECKING:
    from valora_serve.server.context import ServerContext
    from valora_serve.types import ServedModel


def card(model: ServedModel) -> ContextCard:
    """A context in the API's format."""
    assert model.form is not None
    return ContextCard(
        id=last_part(model.name),
        created=int(model.loaded_at),
        form=model.form,
        tokens=model.memory_tokens or 0,
        bytes=model.memory_bytes or 0,
        source_tokens=model.source_tokens or 0,
        adapter=model.adapter,
        decode_only=model.decode_only,
        bundle=model.bundle,
        accuracy=model.accuracy,
        required=model.required,
    )


def router(context: ServerContext) -> APIRouter:
    """Routes that list, make and delete contexts."""
    routes = APIRouter(tags=["contexts"], responses=error_answers())
    engine, served = context.service.engine, context.served
    disabled = None
    if not context.settings.allow_runtime_loading:
        disabled = "This server makes nothing at run time: start it with --allow-runtime-loading"
    admin = allow(Access.ADMIN, disabled=disabled)
    changes = Changes(context.service)

    @routes.get("/v1/contexts", summary="List the contexts that a request can name")
    async def contexts() -> ContextList:
        return ContextList(data=[card(model) for model in engine.models() if model.form])

    @routes.post("/v1/contexts", summary="Make a context of a document, without training")
    @admin
    async def make(body: ContextRequest) -> ContextCard:
        check_text(len(body.document), context)
        wanted = NewContext(
            name=body.name,
            document=body.document,
            form=body.form,
            tokens=body.tokens,
            encoder=body.encoder,
            adapter=body.adapter,
        )
        return card(await changes.whole(served.make_context(wanted, replace=body.replace)))

    @routes.delete("/v1/contexts/{name}", summary="Delete a context that was made at run time")
    @admin
    async def delete(
        name: Annotated[str, Path(description="name of a context", max_length=256)],
    ) -> Done:
        await changes.whole(served.forget_context(name))
        return Done(message=f"context {name} is no longer served")

    return routes
