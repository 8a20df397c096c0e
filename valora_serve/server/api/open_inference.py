"""``/v2``: the Open Inference Protocol (KServe v2) over REST, for clients of Triton and KServe.

Every domain is a model. Images are files (`BYTES`: base64 or URLs in JSON, raw behind it) or pixels
(`UINT8`); boxes, labels and texts come back as tensors.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import Response

from valora_serve.errors import FieldError, RequestError, UnknownModelError
from valora_serve.server.access.rules import JSON, Access, allow
from valora_serve.server.api.common import error_answers
from valora_serve.server.api.domain_prompt import PLACE
from valora_serve.server.api.requests import check_text, within_deadline
from valora_serve.server.api.schema import VisionRequest
from valora_serve.server.api.system import own_version
from valora_serve.server.api.tensors import (
    InferError,
    InferRequest,
    Tensor,
    as_images,
    inputs_of,
    output_tensors,
    outputs_of,
    read_tensors,
    wanted_outputs,
)
from valora_serve.server.api.vision import (
    ParsedRequest,
    answer_requests,
    check_count,
    engine_requests,
    find_domain,
)
from valora_serve.server.bodies import JsonLimits, JsonScan, validated, whole_body
from valora_serve.server.envelope import AsciiJson, until_disconnect
from valora_serve.server.gather import gathered
from valora_serve.server.media.urls import MediaUrl

if TYPE_CHECKING:
    from PIL.Image import Image

    from valora_serve.server.context import ServerContext
    from valora_serve.server.media.reader import Pixels
    from valora_serve.types import ServedModel

LIMITS = JsonLimits(values=200_000)
"""Most that a request's JSON may hold: a picture of 250 pixels square as numbers."""
TYPES = (JSON, "application/octet-stream", "")
"""Content types of requests; Triton's clients send none."""
HEADER = "inference-header-content-length"
_PARAMETERS = ("min_score", "max_tokens", "deadline", "cache_salt")
_IGNORED = ("binary_data_output", "sequence_id", "sequence_start", "sequence_end", "priority",
            "timeout")  # fmt: skip
_SCHEMES = ("data:", "http:", "https:", "file:")


def router(context: ServerContext) -> APIRouter:
    """Routes of the protocol."""
    errors = error_answers(model=InferError)
    routes = APIRouter(tags=["open inference protocol"], responses=errors)
    engine, drain = context.service.engine, context.drain

    def ready() -> bool:
        return engine.healthy and not drain.begun

    @routes.get("/v2", summary="Name, version and extensions of the server")
    @allow(Access.OPEN)
    async def server() -> Response:
        extensions = ["binary_tensor_data", "model_repository"]
        return AsciiJson({"name": "valora", "version": own_version(), "extensions": extensions})

    @routes.get("/v2/health/live", summary="Whether the engine runs; also while draining")
    @allow(Access.OPEN, any_host=True)
    async def live() -> Response:
        return AsciiJson({"live": engine.healthy}, 200 if engine.healthy else 503)

    @routes.get("/v2/health/ready", summary="Whether requests are accepted")
    @allow(Access.OPEN, any_host=True)
    async def server_ready() -> Response:
        return AsciiJson({"ready": ready()}, 200 if ready() else 503)

    @routes.get("/v2/models/{name}/ready", summary="Whether a domain answers requests")
    @routes.get("/v2/models/{name}/versions/{version}/ready", include_in_schema=False)
    @allow(Access.OPEN, any_host=True, tells="one")
    async def model_ready(name: str, version: str | None = None) -> Response:
        try:
            model = _model(context, name, version)
        except UnknownModelError:  # whose sentence names all others, to whoever asks
            raise UnknownModelError(
                f"There is no domain {name[:100]!a}: /v2/repository/index lists the domains"
            ) from None
        answers = ready() and model.adapter not in engine.stats().quarantined
        return AsciiJson({"name": model.name, "ready": answers}, 200 if answers else 503)

    @routes.get("/v2/models/{name}", summary="Inputs and outputs of a domain")
    @routes.get("/v2/models/{name}/versions/{version}", include_in_schema=False)
    async def metadata(name: str, version: str | None = None) -> Response:
        model = _model(context, name, version)
        return AsciiJson({
            "name": model.name,
            "versions": [_version(model)],
            "platform": "valora",
            "inputs": inputs_of(model, _prompted(model)),
            "outputs": outputs_of(model),
            "parameters": {"task": model.task, "labels": list(model.labels)},
        })  # fmt: skip

    @routes.post("/v2/repository/index", summary="All domains, and whether they are ready")
    @allow(Access.KEYED, max_body_bytes=4096, content_types=TYPES)
    async def index() -> Response:
        quarantined = engine.stats().quarantined
        return AsciiJson([
            {
                "name": model.name,
                "version": _version(model),
                "state": "READY" if ready() and model.adapter not in quarantined else "UNAVAILABLE",
            }
            for model in context.service.models()
            if model.kind == "domain"
        ])  # fmt: skip

    @routes.post(
        "/v2/models/{name}/infer",
        summary="Ask a domain about one or many images, or a video",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": InferRequest.model_json_schema()}},
            }
        },
    )
    @routes.post("/v2/models/{name}/versions/{version}/infer", include_in_schema=False)
    @allow(Access.KEYED, json=LIMITS, content_types=TYPES)
    async def infer(request: Request, name: str, version: str | None = None) -> Response:
        since = time.monotonic()
        model = _model(context, name, version)
        request.state.facts["model"] = model.name
        pixels = request.state.stack.enter_context(context.media.pixels())
        body, tail = await _body(request, context)
        tensors = await context.parser.run(read_tensors, body, tail)
        fields = _fields(body, tensors)
        wanted = wanted_outputs(model, [output.name for output in body.outputs])
        check_text(len(fields.prompt or ""), context)
        reading = _media(context, tensors, pixels)
        images, video = await within_deadline(
            reading, request.receive, context, model, fields.deadline, since
        )
        parsed = ParsedRequest(fields, images, video)
        requests, warnings = engine_requests(context, model, parsed, since)
        headers = dict(request.headers)
        work = answer_requests(context, model, parsed, requests, headers, since, warnings)
        found = await until_disconnect(request.receive, work)
        return AsciiJson({
            "model_name": model.name,
            "model_version": _version(model),
            "id": body.id or found.id,
            "parameters": {"warnings": "; ".join(warnings)} if warnings else {},
            "outputs": output_tensors(model, found.results, wanted),
        })  # fmt: skip

    return routes


