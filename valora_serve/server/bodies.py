"""JSON bodies: limits that are checked while a body arrives, and parsing away from the event loop.

Parsing and validating hold Python's lock, so that a thread alone does not keep the server
responsive. The limits of `JsonLimits` bound both to some hundredths of a second whatever is sent,
and bodies above `INLINE_BYTES` are parsed one at a time in a thread.
"""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic_core
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from valora_serve.errors import FieldError, RequestError
from valora_serve.server.sentences import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.responses import Response

M = TypeVar("M", bound=BaseModel)

INLINE_BYTES = 4096
"""Bodies up to this size are parsed on the event loop: a thread would take longer."""

MOST_KEYS = 1_000
"""Most keys of one object: pydantic makes an error for each that is unknown."""

NO_BODY = object()
"""Stands for the body of a request that has none."""

_BOM = b"\xef\xbb\xbf"
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x02\x02\x00\x00")  # one more than the step in depth
_NUMBER = bytes(ord("0") if byte in b"0123456789+-.eE" else ord(" ") for byte in range(256))
_ASCII = bytes(range(128))


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Most that a JSON body may hold.

    A string may be as long as the body, because images are sent in one.

    Attributes:
        keys: Number of keys of all objects together.
        values: Number of items of all lists and objects together.
        depth: Number of lists and objects within each other.
        digits: Length of a number, in characters.
        escapes: Number of backslashes.
        foreign: Number of bytes outside ASCII.
        bare: Number of bytes outside strings, white space included.
    """

    keys: int = 5_000
    values: int = 20_000
    depth: int = 100
    digits: int = 100
    escapes: int = 1_000_000
    foreign: int = 4_000_000
    bare: int = 4_000_000


DEFAULT_LIMITS = JsonLimits()


class JsonScan:
    """Counts what a JSON body holds, piece by piece, and refuses it at the first excess.

    Every step is linear in the piece and runs in C; strings are skipped by their quotes.

    Args:
        limits: Most that the body may hold.

    Attributes:
        keys: Number of keys so far.
    """

    def __init__(self, limits: JsonLimits) -> None:
        self.keys = 0
        self._limits = limits
        self._held = b""  # a backslash at the end of the last piece
        self._inside = 0  # 1 within a string
        self._values = self._depth = 0
        self._digits = self._escapes = self._foreign = self._quotes = self._bare = 0

    def feed(self, piece: bytes) -> None:
        """Count a piece of the body.

        Raises:
            RequestError: The body holds more than a limit allows, or is no JSON.
        """
        if not piece.isascii():
            self._foreign += len(piece.translate(None, _ASCII))
            self._check("bytes outside ASCII", self._foreign, self._limits.foreign)
        if self._held or b"\\" in piece:
            piece = self._unescaped(self._held + piece)
        parts = piece.split(b'"')
        self._quotes += len(parts) - 1
        self._check("strings", self._quotes // 2, self._limits.keys + self._limits.values)
        outside = b"".join(parts[self._inside :: 2])
        self._inside = (self._inside + len(parts) - 1) % 2
        if outside:
            self._count(outside)

    def _unescaped(self, piece: bytes) -> bytes:
        """The piece without escaped quotes and backslashes; other escapes do not matter here."""
        self._escapes += piece.count(b"\\") - len(self._held)
        self._check("escapes", self._escapes, self._limits.escapes)
        odd = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        self._held = piece[len(piece) - odd :]
        return piece[: len(piece) - odd].replace(b"\\\\", b"").replace(b'\\"', b"")

    def _count(self, outside: bytes) -> None:
        self._bare += len(outside)
        self._check("bytes outside texts", self._bare, self._limits.bare)
        self.keys += outside.count(b":")
        self._check("keys", self.keys, self._limits.keys)
        opened = outside.count(b"[") + outside.count(b"{")
        self._values += outside.count(b",") + opened
        self._check("items", self._values, self._limits.values)
        if opened or b"]" in outside or b"}" in outside:
            self._measure_depth(outside.translate(None, _NOT_BRACKETS).translate(_STEPS))
        self._measure_numbers(outside.translate(_NUMBER))

    def _measure_depth(self, steps: bytes) -> None:
        for depth in accumulate((step - 1 for step in steps), initial=self._depth):
            self._depth = depth
            if depth < 0:
                raise RequestError("The body is not valid JSON: it closes a bracket too many")
            if depth > self._limits.depth:
                raise RequestError(
                    f"The JSON has more than {self._limits.depth} lists and objects within each "
                    "other: send it flatter"
                )

    def _measure_numbers(self, numbers: bytes) -> None:
        most = self._limits.digits
        if not numbers.strip(b"0"):
            self._digits += len(numbers)
            longest = self._digits
        else:
            longest = self._digits + len(numbers) - len(numbers.lstrip(b"0"))
            self._digits = len(numbers) - len(numbers.rstrip(b"0"))
        if longest > most or b"0" * (most + 1) in numbers:
            raise RequestError(f"The JSON has a number of more than {most} digits: round it")

    @staticmethod
    def _check(what: str, count: int, most: int) -> None:
        if count > most:
            raise RequestError(f"The JSON has more than {most} {what}: send less at once")


class BodyParser:
    """Parses and validates JSON bodies; large ones in a thread, one at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parse")

    async def parse(self, body: bytes, model: type[M] | None) -> M | Any:
        """Parse a body that has passed `JsonScan`.

        Args:
            body: JSON in UTF-8.
            model: Model that the body must fit; None for any JSON.

        Returns:
            The model, or the parsed JSON.

        Raises:
            FieldError: The body is no JSON, or does not fit the model.
        """
        if len(body) <= INLINE_BYTES:
            return parsed(body, model)
        return await self.run(parsed, body, model)

    async def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run other work that grows with a request or its answer in the same thread.

        Several threads of Python code would take turns with the event loop, which would wait for
        each of them.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def parsed(body: bytes, model: type[M] | None) -> M | Any:
    """Parse and validate a body, as `BodyParser.parse` describes."""
    try:
        found = pydantic_core.from_json(
            body.removeprefix(_BOM), allow_inf_nan=False, cache_strings="keys"
        )
    except ValueError as error:
        raise FieldError(f"The body is not valid JSON: {str(error)[:200]}", None) from None
    finite = _check_values(found)
    made = found if model is None else validated(found, model)  # names a field that is infinite
    if not finite:
        raise FieldError("The JSON has a number beyond 1.8e308: send a smaller one", None)
    return made


