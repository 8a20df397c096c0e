"""JSON schemas: tightened, or refused, where llguidance is inexact; compiled in a process first.

Compiling may take hours, or all memory: some schemas end that process, which has limits.
"""

import ctypes
import json
import multiprocessing
import os
import re
import resource
import signal
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from decimal import ROUND_CEILING, Context, Decimal
from pathlib import Path
from typing import Any

from valora_serve.errors import RequestError

SECONDS = 1.0  # of computing, for one grammar
MAX_BYTES = 2**30  # beyond those of the process without any
MAX_STACK = 2**21  # bytes, less than any thread of the server has
LIMITS: dict[str, Any] = {
    # Together they bound the computation of a token's mask to about 5 ms for 150,000 tokens.
    "max_items_in_row": 1_000,
    "step_max_items": 10_000,
    "step_lexer_fuel": 30_000,
    # Memory, about 1 kB a state.
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
_OPTIONS = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
_SPACED = {"item_separator": ", ", "key_separator": ": "}  # as chat templates write calls
LARGEST = 9 * 10**18  # llguidance reads the integer part of bounds as 64 bits
DIGITS = 15  # decimal digits that every float64 keeps
UP = Context(prec=DIGITS, Emin=-1, Emax=1000, rounding=ROUND_CEILING, traps=[])  # 15 decimals
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
_DATA = {"const", "enum", "default", "examples"}
JOINED = {"allOf", "anyOf", "oneOf", "$ref"}  # by which schemas name properties of one object
_DATE = (
    r"^([0-9]{4}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r":[0-5][0-9](\.[0-9]+)?([Zz]|[+-][0-9:]+)$"
_FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}.*{_TIME}"}
"""What formats refuse besides: 29 February and leap seconds. Others mean nothing, but for these:"""
_KEPT = {"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
_ESCAPE = r"\\(?![xb]\{)(?:[bBcdDfnprPsStuvwWx]|[^a-zA-Z])"
_CLASS = rf"\[\^?(?!\])(?:{_ESCAPE}|(?!&&|--|~~)[^\[\]\\])*\]"
_PART = rf"(?s){_ESCAPE}|{_CLASS}|\((?!\?)|\(\?:|[^\\\[(.]|(?P<dot>\.)|(?P<other>.)"


def first_line(error: object) -> str:
    """Return the first line of an error of the grammar engine, without its place in the rules."""
    text = str(error).strip().rpartition("failed to compile JSON schema: ")[2]
    text = re.sub(r"^regex parse error:\n {4}(.*)\n[ ^]*\nerror: ", r"pattern \1: ", text)
    return text.splitlines()[0][:300] if text else "it is none"


def process() -> ProcessPoolExecutor:
    """Make the process, which is started when it is needed."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (os.getpid(),))


def _begin(server: int) -> None:
    """Limit this process, which ends with the server, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != server:  # it ended before that
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    max_bytes = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK, MAX_STACK))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def compiled(key: str) -> str:
    """Return the rules of a grammar, which its `key` describes in JSON, with those of its schemas.

    Raises a `RequestError` if it cannot be compiled.
    """
    import llguidance

    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends this process
    try:
        rules, strict, schemas, *_ = json.loads(key)
        for name, schema in schemas.items():
            try:
                made = prepare(schema, strict=name in strict)
            except RequestError as error:
                raise RequestError(f"{_title(name, schema)}{error}") from error
            options = {"x-guidance": _OPTIONS if name == "json" else _OPTIONS | _SPACED}
            made = made | options if isinstance(made, dict) else options
            rules += f"\n{name}: %json {json.dumps(made)}"
        # Single bytes, as what takes for ever does so with any vocabulary.
        matcher_of(rules, llguidance.LLTokenizer("byte"))
    except RecursionError as error:
        raise RequestError("The JSON schema has too many levels: simplify it") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return str(rules)


