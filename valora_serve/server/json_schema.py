"""JSON schemas before they are compiled: tightened or refused where llguidance is inexact.

It reads bounds on numbers and regular expressions otherwise than JSON Schema does, and constants as
float64. After `prepare`, every answer satisfies the schema that was sent.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any
from urllib.parse import unquote

from valora_serve.errors import RequestError

MOST_NODES, DEEPEST = 10_000, 60
LARGEST_INTEGER = 2**53  # up to which float64 holds every integer
LARGEST_BOUND = Decimal(9 * 10**18)  # llguidance reads the integer part of bounds as 64 bits
DIGITS = 15  # decimal digits that every float64 keeps
_ONE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else",
        "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_JOINED = ("allOf", "anyOf", "oneOf")
_DAY = (
    r"([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    r"|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29"
)
_TIME = r"([01][0-9]|2[0-3])(:[0-5][0-9]){2}(\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {"date": f"^({_DAY})$", "time": f"^{_TIME}$", "date-time": f"^({_DAY})T{_TIME}$"}
"""Formats of which llguidance takes more, e.g. 30 February; others mean nothing, but for these:"""
_KEPT_FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
_CONTEXT = Context(prec=60, Emin=-10_000, Emax=10_000)


def prepare(schema: Any, *, strict: bool = False) -> Any:
    """Check a JSON schema, and tighten what the grammar engine would not keep.

    Bounds are moved inwards to 15 significant digits and at most 15 decimals, and exclusive bounds
    to the next number of this grid.

    Args:
        schema: JSON schema; it is not changed.
        strict: Whether objects take no keys beside those that the schema names, unless it says so
            itself, or describes an object by several schemas together (allOf, say).

    Returns:
        The schema to compile.

    Raises:
        RequestError: It cannot be kept, or is too large or too deep.
    """
    nodes: dict[str, Any] = {}
    made = _tightened(schema, "#", 0, nodes)
    if made is False:
        raise RequestError("No answer satisfies the JSON schema: allow for at least one")
    objects = {at: node for at, node in nodes.items() if isinstance(node, dict)}
    targets = {f"#{node['$anchor']}": at for at, node in objects.items() if "$anchor" in node}
    refs = {at: unquote(str(node["$ref"])) for at, node in objects.items() if "$ref" in node}
    refs = {at: targets.get(name, name) for at, name in refs.items()}
    for name in refs.values():
        if name not in nodes:
            raise _lost("reference", name, "refer to its own parts, such as #/$defs/name")
    if strict:
        _close(objects, refs)
    return made


def _tightened(schema: Any, at: str, depth: int, nodes: dict[str, Any]) -> Any:
    """Return a tightened copy of the schema at a pointer, and enter it and its parts in `nodes`."""
    if depth > DEEPEST or len(nodes) >= MOST_NODES:
        most = f"{DEEPEST} levels" if depth > DEEPEST else f"{MOST_NODES} parts"
        raise RequestError(f"The JSON schema has more than {most}: simplify it")
    if isinstance(schema, bool):
        nodes[at] = schema
        return schema
    if not isinstance(schema, dict) or "x-guidance" in schema:
        said = "expected an object or a bool, without x-guidance"
        raise RequestError(f"The JSON schema is wrong at {at[:60]}: {said}")
    made = nodes[at] = dict(schema)

    def inner(part: Any, *path: object) -> Any:
        names = [str(name).replace("~", "~0").replace("/", "~1") for name in path]
        return _tightened(part, "/".join((at, *names)), depth + 1, nodes)

    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            made[key] = {name: inner(part, key, name) for name, part in value.items()}
        elif key in _SEVERAL and isinstance(value, list):
            made[key] = [inner(part, key, number) for number, part in enumerate(value)]
        elif key in _ONE and isinstance(value, dict | bool):
            made[key] = inner(value, key)
        elif key in ("const", "enum"):
            _check_constants(value)
        elif key == "pattern" and isinstance(value, str):
            made[key] = _pattern(value)
        elif key == "uniqueItems" and value is False:
            del made[key]
        elif key == "format" and isinstance(value, str) and value not in _KEPT_FORMATS:
            del made[key]
            if value in _FORMATS:
                made["allOf"] = [*schema.get("allOf", ()), {"pattern": _FORMATS[value]}]
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
        _, digits, exponent = exact.normalize(_CONTEXT).as_tuple()
        if exact <= 0 or len(digits) > 4 or not -4 <= int(exponent) <= 4:
            raise _lost("multipleOf", step, "use up to 4 digits and 4 decimals")
        if made.get("type") != "integer":  # with a fraction, float64 holds 15 digits
            limit = 10 ** (DIGITS if exact == exact.to_integral_value() else DIGITS - 4)
            made["minimum"] = max(made.get("minimum", -limit), -limit)
            made["maximum"] = min(made.get("maximum", limit), limit)


def _inwards(bound: Any, up: bool, beyond: bool) -> int | float:
    """The outermost number that satisfies a bound (`up`: a lower one) and can be kept."""
    exact = _number(bound)
    magnitude = exact.adjusted() + 1 if exact else 0
    step = Decimal(1).scaleb(max(magnitude - DIGITS, -DIGITS), _CONTEXT)
    count = (exact / step).to_integral_value(ROUND_CEILING if up else ROUND_FLOOR)
    if beyond and count * step == exact:
        count += 1 if up else -1
    found = count * step
    if abs(found) >= LARGEST_BOUND:
        if up == (found > 0):
            raise _lost("bound", bound, f"keep it within ±{LARGEST_BOUND:g}")
        found = LARGEST_BOUND.copy_sign(found)
    return int(found) if found == found.to_integral_value() else float(found)


def _number(value: Any) -> Decimal:
    sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    exact = Decimal(repr(value)) if sound else Decimal("Infinity")
    if not sound or exact.adjusted() > 1000:
        raise _lost("bound or multipleOf", value, "use a finite number")
    return exact


def _check_constants(value: Any) -> None:
    """Refuse constants with numbers that float64, or llguidance, changes."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict | list):
            left += item.values() if isinstance(item, dict) else item
        elif isinstance(item, int | float) and not isinstance(item, bool):
            exact = Decimal(repr(item)) if math.isfinite(item) else Decimal("Infinity")
            _, digits, exponent = exact.as_tuple()
            if abs(exact) > LARGEST_INTEGER or (
                isinstance(item, float) and (len(digits) > DIGITS or int(exponent) < -2 * DIGITS)
            ):
                raise _lost("constant", item, f"use a text, or a number of up to {DIGITS} digits")