def _check_values(found: Any) -> bool:
    """Whether all numbers are finite, as JSON cannot hold others in an answer."""
    left: list[Any] = [[found]]
    finite = True
    while left:
        values = left.pop()
        if isinstance(values, dict):
            if len(values) > MOST_KEYS:
                raise FieldError(
                    f"An object of the JSON has {len(values)} keys, more than {MOST_KEYS}: send "
                    "fewer",
                    None,
                )
            values = list(values.values())
        finite = finite and math.inf not in values and -math.inf not in values
        left += [item for item in values if isinstance(item, dict | list)]
    return finite


def validated(found: Any, model: type[M]) -> M:
    """The model of parsed JSON.

    Raises:
        FieldError: It does not fit the model.
    """
    try:
        return model.model_validate(found)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        raise refusal(errors, found) from None


async def whole_body(request: Request) -> bytes:
    """Read the body of a request, which keeps no copy, unlike `Request.body`."""
    pieces = [piece async for piece in request.stream() if piece]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class JsonRoute(APIRoute):
    """A route whose JSON body is parsed and validated by the server's `BodyParser`.

    FastAPI itself would do both on the event loop.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, which gets the validated body."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        declared: Any = self.body_field.field_info.annotation
        model: type[BaseModel] | None = None
        if isinstance(declared, type) and issubclass(declared, BaseModel):
            model = None if self._embed_body_fields else declared

        async def with_body(request: Request) -> Response:
            value = await read_json(request, model)
            return await handle(_ParsedRequest(request, value is not NO_BODY, value))

        return with_body


async def read_json(request: Request, model: type[M] | None) -> M | Any:
    """Parse and validate a request's body, see `BodyParser.parse`; `NO_BODY` if it has none."""
    body = await whole_body(request)
    if not body:
        return NO_BODY
    parser: BodyParser = request.app.state.context.parser
    parsing = parser.parse(body, model)
    del body  # it is freed as soon as it is parsed
    return await parsing


class _ParsedRequest(Request):
    """A request whose body has been parsed already; the body's bytes are freed."""

    def __init__(self, request: Request, sent: bool, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = b" " if sent else b""
        self._value = value

    async def json(self) -> Any:
        """The parsed and validated body."""
        return self._value