def matcher_of(rules: str, tokenizer: Any) -> Any:
    """Return the grammar engine's matcher of rules; or a `RequestError`."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, rules, log_level=0, limits=limits)
    if matcher.is_error():
        wrong, title = matcher.get_error(), ""
        if at := re.match(r"at (\d+)\(", wrong):
            name, _, schema = rules.splitlines()[int(at[1]) - 1].partition(": %json ")
            title = _title(name, json.loads(schema)) if schema else ""
        raise RequestError(f"{title}The JSON schema cannot be used: {first_line(wrong)}")
    return matcher


def _title(name: str, schema: Any) -> str:
    """Return what an error about one of several schemas begins with."""
    return "" if name == "json" else f"{schema['title']}: "


def prepare(schema: Any, *, strict: bool = False) -> Any:
    """Return a copy of a JSON schema to compile, whose answers all satisfy the schema."""
    if schema is False:
        raise RequestError("No answer satisfies the JSON schema: allow for at least one")
    made = deepcopy(schema)
    nodes = _nodes(made)
    for node in nodes:
        _tighten(node)
    if strict and not any(map(_together, nodes)):
        for node in nodes:
            is_object = "properties" in node or "object" in str(node.get("type"))
            if is_object and not node.keys() & JOINED:
                node.setdefault("additionalProperties", False)
    return made


def _nodes(part: Any) -> list[dict[str, Any]]:
    """All schemas in a part of one, itself first."""
    if isinstance(part, list):
        return [node for one in part for node in _nodes(one)]
    if not isinstance(part, dict):
        return []
    inner: list[Any] = []
    for name, value in part.items():
        named = name in _NAMED and isinstance(value, dict)
        inner += value.values() if named else [value] * (name not in _DATA)
    return [part, *_nodes(inner)]


def _together(node: dict[str, Any]) -> bool:
    """Whether several schemas name the properties of one object."""
    joined = node.keys() & JOINED
    several = len(joined) > 1 or len(node.get("allOf", ())) > 1
    return several or bool(joined and "properties" in node)


def _tighten(node: dict[str, Any]) -> None:
    constants = json.dumps([node.get("const"), node.get("enum")])
    json.loads(constants, parse_int=_check, parse_float=_check)
    if not isinstance(every := node.get("allOf", []), list):
        raise RequestError("The JSON schema has an allOf that is no list: send a list of schemas")
    if isinstance(pattern := node.get("pattern"), str):
        node["pattern"] = re.sub(_PART, _same, pattern)
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if isinstance(form := node.get("format"), str):
        if form in _FORMATS:
            node["allOf"] = [*every, {"pattern": _FORMATS[form]}]
        elif form not in _KEPT:
            del node["format"]
    numeric = {key for key, value in node.items() if type(value) in (int, float)}
    limits = []
    if "multipleOf" in numeric:
        step = Decimal(repr(node["multipleOf"]))
        _, digits, exponent = step.normalize().as_tuple()
        if step <= 0 or len(digits) > 4 or not -4 <= int(exponent) <= 4:
            raise _lost("multipleOf", node["multipleOf"], "use up to 4 digits and 4 decimals")
        if node.get("type") != "integer":  # with a fraction, float64 holds 15 digits
            limits.append(Decimal(-(10 ** (DIGITS - 4 * (step % 1 != 0)))))
    for sign, *keys in ((1, "minimum", "exclusiveMinimum"), (-1, "maximum", "exclusiveMaximum")):
        given = [_inwards(node.pop(key), key, sign) for key in keys if key in numeric] + limits
        if given:
            node[keys[0]] = float(sign * max(given))


def _inwards(bound: float, key: str, sign: int) -> Decimal:
    """The least number of 15 digits and decimals that satisfies a bound, times its sign."""
    exact = Decimal(repr(sign * bound))
    found = UP.create_decimal(exact)
    if found == exact and key.startswith("exclusive"):
        found = UP.next_plus(found)
    if found >= LARGEST:
        raise _lost("bound", bound, f"keep it within ±{LARGEST:g}")
    return max(found, Decimal(-LARGEST))


def _check(text: str) -> None:
    """Refuse a number of a constant that float64, or llguidance, changes."""
    digits, exponent = Decimal(repr(float(text))).normalize().as_tuple()[1:]
    long = len(digits) > DIGITS + text.lstrip("-").isdecimal()
    if abs(Decimal(text)) > 2**53 or long or int(exponent) < -30:
        raise _lost("constant", text, f"use a text, or a number of up to {DIGITS} digits")


def _same(part: re.Match[str]) -> str:
    """A part of a pattern whose meaning in JSON Schema (ECMA-262) and in llguidance agree."""
    if part["other"]:
        raise _lost("pattern", part.string[part.start() :][:4], "write it in another way")
    return r"[^\n\r\u2028\u2029]" if part["dot"] else part[0]


def _lost(what: str, value: Any, remedy: str) -> RequestError:
    return RequestError(f"The JSON schema's {what} {value!s:.60} cannot be kept: {remedy}")
