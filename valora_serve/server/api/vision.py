"""``/v1/vision``: images in, labels or boxes of one domain or of several out."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Request
from PIL.Image import Image
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import Response

from valora_serve import types
from valora_serve.errors import RequestError, ServeError, UnknownModelError
from valora_serve.server.access.guard import JSON, Access, allow
from valora_serve.server.api import schema
from valora_serve.server.api.common import answer, usage
from valora_serve.server.api.domain_prompt import check_measured_media, question_of
from valora_serve.server.api.requests import Arrival, check_text
from valora_serve.server.bodies import LARGE_BYTES
from valora_serve.server.context import ServerContext
from valora_serve.server.errors import error_body, invalid
from valora_serve.server.gather import gathered
from valora_serve.server.media.fetch import MediaUrl
from valora_serve.server.service import Ticket, domain_of
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry.logs import new_id
from valora_serve.types import Output, SamplingParams, ServedModel, short_name

K = TypeVar("K", bound=schema.VisionRequest)
_FORM = "multipart/form-data"
_FILES = ("image", "images", "video", "frames")
_PIECE = 2**18  # bytes of a form that are parsed at a time; other threads run in between


@cache
def _declared(kind: type[schema.VisionRequest]) -> dict[str, Any]:
    """OpenAPI declaration of the bodies: JSON, or a form with files in place of URLs."""
    declared = kind.model_json_schema()
    file = {"type": "string", "format": "binary"}
    fields = declared["properties"] | {"video": file} | {
        name: {"type": "array", "items": file, "description": f"files; {said}"}
        for name, said in (("image", "each gets its own result"), ("frames", "of a video"))
    }  # fmt: skip
    del fields["images"]
    if "domains" in fields:
        fields["domains"] = {"type": "string", "description": "names, separated by commas, or `*`"}
    form = declared | {"properties": fields}
    content = {JSON: {"schema": declared}, _FORM: {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


def router(context: ServerContext) -> APIRouter:
    """Routes of the vision endpoint."""
    routes = APIRouter(tags=["vision"])

    @routes.post(
        "/v1/vision/{domain:path}",  # whose name may hold slashes
        response_model=schema.VisionAnswer,
        openapi_extra=_declared(schema.VisionRequest),
        summary="Ask a domain about images, or a video",
    )
    @allow(Access.KEYED, content_types=(JSON, _FORM))
    async def vision(
        request: Request, domain: Annotated[str, Path(description="name of a domain")]
    ) -> Response:
        since, name = time.monotonic(), domain_of(context.service.domains(), domain).name
        fields = await _fields(request, context, schema.VisionRequest)
        return answer((await looked(context, request, fields, [name], since))[name])

    @routes.post(
        "/v1/vision",
        response_model=schema.LookAnswer,
        openapi_extra=_declared(schema.LookRequest),
        summary="Ask several domains about the same images, or a video, at once",
    )
    @allow(Access.KEYED, content_types=(JSON, _FORM))
    async def look(request: Request) -> Response:
        since = time.monotonic()
        fields = await _fields(request, context, schema.LookRequest)
        found = await looked(context, request, fields, fields.domains, since)
        identity, seconds = f"vision-{new_id()}", time.monotonic() - since
        made = {"id": identity, "created": int(time.time()), "domains": found, "seconds": seconds}
        return answer(schema.LookAnswer.model_validate(made))

    return routes


async def looked(
    context: ServerContext,
    http: Request,
    fields: schema.VisionRequest,
    names: Sequence[str],
    since: float,
    chat: SamplingParams | None = None,
) -> dict[str, schema.VisionAnswer | schema.ErrorAnswer]:
    """An answer for each domain, or its error, raised if all fail.

    `chat`: sampling of a chat, in which domains with a prompt of their own are asked no other.
    """
    _check_media(context, fields)
    service = context.service
    arrivals: dict[str, Arrival] = {}
    errors: dict[str, ServeError] = {}
    # Once, as there may be thousands, and a thousand are named.
    domains, bundles = service.domains(), bundles_of(context)
    words = (fields.prompt or "").strip()
    bundles["*"] = [
        model for model in domains.values() if model.kind == "domain"
        and model.reads(video=not fields.images) and (words or not model.takes_words)
    ]  # fmt: skip
    for name in dict.fromkeys(names):
        try:
            for model in bundles[name] if name in bundles else [domain_of(domains, name)]:
                arrivals[model.name] = arrival = Arrival(context, http, fields.deadline)
                arrival.model, arrival.since = model, since
                if context.on_request is not None:
                    http.state.stack.enter_context(context.on_request.using(model.name))
        except ServeError as error:
            errors[name] = error
    if not arrivals:
        none = UnknownModelError("No domain reads what was sent: see /v1/models")
        raise next(iter(errors.values()), none)
    http.state.facts["model"] = ", ".join(arrivals)[:200]
    latest = max(
        arrivals.values(),
        key=lambda one: service.admission.deadline(one.model.name, fields.deadline) or math.inf,
    )
    groups = await latest.within(_read_media(context, http, fields))
    asked: dict[str, tuple[list[types.Request], list[str]]] = {}
    for name, arrival in arrivals.items():
        prompt = fields.prompt if chat is None or arrival.model.takes_words else None
        try:
            requests, said = _requests(arrival, fields, prompt, groups, chat)
            said += [f"{name} is named several times: answered once"] * (names.count(name) > 1)
            asked[name] = requests, said
        except ServeError as error:
            errors[name] = error
    with service.admitted([(arrivals[name].model, asked[name][0]) for name in asked]) as admitted:
        errors |= {name: one for name, one in admitted.items() if isinstance(one, ServeError)}
        tickets = {name: one for name, one in admitted.items() if isinstance(one, Ticket)}
        rows = [
            [(ticket, asked[name][0][at]) for name, ticket in tickets.items()]
            for at in range(len(groups) if tickets else 0)
        ]
        answers = await gathered(*map(service.ask_together, rows))
    found: dict[str, schema.VisionAnswer | schema.ErrorAnswer] = {}
    for number, name in enumerate(tickets):
        lasts = [row[number] for row in answers]
        if (wrong := next((one for one in lasts if isinstance(one, ServeError)), None)) is None:
            found[name] = _answered(arrivals[name], lasts, groups, asked[name][1])
        else:
            errors[name] = wrong
    if not found:  # that of a name without a domain would hide what may be tried again
        raise errors[next(iter(arrivals))]
    for name, failed in errors.items():
        context.metrics.failed(failed.code)
        found[name] = schema.ErrorAnswer.model_validate({"error": error_body(failed)})
    return found


def bundles_of(context: ServerContext) -> dict[str, list[ServedModel]]:
    """The domains of bundles by their names, with and without version; domains' names go first."""
    found: defaultdict[str, list[ServedModel]] = defaultdict(list)
    for model in context.service.models():
        if model.kind == "domain" and model.bundle:
            for name in {model.bundle, short_name(model.bundle)}:
                found[name].append(model)
    return {name: found[name] for name in found.keys() - context.service.domains().keys()}


