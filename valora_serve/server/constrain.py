"""Constrained decoding: answers that follow a JSON schema or another grammar, with llguidance.

What cannot be kept exactly (`json_schema`), or exceeds limits in a trial, is refused before its
request is admitted. A constraint that fails later ends its request with an error.
"""

import asyncio
import json
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from valora_serve.errors import OverloadedError, RequestError
from valora_serve.server import json_schema
from valora_serve.server.json_schema import first_line
from valora_serve.server.telemetry.logs import LOG
from valora_serve.types import EngineClient

LARGEST_SCHEMA = 200_000  # characters
REMEMBERED = 64  # grammars that are cached
MAX_CHARS = 2_000_000  # of all cached grammars, which take about 200 bytes each
MAX_WAITING = 256  # grammars that wait to be compiled
MAX_OF_ONE = 16  # of one client
TRIAL_TOKENS, TRIAL_SECONDS = 64, 0.3  # of each of the two trials of a grammar, in all
JSON_ONLY = "start: json"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer follows, as plain data: a JSON schema, or rules that JSON is a part of."""

    # By the names of their rules, in lower-case letters; each refers to parts of itself only.
    schemas: Mapping[str, Mapping[str, Any] | bool]
    rules: str = JSON_ONLY  # in llguidance's form of Lark, from `start`; may name the schemas
    strict: tuple[str, ...] = ()  # schemas whose objects take no further keys, as in `prepare`
    begins: tuple[str, ...] = ("",)  # beginnings of answers, from which the grammar is tried

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool, *, strict: bool = False) -> Self:
        """Return the grammar of a JSON schema."""
        return cls({"json": schema}, strict=("json",) if strict else ())


@dataclass(eq=False, slots=True)
class _Known:
    """A cached grammar."""

    client: str  # that asked for it
    made: Any  # its matcher, or why it has none
    rules: str = ""  # that the matcher was made from
    worn: bool = False  # whether a copy of the matcher has filled the lexer that they share


class GrammarConstraint:
    """A grammar's constraint on the tokens of one answer, as `valora_serve.types.Constraint`."""

    def __init__(self, known: _Known, grammar: Grammar) -> None:
        self.grammar = grammar
        self._known, self._matcher = known, known.made.deep_copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._known.rules, self.grammar)

    def may(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, [tokenizer's vocabulary] bool, at least one."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        may = np.unpackbits(bits, bitorder="little").view(np.bool_)
        if self._matcher.is_error() or not may.any():
            raise self._given_up()
        return may

    def mask(self, allowed: NDArray[np.bool_]) -> None:
        """Clear the entries of tokens that cannot come next; `allowed` is [vocabulary] bool."""
        may = self.may()[: allowed.size]
        allowed[: may.size] &= may
        allowed[may.size :] = False  # rows that pad the vocabulary

    def advance(self, token: int) -> bool | None:
        """Advance by the token that was sampled."""
        free = None if self.grammar.rules == JSON_ONLY else self._matcher.is_accepting()
        if not self._matcher.consume_token(token):
            raise self._given_up()
        return free

    def check(self, text: str) -> None:
        """Check that a whole answer is JSON, unless the grammar has rules of its own."""
        if self.grammar.rules != JSON_ONLY:
            return
        try:
            json.loads(text, parse_int=str, parse_float=str)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"The answer does not follow the JSON schema ({first_line(error)}): simplify the "
                "schema"
            ) from error

    def _given_up(self) -> RequestError:
        self._known.worn = True
        reason = first_line(self._matcher.get_error()).removesuffix("<non-verbose/>").strip()
        if not self._matcher.is_error() or reason.startswith("NoExtension"):
            return RequestError("No answer satisfies the JSON schema: allow for at least one")
        return RequestError(
            f"The JSON schema is too complex ({reason}): use fewer alternatives, optional "
            "properties and repetitions"
        )


class Grammars:
    """Makes constraints from grammars, which are compiled once and cached, for one event loop.

    One thread compiles, so that grammars that are slow to compile leave the other cores to the
    engine. Clients take turns at it, and each keeps its share of the cache.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._tokenizer: Any = None
        self._known: OrderedDict[str, _Known] = OrderedDict()  # by the grammar's text
        self._waiting: Counter[tuple[str, str]] = Counter()  # requests by client and grammar
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "schema")
        self._process = json_schema.process()

    def read(self) -> None:
        """Read the engine's tokenizer; this holds up all threads for seconds, so do it at start."""
        self._tokenizer = read_tokenizer(self._engine.tokenizer)
        if self._tokenizer is None and self._engine.tokenizer is not None:
            LOG.warning(
                "response_format is not served: the base model's tokenizer is not one of the "
                "tokenizers library"
            )

    async def constraints(
        self, grammar: Grammar, count: int = 1, client: str = ""
    ) -> list[GrammarConstraint]:
        """Make constraints from a grammar; cancelling this leaves the queue."""
        key = _key(grammar)
        known = self._cached(key) or await self._in_turn(grammar, key, client)
        if isinstance(known.made, str):
            raise RequestError(known.made)
        return [GrammarConstraint(known, grammar) for _ in range(count)]

    def _cached(self, key: str) -> _Known | None:
        known = self._known.get(key)
        if known is None or known.worn:
            return None
        self._known.move_to_end(key)
        return known

    async def _in_turn(self, grammar: Grammar, key: str, client: str) -> _Known:
        """Wait until a grammar is compiled, which those wait for, too, that ask for the same."""
        waiter, mine = (client, key), sum(client == other for other, _ in self._waiting)
        full = len(self._waiting) >= MAX_WAITING or mine >= MAX_OF_ONE
        if full and waiter not in self._waiting:
            raise OverloadedError(
                "Too many JSON schemas wait to be compiled: try again in 1 s, and send the same "
                "schema rather than a new one each time"
            )
        self._waiting[waiter] += 1
        try:
            # Who has got the client's own turn queues for that of all, with one place there.
            async with self._turns.setdefault(client, asyncio.Lock()), self._turn:
                if (known := self._cached(key)) is not None:
                    return known
                return await asyncio.shield(self._compiled(grammar, key, client))
        finally:
            self._waiting[waiter] -= 1
            self._waiting += Counter()  # without those that are 0

    async def _compiled(self, grammar: Grammar, key: str, client: str) -> _Known:
        loop = asyncio.get_running_loop()
        try:
            known = await loop.run_in_executor(self._thread, self._compile, grammar, key)
        except RequestError as error:
            known = _Known(client, str(error))
        known.client = client
        self._known[key] = known
        # The oldest of the client that has the most goes for it.
        while len(self._known) > REMEMBERED or sum(map(len, self._known)) > MAX_CHARS:
            ((heaviest, _),) = Counter(one.client for one in self._known.values()).most_common(1)
            del self._known[next(key for key, one in self._known.items() if one.client == heaviest)]
        return known

    def close(self) -> None:
        """End the process that compiles first."""
        self._thread.shutdown(cancel_futures=True)
        self._process.shutdown()

    def _rules(self, key: str) -> str:
        """Return the rules of a grammar, which a process of its own has compiled."""
        began, ended = time.monotonic(), 0
        while True:
            try:
                return self._process.submit(json_schema.compiled, key).result()
            except BrokenProcessPool as error:  # by this grammar, or it was killed, maybe idle
                self._process, ended = json_schema.process(), ended + 1
                if ended == 2 or time.monotonic() - began > json_schema.SECONDS:
                    raise RequestError(
                        "The JSON schema takes too long to compile, or too much memory: simplify it"
                    ) from error

    def _compile(self, grammar: Grammar, key: str) -> _Known:
        """Make the matcher of a grammar, which is tried; refused if that fails."""
        if self._tokenizer is None:
            raise RequestError(
                "The base model's tokenizer takes no JSON schema: leave out response_format and "
                "tools"
            )
        rules = self._rules(key)
        known = _Known("", json_schema.matcher_of(rules, self._tokenizer), rules)
        GrammarConstraint(known, grammar).may()
        for begin in grammar.begins:
            for first in ('{[,"}]0', '"}]0,{['):  # the longest answer, and the shortest
                trial = GrammarConstraint(known, grammar)
                for token in self._tokenizer.tokenize_str(begin):
                    trial.advance(token)
                self._try(trial, first, TRIAL_SECONDS / len(grammar.begins))
        return known

    def _try(self, trial: GrammarConstraint, first: str, seconds: float) -> None:
        """Walk on in a grammar, by the `first` character allowed, to exceed its limits now."""
        preferred = [self._tokenizer.tokenize_str(character)[0] for character in first]
        until = time.monotonic() + seconds
        for _ in range(TRIAL_TOKENS):
            allowed = np.flatnonzero(trial.may())
            if self._tokenizer.eos_token in allowed or time.monotonic() > until:
                return
            trial.advance(next((one for one in preferred if one in allowed), int(allowed[0])))


# Of the engine's process: its tokenizer, and what was compiled there, by rules.
_tokenizer: Any = None
_restorable: OrderedDict[str, _Known] = OrderedDict()


def read_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer as the grammar engine has it, and constraints that arrive here use it.

    None if it is not one of the tokenizers library. Holds up all threads for seconds.
    """
    global _tokenizer  # noqa: PLW0603 - what unpickles has nothing else
    import llguidance

    try:
        end = tokenizer.eos_token_id
        _tokenizer = llguidance.LLTokenizer(_readable(tokenizer), eos_token=end)
    except (AttributeError, ValueError):
        _tokenizer = None
    return _tokenizer


def _restored(rules: str, grammar: Grammar) -> GrammarConstraint:
    """Make a constraint in the engine's process from what the server's has compiled and tried."""
    known = _restorable.get(rules)
    if known is None or known.worn:
        known = _Known("", json_schema.matcher_of(rules, _tokenizer), rules)
        _restorable[rules] = known
        while len(_restorable) > REMEMBERED or sum(map(len, _restorable)) > MAX_CHARS:
            _restorable.popitem(last=False)
    _restorable.move_to_end(rules)
    return GrammarConstraint(known, grammar)


def _readable(tokenizer: Any) -> str:
    """Return a tokenizer as JSON in which added tokens that are plain text are ordinary ones."""
    # The grammar engine allows added tokens nowhere, also those that models write: `<tool_call>`.
    made = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    vocabulary = made["model"]["vocab"]
    if isinstance(vocabulary, dict):
        added = made["added_tokens"]
        # Tokenizers of bytes write just these characters as they are.
        plain = [t for t in added if not t["special"] and re.fullmatch("[!-~]+", t["content"])]
        vocabulary.update({token["content"]: token["id"] for token in plain})
        made["added_tokens"] = [token for token in added if token not in plain]
    return json.dumps(made)


def _key(grammar: Grammar) -> str:
    """Return the text by which a grammar is known; refused if it is too long."""
    text = json.dumps([grammar.rules, grammar.strict, grammar.schemas, grammar.begins])
    if len(text) > LARGEST_SCHEMA:
        raise RequestError(
            f"The JSON schema has {len(text)} characters, more than {LARGEST_SCHEMA}: simplify it"
        )
    return text
