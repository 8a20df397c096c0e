"""JSON schemas before they are compiled to a grammar: what cannot be kept is refused.

The grammar engine (llguidance) refuses keywords that it does not implement. It is inexact for some
numbers and regular expressions, and takes schemas that no finite answer satisfies; `prepare`
refuses those, or tightens them so that every answer satisfies the schema that was sent.
"""

from __future__ import annotations

from collections import defaultdict
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from valora_serve.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_NODES = 10_000
DEEPEST = 60
LARGEST_INTEGER = 2**53
"""JSON numbers are read as float64, which holds every integer up to this."""

LARGEST_BOUND = Decimal(9 * 10**18)
"""The grammar engine reads the integer part of bounds as 64-bit integers."""

LONGEST = 100_000
"""Most items, properties or characters that an answer can be required to have."""

DIGITS = 15
"""Decimal digits that every float64 keeps."""

_ONE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else",
        "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
_COUNTS = ("minItems", "minLength", "minProperties", "maxItems", "maxLength", "maxProperties")
_DAY = (
    r"([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    r"|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29"
)
_TIME = r"([01][0-9]|2[0-3])(:[0-5][0-9]){2}(\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {"date": f"^({_DAY})$", "time": f"^{_TIME}$", "date-time": f"^({_DAY})T{_TIME}$"}
"""Formats of which the grammar engine takes more, e.g. 30 February, or second 60 at any time."""

_KEPT_FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
_CONTEXT = Context(prec=60, Emin=-10_000, Emax=10_000)

Schema = dict[str, Any] | bool


def prepare(schema: Any, *, strict: bool = False) -> Any:
    """Check a JSON schema, and tighten its limits on numbers to what the grammar engine keeps.

    Bounds are moved inwards to 15 significant digits and at most 15 decimals, and exclusive bounds
    to the next number of this grid; so every number that satisfies the result satisfies `schema`.

    Args:
        schema: JSON schema; it is not changed.
        strict: Whether objects take no keys beside those that the schema names, unless it says so
            itself, or describes an object by several schemas together (allOf, say).

    Returns:
        The schema to compile.

    Raises:
        RequestError: No answer, or none that is certain, can satisfy the schema, or it is too large
            or too deep.
    """
    nodes: dict[str, Schema] = {}
    made = _copied(schema, "#", 0, nodes)
    targets = _references(nodes)
    if strict:
        _close(nodes, targets)
    if not _finite(nodes, targets):
        raise RequestError(
            "No finite answer satisfies the JSON schema: a part that every answer needs is false, "
            "or requires itself; make that part optional"
        )
    return made


def _copied(schema: Any, at: str, depth: int, nodes: dict[str, Schema]) -> Any:
    """Return a tightened copy of the schema at a pointer, and enter it and its parts in `nodes`."""
    if depth > DEEPEST:
        raise RequestError(f"The JSON schema is nested deeper than {DEEPEST} levels: simplify it")
    if len(nodes) >= MOST_NODES:
        raise RequestError(f"The JSON schema has more than {MOST_NODES} parts: simplify it")
    if isinstance(schema, bool):
        nodes[at] = schema
        return schema
    if not isinstance(schema, dict):
        raise RequestError(
            f"The JSON schema is wrong at {_short(at)}: expected an object or a bool"
        )
    made = nodes[at] = dict(schema)
    if "x-guidance" in made:
        raise RequestError("The JSON schema holds x-guidance, which is not supported: leave it out")
    _simplify(made)

    def copied(part: Any, *path: object) -> Any:
        return _copied(part, "/".join((at, *map(_escaped, path))), depth + 1, nodes)

    for key in _ONE:
        if isinstance(made.get(key), (dict, bool)):
            made[key] = copied(made[key], key)
    for key in _SEVERAL:
        if isinstance(made.get(key), list):
            made[key] = [copied(part, key, number) for number, part in enumerate(made[key])]
    for key in _NAMED:
        if isinstance(made.get(key), dict):
            made[key] = {name: copied(part, key, name) for name, part in made[key].items()}
    _check_texts(made, at)
    _tighten(made, at)
    _check_values([made[key] for key in ("const", "enum") if key in made])
    return made


def _simplify(made: dict[str, Any]) -> None:
    """Leave out what means nothing, and say exactly what a format means, in place."""
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    form = made.get("format")
    if isinstance(form, str) and form not in _KEPT_FORMATS:
        del made["format"]  # others mean nothing, as JSON Schema has it
        if form in _FORMATS:
            parts = made.get("allOf")
            exact = {"pattern": _FORMATS[form]}
            made["allOf"] = [*parts, exact] if isinstance(parts, list) else [exact]


