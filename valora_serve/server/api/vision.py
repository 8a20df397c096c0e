"""``/v1/vision``: images in, labels or boxes of one domain or of several out."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from fastapi import APIRouter, Path, Request
from pydantic import TypeAdapter, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import Response

from valora_data.wording import plural
from valora_serve import types
from valora_serve.errors import RequestError, ServeError, UnknownModelError
from valora_serve.server.access.rules import JSON, Access, allow
from valora_serve.server.api.common import answer, error_answers
from valora_serve.server.api.domain_prompt import check_measured_media, question_of
from valora_serve.server.api.requests import (
    Arrival,
    answer_tokens,
    check_text,
)
from valora_serve.server.api.responses import usage
from valora_serve.server.api.schema import (
    ErrorAnswer,
    LookAnswer,
    LookRequest,
    VisionAnswer,
    VisionRequest,
    VisionResult,
)
from valora_serve.server.errors import error_body, invalid
from valora_serve.server.gather import gathered, until_disconnect
from valora_serve.server.telemetry.logs import new_id
from valora_serve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence

    from PIL.Image import Image

    from valora_serve.server.context import ServerContext
    from valora_serve.server.media.reader import Pixels
    from valora_serve.server.service import Ticket
    from valora_serve.server.settings import ServerSettings
    from valora_serve.types import Output, ServedModel

_FILES = {"image", "images", "video", "frames"}
_FIELDS = ("prompt", "min_score", "max_tokens", "deadline", "cache_salt")
_DOMAINS = "domains"
_FORM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "image": {"type": "array", "items": {"type": "string", "format": "binary"},
                  "description": "each image gets its own result; `images` is the same field"},
        "video": {"type": "string", "format": "binary"},
        "frames": {"type": "array", "items": {"type": "string", "format": "binary"},
                   "description": "frames of a video, in order"},
        "prompt": {"type": "string", "description": "prompt; the domain's own by default"},
        "min_score": {"type": "number", "minimum": 0, "maximum": 1},
        "max_tokens": {"type": "integer", "minimum": 1},
        "deadline": {"type": "number", "minimum": 0.001, "maximum": 86400},
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": 1024},
    },
}  # fmt: skip
_FORM = "multipart/form-data"
_BODY, _LOOK = TypeAdapter(VisionRequest), TypeAdapter(LookRequest)
_SCHEMAS = {
    JSON: {"schema": VisionRequest.model_json_schema()},
    _FORM: {"schema": _FORM_SCHEMA},
}
_LOOK_SCHEMAS = {
    JSON: {"schema": LookRequest.model_json_schema()},
    _FORM: {"schema": {**_FORM_SCHEMA, "required": [_DOMAINS], "properties": {
        **_FORM_SCHEMA["properties"],
        _DOMAINS: {"type": "string", "description": "names of domains, or of bundles, separated by "
                   "commas; `*` for every domain that reads what is sent"},
    }}},
}  # fmt: skip
_PIECE = 2**18  # bytes of a form that are parsed at a time; other threads run in between


_Media: TypeAlias = "tuple[list[Image], list[Image] | None]"
"""Decoded images, and the decoded frames of the video or None."""
_Unread: TypeAlias = "tuple[VisionRequest, Callable[[], Coroutine[Any, Any, _Media]]]"
"""Fields of a request, and a function that reads its images or its video."""


def router(context: ServerContext) -> APIRouter:
    """Route of the vision endpoint."""
    routes = APIRouter(tags=["vision"])

    @routes.post(
        "/v1/vision/{domain}",
        response_model=VisionAnswer,
        responses=error_answers(),
        openapi_extra={"requestBody": {"required": True, "content": _SCHEMAS}},
        summary="Ask a domain about one or many images, or a video",
    )
    @allow(Access.KEYED, content_types=(JSON, _FORM))
    async def vision(
        request: Request, domain: Annotated[str, Path(description="name of a domain")]
    ) -> Response:
        arrival = Arrival(context, request, None)
        arrival.answered_by(_domain(context, domain))
        fields, read = await _unread(request, context, _BODY)
        arrival.wanted = fields.deadline
        images, video = await arrival.within(read())
        requests, warnings = _requests(arrival, fields, images, video)

        async def ask() -> VisionAnswer:
            answers = await arrival.ask_all(requests)
            return _answered(arrival, answers, images if video is None else video[:1], warnings)

        return answer(await until_disconnect(request.receive, ask()))

    @routes.post(
        "/v1/vision",
        response_model=LookAnswer,
        responses=error_answers(),
        openapi_extra={"requestBody": {"required": True, "content": _LOOK_SCHEMAS}},
        summary="Ask several domains about the same images, or a video, at once",
    )
    @allow(Access.KEYED, content_types=(JSON, _FORM))
    async def look(request: Request) -> Response:
        fields, read = await _unread(request, context, _LOOK)
        look = _Look(context, request, fields)
        images, video = await look.latest.within(read())
        return answer(await until_disconnect(request.receive, look.ask(images, video)))

    return routes


class _Look:
    """A request that names several domains; each has its own deadline, answer or error.

    Attributes:
        latest: The domain whose deadline is the latest.
    """

    def __init__(self, context: ServerContext, http: Request, fields: LookRequest) -> None:
        self._context, self._http, self._fields = context, http, fields
        self._since = time.monotonic()
        self._errors: dict[str, ServeError] = {}
        self._arrivals: dict[str, Arrival] = {}
        every = fields.domains == "*"
        self._names = list(_every(context, fields) if every else fields.domains)
        for name in self._names:
            try:
                for model in _of_bundle(context, name) or [_domain(context, name)]:
                    self._arrivals[model.name] = arrival = Arrival(context, http, fields.deadline)
                    arrival.answered_by(model)
            except ServeError as error:
                self._errors[name] = error
        if not self._arrivals:
            none = UnknownModelError("No domain reads what was sent: see /v1/models")
            raise next(iter(self._errors.values()), none)
        http.state.facts["model"] = ", ".join(self._arrivals)[:200]
        limit = context.service.deadline
        self.latest = max(
            self._arrivals.values(),
            key=lambda one: limit(one.model.name, fields.deadline) or math.inf,
        )

    async def ask(self, images: list[Image], video: list[Image] | None) -> LookAnswer:
        """Ask the engine about each image once, for all domains.

        Raises:
            ServeError: No domain has an answer; the error is that of the first.
        """
        asked: dict[str, tuple[Ticket, list[types.Request], list[str]]] = {}
        service, shown = self._context.service, images if video is None else video[:1]
        with contextlib.ExitStack() as stack:
            for name, arrival in self._arrivals.items():
                try:
                    if arrival.model.form is not None:
                        raise RequestError(f"{name} reads documents, no images: leave it out")
                    requests, said = _requests(arrival, self._fields, images, video)
                    if self._names.count(name) > 1:
                        said.append(f"{name} is named several times: answered once")
                    asked[name] = stack.enter_context(arrival.admitted(requests)), requests, said
                except ServeError as error:
                    self._errors[name] = error
            rows = [
                [(ticket, requests[at]) for ticket, requests, _ in asked.values()]
                for at in range(len(shown) if asked else 0)
            ]
            headers = dict(self._http.headers)
            found = await gathered(*(service.ask_together(row, headers) for row in rows))
        answers: dict[str, VisionAnswer | ErrorAnswer] = {}
        for place, (name, (_, _, said)) in enumerate(asked.items()):
            outputs = [row[place] for row in found]
            wrong = next((one for one in outputs if isinstance(one, ServeError)), None)
            if wrong is None:
                answers[name] = _answered(self._arrivals[name], outputs, shown, said)
            else:
                self._errors[name] = wrong
        if not answers:
            raise next(iter(self._errors.values()))
        for name, failed in self._errors.items():
            self._context.metrics.failed(getattr(failed, "code", "invalid_request"))
            answers[name] = ErrorAnswer.model_validate({"error": error_body(failed)})
        return LookAnswer(
            id=f"vision-{new_id()}",
            created=int(time.time()),
            domains=answers,
            seconds=time.monotonic() - self._since,
        )


def _every(context: ServerContext, fields: LookRequest) -> list[str]:
    """The domains that read what is sent."""
    video = fields.video is not None or bool(fields.frames)
    return [
        model.name
        for model in context.service.models()
        if model.kind == "domain"
        and model.form is None
        and model.media in (None, "video" if video else "images")
        and (fields.prompt is not None or not model.prompted)
    ]


def _of_bundle(context: ServerContext, name: str) -> list[ServedModel]:
    """The domains of the bundle of a name; none if it names no bundle."""
    models = [model for model in context.service.models() if model.kind == "domain"]
    if any(model.name == name for model in models):
        return []
    return [m for m in models if m.bundle and name in (m.bundle, m.bundle.partition("@")[0])]


def _domain(context: ServerContext, name: str) -> ServedModel:
    """The domain of a name, or the adapter that has a head; refused if there is none."""
    models = context.service.models()
    domains = {m.name: m for m in models if m.kind == "domain" or m.head is not None}
    if name not in domains:
        listed = ", ".join(sorted(domains)) or "none: load a bundle"
        raise UnknownModelError(f"There is no domain {name[:100]!a}: the domains are {listed}")
    return domains[name]


async def _unread(
    request: Request, context: ServerContext, body: TypeAdapter[Any]
) -> tuple[Any, Callable[[], Coroutine[Any, Any, _Media]]]:
    """Fields of a request, and a function that reads its images or its video."""
    pixels = request.state.stack.enter_context(context.media.pixels())
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    from_body = _from_json if kind == JSON else _from_form
    fields, read = await from_body(request, context, pixels, body)
    check_text(len(fields.prompt or ""), context)
    return fields, read


async def _from_json(
    request: Request, context: ServerContext, pixels: Pixels, form: TypeAdapter[Any]
) -> _Unread:
    body = await request.body()
    del request._body  # each copy is freed when the next one exists
    fields = await context.bodies.parsed(body, form)
    del body
    _check_count(len(fields.images), fields.video is not None, len(fields.frames), context)

    async def read() -> _Media:
        images = await gathered(*(context.media.image(url, pixels) for url in fields.images))
        if fields.video is not None:
            return images, await context.media.video(fields.video, pixels)
        if fields.frames:
            return images, await context.media.frames(fields.frames, pixels)
        return images, None

    return fields, read


async def _from_form(
    request: Request, context: ServerContext, pixels: Pixels, form: TypeAdapter[Any]
) -> _Unread:
    files: dict[str, list[bytes]] = {name: [] for name in _FILES}
    values: dict[str, Any] = {}
    known = (_DOMAINS, *_FIELDS) if form is _LOOK else _FIELDS
    kind = request.headers["content-type"]
    body = await request.body()
    del request._body  # each copy is freed when the next one exists
    items = await asyncio.to_thread(_form_items, body, kind, context.settings)
    del body
    for name, item in items:
        if isinstance(item, bytes) and name in _FILES:
            files[name].append(item)
        elif isinstance(item, str) and name in known and name not in values:
            values[name] = item
        else:
            raise RequestError(
                f"The form has an unknown or repeated field {name[:50]!a}: the "
                f"files are {', '.join(sorted(_FILES))}, the rest {', '.join(known)}"
            )
    del items
    images = files.pop("image") + files.pop("images")
    videos, frames = files.pop("video"), files.pop("frames")
    if values.get(_DOMAINS, "*") != "*":
        values[_DOMAINS] = [name.strip() for name in values[_DOMAINS].split(",")]
    try:
        fields = form.validate_python(values)
    except ValidationError as error:
        raise invalid(error.errors(include_input=False), values, "The form") from None
    if len(videos) > 1:
        raise RequestError("The form has several videos: send them one by one")
    _check_count(len(images), bool(videos), len(frames), context)

    def decoded(contents: list[bytes]) -> list[Coroutine[Any, Any, Image]]:
        contents.reverse()  # each file is given away: it is freed once its decoder has it
        return [context.media.decode_image(contents.pop(), pixels) for _ in range(len(contents))]

    async def read() -> _Media:
        found = await gathered(*decoded(images))
        if videos:
            return found, await context.media.decode_video(videos.pop(), pixels)
        if frames:
            return found, await gathered(*decoded(frames))
        return found, None

    return fields, read


def _form_items(
    body: bytes, content_type: str, settings: ServerSettings
) -> list[tuple[str, str | bytes]]:
    """Names and contents of a form's fields (text) and files (bytes)."""
    most = settings.max_images + settings.max_video_frames + 1
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not boundary:
        raise RequestError("The form's content type names no boundary: let your client set it")
    size = _PIECE + len(boundary) - 1  # in pieces, as counting holds Python's lock
    found = sum(body.count(boundary, at, at + size) for at in range(0, len(body), _PIECE))
    if found > most + len(_FIELDS) + 3:  # each costs time even where no part begins
        raise RequestError(f"The form has more than {most} files: send fewer")

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), _PIECE):
            yield body[start : start + _PIECE]

    async def parse() -> list[tuple[str, str | bytes]]:
        parser = MultiPartParser(
            Headers({"content-type": content_type}), pieces(), max_files=most,
            max_fields=len(_FIELDS) + 1, max_part_size=4 * settings.max_prompt_chars,
        )  # fmt: skip
        parser.spool_max_size = len(body) + 1  # never on disk
        form = await parser.parse()
        try:
            return [
                (name, await item.read() if isinstance(item, UploadFile) else item)
                for name, item in form.multi_items()
            ]
        finally:
            await form.close()

    try:
        return asyncio.run(parse())
    except (MultiPartException, ValueError) as error:
        said = getattr(error, "message", None) or "its parts or their headers are malformed"
        raise RequestError(f"The form cannot be read ({said}): let your client make it") from error


