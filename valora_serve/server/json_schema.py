"""JSON schemas before they are compiled: tightened or refused where llguidance is inexact.

It takes bounds and constants that float64 cannot hold, patterns and dates otherwise than JSON
Schema does. After `prepare`, every answer satisfies the schema that was sent.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from valora_serve.errors import RequestError

MAX_PARTS, DEEPEST = 30_000, 100
LARGEST = 9 * 10**18  # llguidance reads the integer part of bounds as 64 bits
DIGITS = 15  # decimal digits that every float64 keeps
UP = Context(prec=DIGITS, Emin=-1, Emax=1000, rounding=ROUND_CEILING, traps=[])  # 15 decimals
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_DATA = {"const", "enum", "default", "examples", "dependentRequired"}
_JOINED = {"allOf", "anyOf", "oneOf", "$ref"}
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


def prepare(schema: Any, *, strict: bool = False) -> Any:
    """Return a copy of a JSON schema to compile, whose answers all satisfy the schema."""
    if schema is False:
        raise RequestError("No answer satisfies the JSON schema: allow for at least one")
    made = deepcopy(schema)
    nodes: list[dict[str, Any]] = []
    left, count = [(made, 0)], 0
    while left:
        (part, depth), count = left.pop(), count + 1
        if depth > DEEPEST or count > MAX_PARTS:
            most = f"{DEEPEST} levels" if depth > DEEPEST else f"{MAX_PARTS} parts"
            raise RequestError(f"The JSON schema has more than {most}: simplify it")
        if isinstance(part, list):
            left += [(one, depth + 1) for one in part]
        elif isinstance(part, dict):
            nodes.append(part)
            for name, inner in part.items():
                if name in _NAMED and isinstance(inner, dict):
                    left += [(one, depth + 2) for one in inner.values()]
                elif name not in _DATA:
                    left.append((inner, depth + 1))
    for node in nodes:
        _tighten(node)
    if strict and not any(map(_together, nodes)):
        for node in nodes:
            kinds = node.get("type")
            kinds = kinds if isinstance(kinds, list) else [kinds]
            if ("properties" in node or "object" in kinds) and not node.keys() & _JOINED:
                node.setdefault("additionalProperties", False)
    return made


def _together(node: dict[str, Any]) -> bool:
    """Whether several schemas name the properties of one object."""
    joined = node.keys() & _JOINED
    several = len(joined) > 1 or len(node.get("allOf", ())) > 1
    return several or bool(joined and "properties" in node)


def _tighten(node: dict[str, Any]) -> None:
    constants = json.dumps([node.get("const"), node.get("enum")])
    json.loads(constants, parse_int=_check, parse_float=_check, parse_constant=_check)
    if isinstance(pattern := node.get("pattern"), str):
        node["pattern"] = re.sub(_PART, _same, pattern)
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if isinstance(form := node.get("format"), str):
        if form in _FORMATS:
            node["allOf"] = [*node.get("allOf", ()), {"pattern": _FORMATS[form]}]
        elif form not in _KEPT:
            del node["format"]
    for key, beyond, sign in (
        ("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1),
    ):  # fmt: skip
        given = ((node.pop(key, None), False), (node.pop(beyond, None), True))
        if found := [_inwards(*one, sign) for one in given if one[0] is not None]:
            best = sign * max(found)
            node[key] = int(best) if best == best.to_integral_value() else float(best)
    if (step := node.get("multipleOf")) is not None:
        exact = _number(step)
        _, digits, exponent = exact.normalize().as_tuple()
        if exact <= 0 or len(digits) > 4 or not -4 <= int(exponent) <= 4:
            raise _lost("multipleOf", step, "use up to 4 digits and 4 decimals")
        if node.get("type") != "integer":  # with a fraction, float64 holds 15 digits
            limit = 10 ** (DIGITS if exact == exact.to_integral_value() else DIGITS - 4)
            node["minimum"] = max(node.get("minimum", -limit), -limit)
            node["maximum"] = min(node.get("maximum", limit), limit)


def _inwards(bound: Any, beyond: bool, sign: int) -> Decimal:
    """The least number of 15 digits and decimals that satisfies a bound, times its sign."""
    exact = _number(bound)
    exact = exact if sign > 0 else exact.copy_negate()
    found = UP.create_decimal(exact)
    if beyond and found == exact:
        found = UP.next_plus(found)
    if found >= LARGEST:
        raise _lost("bound", bound, f"keep it within ±{LARGEST:g}")
    return max(found, Decimal(-LARGEST))


def _number(value: Any) -> Decimal:
    number = Decimal(repr(value)) if type(value) in (int, float) else Decimal("nan")
    if not number.is_finite():
        raise _lost("bound or multipleOf", value, "use a finite number")
    return number


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
    shown = str(value)[:60]
    return RequestError(f"The JSON schema has the {what} {shown}, which cannot be kept: {remedy}")