def _model(context: ServerContext, name: str, version: str | None) -> ServedModel:
    """The domain of a name.

    Raises:
        UnknownModelError: There is none, or not in this version.
    """
    model = find_domain(context, name)
    if version is not None and version != _version(model):
        raise UnknownModelError(
            f"Domain {name} has no version {version[:20]!a}: its version is {_version(model)}"
        )
    return model


def _version(model: ServedModel) -> str:
    """Version of a domain's bundle."""
    return (model.bundle or "").rpartition("@")[2] or "1"


def _prompted(model: ServedModel) -> bool:
    return model.prompted or not model.prompt or PLACE in model.prompt


async def _body(request: Request, context: ServerContext) -> tuple[InferRequest, bytes]:
    """The JSON of a request, and the bytes behind it."""
    content = await whole_body(request)
    size = request.headers.get(HEADER)
    tail = b""
    if size is not None:
        if not size.isdecimal() or int(size[:20]) > len(content):
            raise RequestError(
                f"The header {HEADER} is {size[:20]!a}, and the body has {len(content)} bytes: "
                "send the length of the JSON"
            )
        content, tail = content[: int(size)], content[int(size) :]
    scan = JsonScan(LIMITS)
    scan.feed(content)
    body: InferRequest = await context.parser.parse(content, InferRequest)
    return body, tail


def _fields(body: InferRequest, tensors: dict[str, Tensor]) -> VisionRequest:
    """The fields of a request, as `/v1/vision` has them."""
    unknown = sorted(set(body.parameters) - {*_PARAMETERS, *_IGNORED})
    if unknown:
        raise FieldError(
            f"The parameter {unknown[0][:50]!a} is not known: expected {', '.join(_PARAMETERS)}",
            "parameters",
        )
    values = {name: body.parameters[name] for name in _PARAMETERS if name in body.parameters}
    if "prompt" in tensors:
        values["prompt"] = tensors["prompt"].text
    return validated(values, VisionRequest)


async def _media(
    context: ServerContext, tensors: dict[str, Tensor], pixels: Pixels
) -> tuple[list[Image], list[Image] | None]:
    """The images of a request, and the frames of its video or None."""
    image, video = tensors.get("image"), tensors.get("video")
    frames = 0 if video is None or video.pixels is None else len(video)
    images = 0 if image is None else len(image)
    check_count(images, video is not None and not frames, frames, context)
    if video is None:
        assert image is not None  # `check_count` refuses requests with neither
        return await _images(context, image, pixels), None
    if video.pixels is not None:
        return [], await _images(context, video, pixels)
    if len(video) != 1:
        raise RequestError("Input video holds one file, or the frames as pixels: send one video")
    [item] = video.items or ("",)
    if isinstance(item, bytes):
        return [], await context.media.decode_video(item, pixels)
    return [], await context.media.video(_url(item, "video"), pixels)


async def _images(context: ServerContext, tensor: Tensor, pixels: Pixels) -> list[Image]:
    if tensor.pixels is not None:
        count, height, width, _ = tensor.pixels.shape
        for _ in range(count):
            context.media.check_pixels(width, height, pixels)
        found: list[Image] = await context.parser.run(as_images, tensor)
        return found
    return await gathered(
        *(
            context.media.decode_image(item, pixels)
            if isinstance(item, bytes)
            else context.media.image(_url(item, "image"), pixels)
            for item in tensor.items or ()
        )
    )


def _url(text: str, kind: str) -> MediaUrl:
    """A URL as it is, or one of a file in base64."""
    if text.startswith(_SCHEMES):
        return MediaUrl(text)
    return MediaUrl(f"data:{kind}/any;base64,{text}")
