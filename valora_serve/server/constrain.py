"""Constrained decoding: answers that follow a JSON schema, with llguidance.

A schema is refused before its request is admitted if the grammar engine cannot keep it exactly
(`json_schema`), or exceeds its limits in a trial. A constraint that fails later ends its request
with an error, so that no answer ends by itself without following its schema.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from valora_serve.errors import RequestError
from valora_serve.server.json_schema import prepare
from valora_serve.server.telemetry.logs import LOG

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from valora_serve.types import EngineClient

LARGEST_SCHEMA = 200_000  # characters
REMEMBERED = 64  # compiled schemas that are cached
LIMITS: dict[str, Any] = {
    # Together they bound the computation of a token's mask to about 5 ms for 150,000 tokens.
    "max_items_in_row": 1_000,
    "step_max_items": 10_000,
    "step_lexer_fuel": 30_000,
    # Memory, about 1 kB a state.
    "max_lexer_states": 20_000,
    # The time to compile a schema, less than a second.
    "max_grammar_size": 200_000,
}
TRIAL_TOKENS, TRIAL_SECONDS = 64, 0.3  # of each of the two trials of a schema


class Grammars:
    """Makes constraints from JSON schemas; compiled schemas are cached.

    Args:
        engine: Engine whose tokenizer is used.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._tokenizer: Any = None
        self._matchers: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        # One thread, so that schemas that are slow to compile leave the other cores to the engine.
        self._compiling = ThreadPoolExecutor(1, "schema")

    def read(self) -> None:
        """Read the engine's tokenizer; this holds up all threads for seconds, so do it at start."""
        import llguidance.hf

        if self._engine.tokenizer is None:
            return
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(self._engine.tokenizer)
        except ValueError as error:
            LOG.warning("response_format is not served with this tokenizer: %s", error)

    async def json(
        self, schema: Mapping[str, Any] | bool | None, count: int = 1
    ) -> list[JsonConstraint]:
        """Make constraints from a JSON schema.

        Args:
            schema: JSON schema; None for any JSON object.
            count: Number of constraints; each serves for one answer.

        Raises:
            RequestError: The schema is invalid, too complex, or uses an unsupported feature.
        """
        loop = asyncio.get_running_loop()
        matcher = await loop.run_in_executor(self._compiling, self._matcher, schema)
        return [JsonConstraint(matcher.deep_copy(), schema) for _ in range(count)]

    def _matcher(self, schema: Mapping[str, Any] | bool | None) -> Any:
        """Return the compiled schema, from the cache if it is there."""
        if schema is None:
            schema = {"type": "object"}
        try:
            text = json.dumps(schema)
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
        matcher = self._compiled(prepare(schema))
        with self._lock:
            self._matchers[text] = matcher
            while len(self._matchers) > REMEMBERED:
                self._matchers.popitem(last=False)
        return matcher

    def _compiled(self, schema: Any) -> Any:
        """Compile a prepared schema, and try it.

        Raises:
            RequestError: The grammar engine cannot use the schema, or exceeds its limits.
        """
        import llguidance

        if self._tokenizer is None:
            self.read()
        if self._tokenizer is None:
            raise RequestError(
                "The base model's tokenizer takes no JSON schema: leave response_format out"
            )
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps({} if schema is True else schema),
                overrides={"whitespace_flexible": False, "lenient": False, "coerce_one_of": False},
            )
        except ValueError as error:
            raise RequestError(f"The JSON schema cannot be used: {_first(error)}") from error
        limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(f"The JSON schema cannot be used: {_first(matcher.get_error())}")
        for first in ('{[,"}]0', '"}]0,{['):  # the longest answer, and the shortest
            self._try(matcher.deep_copy(), first)
        return matcher

    def _try(self, matcher: Any, first: str) -> None:
        """Walk through a grammar, so that its limits are exceeded now rather than later.

        Args:
            matcher: The grammar, at its start.
            first: Characters, of which the first that is allowed is taken.

        Raises:
            RequestError: The grammar engine exceeds its limits, or allows no token.
        """
        preferred = [self._tokenizer.tokenize_str(character)[0] for character in first]
        end = self._tokenizer.eos_token
        until = time.monotonic() + TRIAL_SECONDS
        for _ in range(TRIAL_TOKENS):
            allowed = np.flatnonzero(_mask(matcher))
            if end in allowed or time.monotonic() > until:
                return
            chosen = next((token for token in preferred if token in allowed), allowed[0])
            _consume(matcher, int(chosen))


class JsonConstraint:
    """A JSON constraint on the tokens of one answer, as `valora_serve.types.Constraint`.

    Args:
        matcher: Compiled schema at its start.
        schema: The JSON schema; None for any JSON object.

    Attributes:
        schema: The JSON schema, from which another process makes the same constraint.
    """

    def __init__(self, matcher: Any, schema: Mapping[str, Any] | bool | None = None) -> None:
        self.schema = schema
        self._matcher = matcher

    def mask(self, allowed: NDArray[np.bool_]) -> None:
        """Clear the entries of tokens that cannot come next; `allowed` is [vocabulary] bool.

        Raises:
            RequestError: The grammar engine gave up.
        """
        may = _mask(self._matcher)[: allowed.size]
        allowed[: may.size] &= may
        allowed[may.size :] = False  # rows that pad the vocabulary

    def advance(self, token: int) -> None:
        """Advance by the token that was sampled.

        Raises:
            RequestError: The grammar engine gave up.
        """
        _consume(self._matcher, token)

    def check(self, text: str) -> None:
        """Check that a whole answer is JSON.

        Raises:
            RequestError: It is not.
        """
        try:
            json.loads(text, parse_int=str, parse_float=str)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"The answer does not follow the JSON schema ({_first(error)}): simplify the schema"
            ) from error


def _mask(matcher: Any) -> NDArray[np.bool_]:
    """Return which tokens may come next, [tokenizer's vocabulary] bool, at least one."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    may = np.unpackbits(bits, bitorder="little").astype(np.bool_)
    if matcher.is_error() or not may.any():
        raise _given_up(matcher)
    return may


def _consume(matcher: Any, token: int) -> None:
    if not matcher.consume_token(token):
        raise _given_up(matcher)


def _given_up(matcher: Any) -> RequestError:
    reason = _first(matcher.get_error()).removesuffix("<non-verbose/>").strip()
    if not matcher.is_error() or reason.startswith("NoExtension"):
        return RequestError("No answer satisfies the JSON schema: allow for at least one")
    return RequestError(
        f"The JSON schema is too complex ({reason}): use fewer alternatives, optional properties "
        "and repetitions"
    )


def _first(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "it is none"