def _check_count(images: int, video: bool, frames: int, context: ServerContext) -> None:
    """Refuse a request that has not images, a video or frames, or too many."""
    most, most_frames = context.settings.max_images, context.settings.max_video_frames
    if (images > 0) + video + (frames > 0) != 1:
        raise RequestError("Send images, or one video, or a video's frames: one of these")
    if images > most:
        raise RequestError(
            f"The request has {plural(images, 'image')}, more than {most}: send fewer"
        )
    if frames > most_frames:
        raise RequestError(
            f"The video has {plural(frames, 'frame')}, more than {most_frames}: send fewer"
        )


def _requests(
    arrival: Arrival, fields: VisionRequest, images: list[Image], video: list[Image] | None
) -> tuple[list[types.Request], list[str]]:
    """The requests to the engine, one for each image or one for the video, and warnings."""
    model, settings = arrival.model, arrival.context.settings
    head = model.head is not None
    question, warnings = question_of(model, fields.prompt, head=head)
    frames = [] if video is None else [len(video)]
    warnings += check_measured_media(model, 1 - len(frames), frames, head=head)
    messages = None
    if fields.prompt is not None:
        kind = "image" if video is None else "video"
        content = [{"type": "text", "text": question}, {"type": kind}]
        messages = [{"role": "user", "content": content}]
    common = types.Request(
        id=f"vision-{new_id()}",
        model=model.name,
        messages=messages,
        min_score=fields.min_score,
        sampling=SamplingParams(
            max_tokens=fields.max_tokens or answer_tokens(model, arrival.context),
            temperature=settings.temperature,
        ),
        deadline=arrival.time_left(),
        cache_salt=fields.cache_salt,
    )
    if video is not None:
        return [replace(common, videos=[video])], warnings
    return [
        replace(common, id=f"{common.id}-{number}", images=[image])
        for number, image in enumerate(images)
    ], warnings


def _answered(
    arrival: Arrival,
    answers: Sequence[Sequence[Output]],
    shown: Sequence[Image],
    warnings: list[str],
) -> VisionAnswer:
    """Put the answers of a domain to all images together."""
    lasts, model = [outputs[-1] for outputs in answers], arrival.model
    last = lasts[-1]
    return VisionAnswer(
        id="-".join(last.id.split("-")[:2]),
        created=int(time.time()),
        domain=model.name,
        task=model.task,
        adapter=model.adapter,
        bundle=model.bundle,
        kind=last.head.kind if last.head is not None else None,
        results=[_result(outputs, image) for outputs, image in zip(answers, shown, strict=True)],
        usage=usage(lasts, len(lasts)),
        mode=str(last.mode) if last.mode is not None else None,
        seconds=time.monotonic() - arrival.since,
        warnings=warnings,
    )


def _result(outputs: Sequence[Output], image: Image) -> VisionResult:
    head = outputs[-1].head
    size: dict[str, Any] = {"width": image.width, "height": image.height}
    if head is None:
        return VisionResult(**size, text="".join(output.text for output in outputs))
    return VisionResult(**size, **head.image_fields(0))