async def _fields(request: Request, context: ServerContext, kind: type[K]) -> K:
    """Fields of a request, with files in place of URLs if it is a form."""
    header, body = request.headers.get("content-type", ""), await request.body()
    del request._body  # each copy is freed when the next one exists
    parsing: Coroutine[Any, Any, K] = (
        context.bodies.parsed(body, kind)
        if header.lower().startswith(JSON)
        else _from_form(body, header, context, kind)
    )
    del body
    return await parsing


def _check_media(context: ServerContext, fields: schema.VisionRequest) -> None:
    check_text(len(fields.prompt or ""), context)
    limit, images = context.settings.max_images, fields.images
    if bool(images) + (fields.video is not None) + bool(fields.frames) != 1:
        raise RequestError("Send images, or one video, or a video's frames: one of these")
    if len(images) > limit:
        raise RequestError(f"The request has {len(images)} images, more than {limit}: send fewer")


async def _read_media(
    context: ServerContext, http: Request, fields: schema.VisionRequest
) -> list[list[Image]]:
    """The decoded images of each result: one, or the frames of the only video."""
    media, pixels = context.media, http.state.stack.enter_context(context.media.pixels())
    if fields.video is not None:
        return [await media.video(fields.video, pixels)]
    if fields.frames:
        return [await media.frames(fields.frames, pixels)]
    return [[image] for image in await media.images(fields.images, pixels)]