def _check_texts(made: dict[str, Any], at: str) -> None:
    """Refuse answers that are too long, and rewrite the pattern, in place."""
    if isinstance(made.get("pattern"), str):
        made["pattern"] = _pattern(made["pattern"], f"{at}/pattern")
    for key in _COUNTS:
        count = made.get(key)
        if isinstance(count, float) and count.is_integer():
            made[key] = int(count)
        if isinstance(count, (int, float)) and count > LONGEST:
            if key.startswith("max"):
                del made[key]  # no answer is as long
                continue
            raise RequestError(
                f"The JSON schema has {key} {_short(count)}, more than an answer can hold: "
                f"ask for at most {LONGEST}"
            )


def _tighten(made: dict[str, Any], at: str) -> None:
    """Move the bounds on numbers of a schema inwards, in place."""
    for key, exclusive, up in (
        ("minimum", "exclusiveMinimum", True),
        ("maximum", "exclusiveMaximum", False),
    ):
        given = [(key, made.pop(key, None), False), (exclusive, made.pop(exclusive, None), True)]
        if isinstance(given[1][1], bool):  # draft 4: it says what `minimum` means
            given = [(key, given[0][1], given[1][1])]
        bounds = [
            _inwards(bound, f"{at}/{name}", up=up, strict=strict)
            for name, bound, strict in given
            if bound is not None
        ]
        if bounds:
            bound = max(bounds) if up else min(bounds)
            made[key] = int(bound) if bound == bound.to_integral_value() else float(bound)
    step = made.get("multipleOf")
    if step is None:
        return
    exact = _number(step, f"{at}/multipleOf")
    _, digits, exponent = exact.normalize(_CONTEXT).as_tuple()
    if exact <= 0 or len(digits) > 4 or not -4 <= int(exponent) <= 4:
        raise RequestError(
            f"The JSON schema has multipleOf {_short(step)}, which cannot be kept: it takes up to "
            "4 digits and 4 decimals"
        )
    if made.get("type") != "integer":  # with a fraction, float64 holds 15 digits
        limit = 10 ** (DIGITS if exact == exact.to_integral_value() else DIGITS - 4)
        made["minimum"] = max(made.get("minimum", -limit), -limit)
        made["maximum"] = min(made.get("maximum", limit), limit)


def _inwards(bound: Any, at: str, *, up: bool, strict: bool) -> Decimal:
    """Return the outermost number that satisfies a bound (`up`: a lower one) and can be kept."""
    exact = _number(bound, at)
    magnitude = exact.adjusted() + 1 if exact else 0
    step = Decimal(1).scaleb(max(magnitude - DIGITS, -DIGITS), _CONTEXT)
    count = (exact / step).to_integral_value(ROUND_CEILING if up else ROUND_FLOOR)
    if strict and count * step == exact:
        count += 1 if up else -1
    found = count * step
    if abs(found) < LARGEST_BOUND:
        return found
    if up == (found > 0):
        raise RequestError(
            f"The JSON schema has the bound {_short(bound)} at {_short(at)}, which cannot be kept: "
            f"keep it within ±{LARGEST_BOUND:g}"
        )
    return LARGEST_BOUND if found > 0 else -LARGEST_BOUND


def _pattern(pattern: str, at: str) -> str:
    """Return a pattern whose meaning in JSON Schema (ECMA-262) and in the grammar engine agree."""
    made, inside, place = [], False, 0
    while place < len(pattern):
        two, one = pattern[place : place + 2], pattern[place]
        if one == "\\":
            if (two[1:].isalpha() and two[1] not in "bBcdDfnprPsStuvwWx") or pattern[place + 1 :][
                :2
            ] in ("x{", "b{"):
                raise _differs(two, at)
            made.append(two)
            place += 2
            continue
        if inside:
            if one == "[" or two in ("&&", "--", "~~"):
                raise _differs(two, at)
            inside = one != "]"
        elif one == "[":
            inside = True
            # An empty class, or a bracket as its first member, means something else in each.
            if pattern[place + 1 :].removeprefix("^").startswith("]"):
                raise _differs(pattern[place : place + 3], at)
        elif two == "(?" and pattern[place + 2 : place + 3] != ":":
            raise _differs(pattern[place : place + 4], at)
        elif one == ".":
            one = r"[^\n\r\u2028\u2029]"
        made.append(one)
        place += 1
    return "".join(made)


def _differs(part: str, at: str) -> RequestError:
    return RequestError(
        f"The JSON schema has {part} in the pattern at {_short(at)}, which is not supported: "
        "write it in another way"
    )


def _number(value: Any, at: str) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"The JSON schema is wrong at {_short(at)}: expected a number")
    exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if not exact.is_finite() or exact.adjusted() > 1000:
        raise RequestError(f"The JSON schema has a number at {_short(at)} that is too large")
    return exact