def _pattern(pattern: str) -> str:
    """A pattern whose meaning in JSON Schema (ECMA-262) and in llguidance agree."""
    made, inside, place = [], False, 0
    while place < len(pattern):
        rest, one = pattern[place:], pattern[place]
        if one == "\\":
            same = not rest[1:2].isalpha() or rest[1] in "bBcdDfnprPsStuvwWx"
            if not same or rest[1:3] in ("x{", "b{"):
                raise _lost("pattern", rest[:2], "write it in another way")
            made.append(rest[:2])
            place += 2
            continue
        # Classes in classes, set operations, empty classes and groups with flags or assertions.
        nested = inside and (one == "[" or rest[:2] in ("&&", "--", "~~"))
        empty = not inside and one == "[" and rest[1:].removeprefix("^").startswith("]")
        if nested or empty or (not inside and rest[:2] == "(?" and rest[2:3] != ":"):
            raise _lost("pattern", rest[:4], "write it in another way")
        if not inside and one == ".":
            one = r"[^\n\r\u2028\u2029]"
        inside = one != "]" if inside else one == "["
        made.append(one)
        place += 1
    return "".join(made)


def _close(nodes: dict[str, dict[str, Any]], refs: dict[str, str]) -> None:
    """Forbid further keys of the objects that one schema describes by itself, in place."""
    beside: dict[str, list[str]] = {}
    left, together = [], set()
    for at, node in nodes.items():
        lists = {key: node[key] for key in _JOINED if isinstance(node.get(key), list)}
        beside[at] = [f"{at}/{key}/{n}" for key, parts in lists.items() for n in range(len(parts))]
        beside[at] += [refs[at]] if at in refs else []
        several = len(lists) + (at in refs) > 1 or len(lists.get("allOf", ())) > 1
        left += beside[at] if several or "properties" in node else []
    while left:
        if (at := left.pop()) not in together:
            together.add(at)
            left += beside.get(at, ())
    for at, node in nodes.items():
        kinds = node.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if at not in together and not beside[at] and ("properties" in node or "object" in kinds):
            node.setdefault("additionalProperties", False)


def _lost(what: str, value: Any, remedy: str) -> RequestError:
    shown = str(value)[:60]
    return RequestError(f"The JSON schema has the {what} {shown}, which cannot be kept: {remedy}")
