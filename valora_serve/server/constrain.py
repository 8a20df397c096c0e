"""Constrained decoding: answers that follow a JSON schema, with llguidance."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from valora_serve.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from valora_serve.types import EngineClient

LARGEST_SCHEMA = 200_000  # characters
REMEMBERED = 64  # compiled schemas that are cached


class Grammars:
    """Makes constraints from JSON schemas; compiled schemas are cached.

    Args:
        engine: Engine whose tokenizer is used; it is read at the first constraint.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._read: Any = None
        self._matchers: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    async def json(
        self, schema: Mapping[str, Any] | bool | None, count: int = 1
    ) -> list[JsonConstraint]:
        """Make constraints from a JSON schema.

        Args:
            schema: JSON schema; None for any JSON object.
            count: Number of constraints; each serves for one answer.

        Raises:
            RequestError: The schema is invalid, too large, or uses an unsupported feature.
        """
        matcher = await asyncio.to_thread(self._matcher, schema)
        return [JsonConstraint(matcher.deep_copy()) for _ in range(count)]

    def _matcher(self, schema: Mapping[str, Any] | bool | None) -> Any:
        import llguidance
        import llguidance.hf

        try:
            text = json.dumps({"type": "object"} if schema is None else schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The JSON schema cannot be used: {_first(error)}") from error
        if len(text) > LARGEST_SCHEMA:
            raise RequestError(
                f"The JSON schema has {len(text)} characters, more than {LARGEST_SCHEMA}: "
                "simplify it"
            )
        with self._lock:
            if (known := self._matchers.get(text)) is not None:
                self._matchers.move_to_end(text)
                return known
            if self._read is None:
                self._read = llguidance.hf.from_tokenizer(self._engine.tokenizer)
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                text, overrides={"whitespace_flexible": False}
            )
            matcher = llguidance.LLMatcher(self._read, grammar)
        except ValueError as error:
            raise RequestError(f"The JSON schema cannot be used: {_first(error)}") from error
        if matcher.is_error():
            raise RequestError(f"The JSON schema cannot be used: {_first(matcher.get_error())}")
        with self._lock:
            self._matchers[text] = matcher
            while len(self._matchers) > REMEMBERED:
                self._matchers.popitem(last=False)
        return matcher


class JsonConstraint:
    """A JSON constraint on the tokens of one answer, as `valora_serve.types.Constraint`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self, allowed: NDArray[np.bool_]) -> None:
        """Clear the entries of tokens that cannot come next; `allowed` is [vocabulary] bool."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        may = np.unpackbits(bits, bitorder="little")[: allowed.size].astype(bool)
        allowed[: may.size] &= may
        allowed[may.size :] = False  # rows that pad the vocabulary

    def advance(self, token: int) -> None:
        """Advance by the token that was sampled."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def check(self, text: str) -> None:
        """Check that a whole answer is JSON.

        Raises:
            RequestError: It is not.
        """
        try:
            json.loads(text, parse_int=str, parse_float=str)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"The answer is not JSON ({_first(error)}): simplify the schema"
            ) from error


def _first(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "it is none"