def _check_values(left: list[Any]) -> None:
    """Refuse constants with numbers that float64, or the grammar engine, changes."""
    while left:
        item = left.pop()
        if isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list):
            left += item
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            exact = _number(item, "a constant")
            _, digits, exponent = exact.as_tuple()
            fraction = isinstance(item, float) and (len(digits) > DIGITS or exponent < -2 * DIGITS)  # type: ignore[operator]
            if abs(exact) > LARGEST_INTEGER or fraction:
                raise RequestError(
                    f"The JSON schema has the constant {_short(item)}, which cannot be kept: use a "
                    f"text, an integer up to 2**53, or a number of {DIGITS} digits"
                )


def _references(nodes: dict[str, Schema]) -> dict[str, str]:
    """Return the pointers that the references of parts stand for, by the part's pointer."""
    anchors = {
        node["$anchor"]: at
        for at, node in nodes.items()
        if isinstance(node, dict) and isinstance(node.get("$anchor"), str)
    }
    found = {}
    for at, node in nodes.items():
        if not isinstance(node, dict) or "$ref" not in node:
            continue
        path = unquote(node["$ref"]) if isinstance(node["$ref"], str) else ""
        target = path if path in nodes else anchors.get(path[1:]) if path[:1] == "#" else None
        if target is None:
            raise RequestError(
                f"The JSON schema refers to {_short(node['$ref'])} at {_short(at)}: refer to parts "
                "of the schema itself, such as #/$defs/name"
            )
        found[at] = target
    return found


def _options(at: str, node: Schema, *keys: str) -> list[str]:
    """Return the pointers to the parts in lists such as anyOf."""
    lists = {} if isinstance(node, bool) else {key: node.get(key) for key in keys}
    return [
        f"{at}/{key}/{number}"
        for key, parts in lists.items()
        for number in range(len(parts) if isinstance(parts, list) else 0)
    ]


def _close(nodes: dict[str, Schema], targets: dict[str, str]) -> None:
    """Forbid further keys of the objects that one schema describes by itself, in place."""
    beside = {at: _options(at, node, "allOf", "anyOf", "oneOf") for at, node in nodes.items()}
    for at, target in targets.items():
        beside[at].append(target)
    left, together = [], set()
    for at, node in nodes.items():
        if isinstance(node, dict) and (
            "properties" in node or len(_options(at, node, "allOf")) > 1
            or len(node.keys() & {"$ref", "allOf", "anyOf", "oneOf"}) > 1
        ):  # fmt: skip
            left += beside[at]
    while left:
        at = left.pop()
        if at not in together:
            together.add(at)
            left += beside[at]
    for at, node in nodes.items():
        if isinstance(node, dict) and at not in together and not beside[at]:
            kinds = node.get("type", ())
            if "properties" in node or "object" in ([kinds] if isinstance(kinds, str) else kinds):
                node.setdefault("additionalProperties", False)


def _finite(nodes: dict[str, Schema], targets: dict[str, str]) -> bool:
    """Whether a finite answer has the shape that the schema asks for, the least fixed point."""
    needs = {at: list(_needs(at, node, targets)) for at, node in nodes.items()}
    users = defaultdict(list)
    for at, groups in needs.items():
        for child in {child for options in groups for option in options for child in option}:
            users[child].append(at)
    found: set[str] = set()
    left = list(nodes)
    while left:
        at = left.pop()
        if at not in found and all(any(map(found.issuperset, one)) for one in needs[at]):
            found.add(at)
            left += users[at]
    return "#" in found


def _needs(at: str, node: Schema, targets: dict[str, str]) -> Iterator[list[list[str]]]:
    """Yield lists of options, of each of which an answer takes one; an option is parts it holds."""
    if isinstance(node, bool):
        if not node:
            yield []
        return
    if at in targets:
        yield [[targets[at]]]
    for part in _options(at, node, "allOf"):
        yield [[part]]
    for key in ("anyOf", "oneOf"):
        if isinstance(node.get(key), list):
            yield [[part] for part in _options(at, node, key)]
    kinds = node.get("type", _TYPES)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not node.keys() & {"const", "enum"} and isinstance(kinds, (list, tuple)):
        yield [list(_required(kind, node, at)) for kind in kinds]


def _required(kind: Any, node: dict[str, Any], at: str) -> Iterator[str]:
    """Yield the parts that an answer of a type must hold."""
    if kind == "object" and isinstance(node.get("required"), list):
        properties = node.get("properties")
        for name in node["required"]:
            if isinstance(properties, dict) and name in properties:
                yield f"{at}/properties/{_escaped(name)}"
            elif isinstance(node.get("additionalProperties"), dict):
                yield f"{at}/additionalProperties"
    if kind == "array" and isinstance(node.get("minItems"), int):
        first = node.get("prefixItems", node.get("items"))
        key = "prefixItems" if "prefixItems" in node else "items"
        count = len(first) if isinstance(first, list) else 0
        for number in range(min(count, node["minItems"])):
            yield f"{at}/{key}/{number}"
        rest = "additionalItems" if key == "items" and count else "items"
        if node["minItems"] > count and isinstance(node.get(rest), (dict, bool)):
            yield f"{at}/{rest}"


def _escaped(name: Any) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
