"""Tensors of the Open Inference Protocol: images and texts in, boxes and labels out.

A tensor has a name, a data type, a shape and its values in row-major order: in JSON, or behind it
as raw bytes (the extension "binary tensor data" of Triton's clients).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from valora_data.contract.files import shown
from valora_data.wording import plural
from valora_serve.errors import FieldError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_serve.server.api.schema import VisionResult
    from valora_serve.types import ServedModel

BYTES, UINT8 = "BYTES", "UINT8"
MOST_SIDES = 4
"""Largest number of dimensions of an input: images, rows, columns, channels."""
_LENGTH = struct.Struct("<I")


class InferInput(BaseModel):
    """An input tensor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["image", "video", "prompt"]
    shape: list[int] = Field(max_length=MOST_SIDES, description="of the values, row-major")
    datatype: Literal["BYTES", "UINT8"]
    parameters: dict[str, Any] = Field(default={}, description="`binary_data_size`")
    data: list[Any] | None = Field(default=None, description="values; None if they follow as bytes")


class InferOutput(BaseModel):
    """An output that is wanted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    parameters: dict[str, Any] = Field(default={}, description="ignored: outputs are JSON")


class InferRequest(BaseModel):
    """Body of ``/v2/models/{name}/infer``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str | None = Field(default=None, max_length=200)
    parameters: dict[str, Any] = Field(
        default={}, description="`min_score`, `max_tokens` and `deadline` as in /v1/vision"
    )
    inputs: list[InferInput] = Field(min_length=1, max_length=3)
    outputs: list[InferOutput] = Field(default=[], max_length=100)


class InferError(BaseModel):
    """An error of the protocol: one sentence."""

    error: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """Values of an input.

    Attributes:
        name: Its name.
        shape: Its shape.
        items: Texts or files, of type BYTES; None for pixels.
        pixels: [images, rows, columns, 3] uint8; None for texts and files.
    """

    name: str
    shape: tuple[int, ...]
    items: tuple[str | bytes, ...] | None = None
    pixels: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def __len__(self) -> int:
        """Number of texts, files or images."""
        return len(self.items or ()) if self.pixels is None else len(self.pixels)

    @property
    def text(self) -> str:
        """The only text.

        Raises:
            RequestError: It holds several, pixels, or no text.
        """
        if self.items is None or len(self.items) != 1:
            raise RequestError(f"Input {self.name} must hold one text of type BYTES: send one")
        [item] = self.items
        try:
            return item if isinstance(item, str) else item.decode()
        except UnicodeDecodeError as error:
            raise RequestError(f"Input {self.name} is no text in UTF-8: send another") from error


def read_tensors(body: InferRequest, tail: bytes) -> dict[str, Tensor]:
    """The inputs of a request, by name.

    Args:
        body: The request.
        tail: Bytes after its JSON: those of the inputs with `binary_data_size`, in their order.

    Raises:
        FieldError: A tensor's values do not fit its shape and type.
    """
    found: dict[str, Tensor] = {}
    place = 0
    for number, given in enumerate(body.inputs):
        where = f"inputs.{number}"
        if given.name in found:
            raise FieldError(f"{where} repeats input {given.name}: send it once", where)
        if any(side < 0 for side in given.shape):
            raise FieldError(f"{where}.shape is {given.shape}: sides are not negative", where)
        size = given.parameters.get("binary_data_size")
        if size is None:
            found[given.name] = _from_json(given, where)
            continue
        if not isinstance(size, int) or not 0 <= size <= len(tail) - place:
            raise FieldError(
                f"{where} has binary_data_size {shown(size)}, and {len(tail) - place} bytes "
                "follow: send as many",
                where,
            )
        found[given.name] = _from_bytes(given, tail[place : place + size], where)
        place += size
    if place < len(tail):
        raise RequestError(f"{len(tail) - place} bytes after the JSON belong to no input")
    return found


def _from_json(given: InferInput, where: str) -> Tensor:
    if given.data is None:
        raise FieldError(f"{where} has no data: send values, or binary_data_size", where)
    values = _flat(given.data)
    if len(values) != math.prod(given.shape):
        raise FieldError(
            f"{where} has {plural(len(values), 'value')}, which do not fit its shape "
            f"{given.shape}: send {math.prod(given.shape)}",
            where,
        )
    if given.datatype == BYTES:
        if not all(isinstance(value, str) for value in values):
            raise FieldError(f"{where} of type BYTES takes texts: send base64 or URLs", where)
        return Tensor(given.name, tuple(given.shape), tuple(values))
    if not all(type(value) is int and 0 <= value <= 255 for value in values):
        raise FieldError(f"{where} of type UINT8 takes numbers from 0 to 255", where)
    return _pixels(given, np.array(values, np.uint8), where)


def _flat(values: list[Any]) -> list[Any]:
    """Values of nested lists, in order; the parser has bounded their depth."""
    if not any(isinstance(value, list) for value in values):
        return values
    found: list[Any] = []
    for value in values:
        found += _flat(value) if isinstance(value, list) else [value]
    return found


