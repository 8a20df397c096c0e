"""Answers that keep to a JSON schema: llguidance says which tokens may come next."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from valora_serve.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from valora_serve.types import EngineClient

LARGEST_SCHEMA = 200_000  # characters


class Grammars:
    """Makes constraints for an engine's tokenizer, which is read at the first."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._read: Any = None

    def json(self, schema: Mapping[str, Any] | bool | None) -> JsonConstraint:
        """A constraint to a JSON schema, or to any JSON object if None.

        Raises:
            RequestError: The schema is none, or uses what is not supported.
        """
        import llguidance
        import llguidance.hf

        if self._read is None:
            self._read = llguidance.hf.from_tokenizer(self._engine.tokenizer)
        said: Any = {"type": "object"} if schema is None else schema
        try:
            text = json.dumps(said)
            if len(text) > LARGEST_SCHEMA:
                raise RequestError(
                    f"The JSON schema has {len(text)} characters, more than {LARGEST_SCHEMA}"
                )
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                text, overrides={"whitespace_flexible": False}
            )
            matcher = llguidance.LLMatcher(self._read, grammar)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The JSON schema cannot be used: {_first(error)}") from error
        if matcher.is_error():
            raise RequestError(f"The JSON schema cannot be used: {_first(matcher.get_error())}")
        return JsonConstraint(matcher)


class JsonConstraint:
    """One answer's place in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self, allowed: NDArray[np.bool_]) -> None:
        """Clear the entries of tokens that may not come next; `allowed` is [vocabulary] bool."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        may = np.unpackbits(bits, bitorder="little")[: allowed.size].astype(bool)
        allowed[: may.size] &= may
        allowed[may.size :] = False  # rows that pad the embedding

    def advance(self, token: int) -> None:
        """Be told which token was chosen."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


def _first(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "it is none"
