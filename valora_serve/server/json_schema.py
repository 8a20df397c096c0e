"""JSON schemas before they are compiled: tightened or refused where llguidance is inexact.

It takes bounds and constants that float64 cannot hold, patterns and dates otherwise than JSON
Schema does. After `prepare`, every answer satisfies the schema that was sent.
"""

from __future__ import annotations

import math
import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from valora_serve.errors import RequestError

MAX_PARTS, DEEPEST = 30_000, 100
LARGEST = 9 * 10**18  # llguidance reads the integer part of bounds as 64 bits
DIGITS = 15  # decimal digits that every float64 keeps
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_DATA = {"const", "enum", "default", "examples", "dependentRequired"}
_JOINED = {"allOf", "anyOf", "oneOf", "$ref"}
_LOWER, _UPPER = (
    Context(prec=DIGITS, Emin=-1, Emax=1000, rounding=rounding, traps=[])
    for rounding in (ROUND_CEILING, ROUND_FLOOR)
)
"""Round bounds inwards, to 15 digits and at most 15 decimals."""
_DATE = (
    r"^([0-9]{4}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r":[0-5][0-9](\.[0-9]+)?([Zz]|[+-][0-9:]+)$"
_FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}.*{_TIME}"}
"""What formats refuse besides: 29 February and leap seconds. Others mean nothing, but for these:"""
_KEPT = {*_FORMATS, "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
_ESCAPE = r"\\(?![xb]\{)(?:[bBcdDfnprPsStuvwWx]|[^a-zA-Z])"
_CLASS = rf"\[\^?(?!\])(?:{_ESCAPE}|(?!&&|--|~~)[^\[\]\\])*\]"
_SAME = re.compile(rf"{_ESCAPE}|{_CLASS}|\((?!\?)|\(\?:|[^\\\[(.]|(\.)", re.DOTALL)
"""A part of a pattern that ECMA-262 and llguidance read alike, but for the dot."""


def prepare(schema: Any, *, strict: bool = False) -> Any:
    """Return a copy of a JSON schema to compile, whose answers all satisfy the schema."""
    if not isinstance(schema, dict | bool):
        raise RequestError("The JSON schema is wrong: expected an object or a bool")
    objects: list[dict[str, Any]] = []
    made = _tightened(schema, "", 0, objects, [0])
    if made is False:
        raise RequestError("No answer satisfies the JSON schema: allow for at least one")
    if strict and not any(map(_together, objects)):
        for node in objects:
            kinds = node.get("type", ())
            named = "properties" in node or "object" in (
                [kinds] if isinstance(kinds, str) else kinds
            )
            if named and not node.keys() & _JOINED:
                node.setdefault("additionalProperties", False)
    return made


def _together(node: dict[str, Any]) -> bool:
    parts, joined = node.get("allOf", ()), node.keys() & _JOINED
    return len(joined) > 1 or len(parts) > 1 or bool(joined and "properties" in node)


def _tightened(part: Any, key: str, depth: int, objects: list[Any], count: list[int]) -> Any:
    """Return a tightened copy of what a schema has under a key; schemas are added to `objects`."""
    count[0] += 1
    if depth > DEEPEST or count[0] > MAX_PARTS:
        most = f"{DEEPEST} levels" if depth > DEEPEST else f"{MAX_PARTS} parts"
        raise RequestError(f"The JSON schema has more than {most}: simplify it")
    if isinstance(part, list):
        return [_tightened(one, "", depth + 1, objects, count) for one in part]
    if not isinstance(part, dict):
        return part
    made = {
        name: inner if name in _DATA and key not in _NAMED
        else _tightened(inner, "" if key in _NAMED else name, depth + 1, objects, count)
        for name, inner in part.items()
    }  # fmt: skip
    if key in _NAMED:
        return made
    objects.append(made)
    _check_constants([made.get("const"), made.get("enum")])
    if isinstance(pattern := made.get("pattern"), str):
        made["pattern"] = _pattern(pattern)
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    form = made.get("format")
    if isinstance(form, str) and form in _FORMATS:
        made["allOf"] = [*made.get("allOf", ()), {"pattern": _FORMATS[form]}]
    elif isinstance(form, str) and form not in _KEPT:
        del made["format"]
    _tighten_numbers(made)
    return made


def _tighten_numbers(made: dict[str, Any]) -> None:
    for key, other, up in (
        ("minimum", "exclusiveMinimum", True), ("maximum", "exclusiveMaximum", False),
    ):  # fmt: skip
        given = ((made.pop(key, None), False), (made.pop(other, None), True))
        found = [_inwards(value, up, beyond) for value, beyond in given if value is not None]
        if found:
            made[key] = max(found) if up else min(found)
    if (step := made.get("multipleOf")) is not None:
        exact = _number(step)
        _, digits, exponent = exact.normalize().as_tuple()
        if exact <= 0 or len(digits) > 4 or not -4 <= int(exponent) <= 4:
            raise _lost("multipleOf", step, "use up to 4 digits and 4 decimals")
        if made.get("type") != "integer":  # with a fraction, float64 holds 15 digits
            limit = 10 ** (DIGITS if exact == exact.to_integral_value() else DIGITS - 4)
            made["minimum"] = max(made.get("minimum", -limit), -limit)
            made["maximum"] = min(made.get("maximum", limit), limit)


def _inwards(bound: Any, up: bool, beyond: bool) -> int | float:
    """The outermost number that satisfies a bound (`up`: a lower one) and can be kept."""
    exact, grid = _number(bound), _LOWER if up else _UPPER
    found = grid.create_decimal(exact)
    if beyond and found == exact:
        found = grid.next_plus(found) if up else grid.next_minus(found)
    if abs(found) >= LARGEST:
        if up == (found > 0):
            raise _lost("bound", bound, f"keep it within ±{LARGEST:g}")
        return -LARGEST if up else LARGEST
    return int(found) if found == found.to_integral_value() else float(found)


def _number(value: Any) -> Decimal:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return Decimal(repr(value))
    raise _lost("bound or multipleOf", value, "use a finite number")


def _check_constants(value: Any) -> None:
    """Refuse constants with numbers that float64, or llguidance, changes."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_constants(item)
    elif isinstance(value, int | float):
        digits, exponent = Decimal(repr(float(value))).normalize().as_tuple()[1:]
        if (
            len(digits) > DIGITS + isinstance(value, int)
            or abs(value) > 2**53
            or int(exponent) < -30
        ):
            raise _lost("constant", value, f"use a text, or a number of up to {DIGITS} digits")


def _pattern(pattern: str) -> str:
    """A pattern whose meaning in JSON Schema (ECMA-262) and in llguidance agree."""
    made, at = "", 0
    while at < len(pattern):
        if (found := _SAME.match(pattern, at)) is None:
            raise _lost("pattern", pattern[at : at + 4], "write it in another way")
        made += r"[^\n\r\u2028\u2029]" if found[1] else found[0]
        at = found.end()
    return made


def _lost(what: str, value: Any, remedy: str) -> RequestError:
    shown = str(value)[:60]
    return RequestError(f"The JSON schema has the {what} {shown}, which cannot be kept: {remedy}")