def _from_bytes(given: InferInput, content: bytes, where: str) -> Tensor:
    if given.datatype == UINT8:
        return _pixels(given, np.frombuffer(content, np.uint8), where)
    items: list[str | bytes] = []
    place = 0
    while place + _LENGTH.size <= len(content):
        [size] = _LENGTH.unpack_from(content, place)
        place += _LENGTH.size
        items.append(content[place : place + size])
        place += size
    if place != len(content) or len(items) != math.prod(given.shape):
        raise FieldError(
            f"{where}: the bytes are not {math.prod(given.shape)} items, each behind its length "
            "in four bytes",
            where,
        )
    return Tensor(given.name, tuple(given.shape), tuple(items))


def _pixels(given: InferInput, values: np.ndarray[Any, np.dtype[np.uint8]], where: str) -> Tensor:
    """An input of pixels."""
    shape = tuple(given.shape)
    if len(shape) == 3:
        shape = (1, *shape)
    if len(shape) != 4 or shape[-1] != 3:
        raise FieldError(
            f"{where} of type UINT8 has the shape {given.shape}: expected [rows, columns, 3] or "
            "[images, rows, columns, 3], in RGB",
            where,
        )
    if values.size != math.prod(shape):
        raise FieldError(
            f"{where} has {values.size} values for the shape {given.shape}: send as many", where
        )
    return Tensor(given.name, tuple(given.shape), pixels=values.reshape(shape))


def as_images(tensor: Tensor) -> list[Image.Image]:
    """The images of an input of pixels."""
    assert tensor.pixels is not None
    return [Image.fromarray(np.ascontiguousarray(rows)) for rows in tensor.pixels]


def inputs_of(model: ServedModel, prompted: bool) -> list[dict[str, Any]]:
    """Declarations of the inputs that a domain reads.

    Args:
        model: The domain.
        prompted: Whether it needs words of the request's own.
    """
    video = model.media == "video"
    media = _declared("video", BYTES, [1]) if video else _declared("image", BYTES, [-1])
    return [media, _declared("prompt", BYTES, [1])] if prompted else [media]


def outputs_of(model: ServedModel) -> list[dict[str, Any]]:
    """Declarations of the outputs that a domain gives; -1 is the number of images or boxes."""
    size = _declared("size", "INT32", [-1, 2])
    if model.boxes:
        return [
            _declared("count", "INT32", [-1]), _declared("boxes", "FP32", [-1, -1, 4]),
            _declared("scores", "FP32", [-1, -1]), _declared("labels", BYTES, [-1, -1]), size,
        ]  # fmt: skip
    if model.head is not None:
        return [
            _declared("label", BYTES, [-1]), _declared("score", "FP32", [-1]),
            _declared("scores", "FP32", [-1, len(model.labels) or -1]), size,
        ]  # fmt: skip
    return [_declared("text", BYTES, [-1]), size]


def _declared(name: str, datatype: str, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}


def wanted_outputs(model: ServedModel, names: Sequence[str]) -> list[str]:
    """Names of the outputs that a request wants.

    Args:
        model: The domain.
        names: The names that it gives; empty for all.

    Raises:
        RequestError: There is no output of such a name.
    """
    known = [entry["name"] for entry in outputs_of(model)]
    for name in names:
        if name not in known:
            raise RequestError(
                f"{model.name} has no output {shown(name)}: its outputs are {', '.join(known)}"
            )
    return list(names) or known


def output_tensors(
    model: ServedModel, results: Sequence[VisionResult], wanted: Sequence[str]
) -> list[dict[str, Any]]:
    """The answer as tensors, one row for each image.

    Boxes are padded to the image with the most of them: `count` says how many there are.

    Args:
        model: The domain.
        results: Its answers.
        wanted: Names of the outputs, as `wanted_outputs` gives them.
    """
    made = [_tensor("size", "INT32", [[result.width, result.height] for result in results], [2])]
    if model.boxes:
        made += _boxes(results)
    elif model.head is not None:
        labels = list(model.labels) or sorted({key for r in results for key in r.confidences or {}})
        shares = [[(r.confidences or {}).get(name, 0.0) for name in labels] for r in results]
        made += [
            _tensor("label", BYTES, [result.label or "" for result in results]),
            _tensor("score", "FP32", [result.confidence or 0.0 for result in results]),
            _tensor("scores", "FP32", shares, [len(labels)]),
        ]
    else:
        made.append(_tensor("text", BYTES, [result.text or "" for result in results]))
    by_name = {entry["name"]: entry for entry in made}
    return [by_name[name] for name in wanted]


def _boxes(results: Sequence[VisionResult]) -> list[dict[str, Any]]:
    found = [result.detections or [] for result in results]
    most = max(map(len, found), default=0)
    boxes = [[*(list(one.box) for one in row), *[[0.0] * 4] * (most - len(row))] for row in found]
    scores = [[*(one.confidence for one in row), *[0.0] * (most - len(row))] for row in found]
    labels = [[*(one.label for one in row), *[""] * (most - len(row))] for row in found]
    return [
        _tensor("count", "INT32", [len(row) for row in found]),
        _tensor("boxes", "FP32", [edge for row in boxes for edge in row], [most, 4], len(found)),
        _tensor("scores", "FP32", scores, [most]),
        _tensor("labels", BYTES, labels, [most]),
    ]


def _tensor(
    name: str, datatype: str, rows: list[Any], rest: list[int] | None = None, first: int = -1
) -> dict[str, Any]:
    """A tensor of `first` rows (by default as many as there are), each of the shape `rest`."""
    shape = [len(rows) if first < 0 else first, *(rest or [])]
    return {"name": name, "datatype": datatype, "shape": shape, "data": _flat(rows)}
