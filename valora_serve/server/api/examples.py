"""``/v1/examples``: the golden examples of the served bundles, for people who want to try them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Path as PathField
from pydantic import Field
from starlette.responses import Response

from valora_data.contract.files import UnreadableError, read_bytes
from valora_serve.errors import UnknownModelError
from valora_serve.server.api.schema import Listed, ResponseBody
from valora_serve.server.context import ServerContext
from valora_serve.server.loading.golden import IMAGE_BYTES, Example, TeacherAnswer, read_examples


class ExampleCard(ResponseBody):
    """A golden example of a served domain."""

    domain: str
    number: int = Field(description="from 0, within the domain")
    video: bool = Field(description="whether the images are the frames of a video")
    question: str | None = Field(description="its own prompt; None for the domain's")
    images: list[str] = Field(description="paths of its images or frames, in order")
    teacher: TeacherAnswer | None = Field(
        default=None, description="the domain's small model; null if the bundle does not hold it"
    )


PNG = b"\x89PNG\r\n\x1a\n"  # first bytes of a file
_IMAGE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/png": {}}, "description": "The image, or a frame of the video"}
}


def router(context: ServerContext) -> APIRouter:
    """Routes of the examples."""
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/examples", summary="Examples of the domains")
    async def examples() -> Listed[ExampleCard]:
        found = await asyncio.to_thread(_by_domain, context)
        return Listed(data=[
            ExampleCard(
                domain=name, number=number, video=example.media == "video",
                question=example.question, teacher=example.teacher,
                images=[f"v1/examples/{name}/{number}/{at}" for at in range(len(example.files))],
            )
            for name, several in found.items()
            for number, example in enumerate(several)
        ])  # fmt: skip

    @routes.get(
        "/v1/examples/{domain}/{number}/{image}",
        responses=_IMAGE,
        response_class=Response,
        summary="An image of an example",
    )
    async def picture(
        domain: Annotated[str, PathField(description="name of a domain")],
        number: Annotated[int, PathField(ge=0, le=1000)],
        image: Annotated[int, PathField(ge=0, le=1000, description="index of the image or frame")],
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
    found: dict[str, list[Example]] = {model.name: [] for model in domains}
    for folder in sorted({model.root for model in domains}):
        try:
            examples = read_examples(Path(folder))
        except (UnreadableError, OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # checked when the bundle was loaded; since then somebody has changed it
        for example in examples:
            if example.domain in found and example.files:  # questions about documents have none
                found[example.domain].append(example)
    return {name: examples for name, examples in found.items() if examples}