async def _from_form(body: bytes, header: str, context: ServerContext, kind: type[K]) -> K:
    large, parsing = len(body) > LARGE_BYTES, _form_items(body, header, context.settings)
    del body
    items = await (asyncio.to_thread(asyncio.run, parsing) if large else parsing)
    known = sorted(kind.model_fields.keys() - {*_FILES})
    files: dict[str, list[MediaUrl]] = {name: [] for name in _FILES}
    values: dict[str, Any] = {}
    for name, item in items:
        if isinstance(item, MediaUrl) and name in files:
            files[name].append(item)
        elif isinstance(item, str) and name in known and name not in values:
            values[name] = item
        else:
            wrong = "lacks a file name" if name in files else "is unknown, a file or repeated"
            raise RequestError(
                f"The form's field {name[:50]!a} {wrong}: the files are {', '.join(_FILES)}, the "
                f"texts {', '.join(known)}, each once, with commas between domains"
            )
    if len(files["video"]) > 1:
        raise RequestError("The form has several videos: send them one by one")
    if "domains" in values:
        values["domains"] = [name.strip() for name in values["domains"].split(",")]
    given = {"images": files["image"] + files["images"], "frames": files["frames"]}
    try:
        return kind.model_validate({**values, **given, "video": next(iter(files["video"]), None)})
    except ValidationError as error:
        raise invalid(error.errors(include_input=False), values, "The form") from None


async def _form_items(
    body: bytes, content_type: str, settings: ServerSettings
) -> list[tuple[str, str | MediaUrl]]:
    limit, fields = settings.max_images + settings.max_video_frames + 1, 8
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not boundary:
        raise RequestError("The form's content type names no boundary: let your client set it")
    if b"--%b--" % boundary not in body:  # its last part would be left out
        raise RequestError("The form is not whole, as its end is missing: send it again")
    if body.count(boundary) > limit + fields:  # each costs time even where no part begins
        raise RequestError(f"The form has more than {limit} files: send fewer")

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), _PIECE):
            yield body[start : start + _PIECE]

    parser = MultiPartParser(
        Headers({"content-type": content_type}), pieces(), max_files=limit, max_fields=fields,
        max_part_size=4 * settings.max_prompt_chars,
    )  # fmt: skip
    parser.spool_max_size = len(body) + 1  # never on disk
    try:
        form = await parser.parse()
    except (MultiPartException, ValueError) as error:
        said = getattr(error, "message", None) or "its parts or their headers are malformed"
        raise RequestError(f"The form cannot be read ({said}): let your client make it") from error
    return [
        (name, MediaUrl(await item.read()) if isinstance(item, UploadFile) else item)
        for name, item in form.multi_items()
    ]


def _requests(
    arrival: Arrival, fields: schema.VisionRequest, prompt: str | None,
    groups: list[list[Image]], chat: SamplingParams | None,
) -> tuple[list[types.Request], list[str]]:  # fmt: skip
    """The requests to the engine, one for each image or one for the video, and warnings."""
    model, settings, video = arrival.model, arrival.context.settings, not fields.images
    if model.form is not None:
        raise RequestError(f"{model.name} reads documents, no images: leave it out")
    head = model.head is not None
    question, warnings = question_of(model, prompt, head=head)
    frames = [len(groups[0])] if video else []
    warnings += check_measured_media(model, int(not video), frames, head=head)
    limit = fields.max_tokens or model.max_tokens or settings.answer_tokens
    params = chat or SamplingParams(temperature=settings.temperature)
    common: dict[str, Any] = {
        "model": model.name, "min_score": fields.min_score, "cache_salt": fields.cache_salt,
        "sampling": replace(params, max_tokens=limit),
        "deadline": arrival.time_left(), "store": fields.store is not False, "video": video,
        "stream": False,
    }  # fmt: skip
    identity, words = f"vision-{new_id()}", None if prompt is None else question
    return [
        types.Request.about(images, words, id=f"{identity}-{number}", **common)
        for number, images in enumerate(groups)
    ], warnings


def _answered(
    arrival: Arrival, lasts: Sequence[Output], groups: list[list[Image]], warnings: list[str]
) -> schema.VisionAnswer:
    last, model = lasts[-1], arrival.model
    results = []
    for one, (image, *_) in zip(lasts, groups, strict=True):
        found = {"text": one.text} if one.head is None else one.head.image_fields(0)
        results.append(schema.VisionResult(width=image.width, height=image.height, **found))
    return schema.VisionAnswer(
        id="-".join(last.id.split("-")[:2]), created=int(time.time()), domain=model.name,
        task=model.task, adapter=model.adapter, bundle=model.bundle,
        kind=None if last.head is None else last.head.kind, results=results,
        usage=usage(lasts, len(lasts)), mode=None if last.mode is None else str(last.mode),
        seconds=time.monotonic() - arrival.since, warnings=warnings,
    )  # fmt: skip
