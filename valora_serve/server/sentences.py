"""Turns pydantic's errors into one sentence that names the field and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_serve.errors import FieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LONGEST_NAME, LONGEST_PATH, LONGEST_TEXT = 60, 200, 300

_KINDS = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_type": "a whole number",
    "list_type": "a list",
    "mapping_type": "an object",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_type": "a text",
    "string_unicode": "a text in UTF-8",
    "tuple_type": "a list",
}
"""What a field must be, by the type of pydantic's error."""

_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
}
_LENGTHS = {
    "string_too_long": ("at most", "max_length", "characters"),
    "string_too_short": ("at least", "min_length", "characters"),
    "too_long": ("at most", "max_length", "items"),
    "too_short": ("at least", "min_length", "items"),
}


def refusal(errors: Iterable[Mapping[str, Any]], sent: Any, root: str = "The body") -> FieldError:
    """The error that answers an invalid request.

    Of a union's alternatives, the one whose validation got furthest was probably meant; if several
    got equally far, the sentence names what each of them takes.

    Args:
        errors: pydantic's errors, at least one.
        sent: What was validated: parsed JSON.
        root: What sentences call it as a whole.
    """
    placed = [(_place(error, sent), error) for error in errors]
    (path, value), first = max(placed, key=lambda item: len(item[0][0]))
    same = [error for (other, _), error in placed if other == path]
    name = ".".join(str(part)[:LONGEST_NAME] for part in path)[:LONGEST_PATH]
    kinds = list(dict.fromkeys(kind for kind in map(_kind, same) if kind))
    if kinds and len(same) > 1:
        said = f"must be {' or '.join(kinds)}{_but(value)}"
    else:
        said = _sentence(first, value)
    shown = name.encode("utf-8", "replace").decode()
    if said.startswith("."):  # goes on with a field within this one
        return FieldError(f"{shown}{said}".removeprefix("."), shown or None)
    return FieldError(f"{shown or root} {said}", shown or None)


def _place(error: Mapping[str, Any], sent: Any) -> tuple[tuple[str | int, ...], Any]:
    """Path of a field and its value; pydantic's names of a union's alternatives are left out."""
    path: list[str | int] = []
    value = sent
    for part in error["loc"]:
        in_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if in_list or (isinstance(value, dict) and part in value):
            value = value[part]
            path.append(part)
    if error["type"] == "missing" and error["loc"]:
        path.append(error["loc"][-1])
    return tuple(path), value


def _kind(error: Mapping[str, Any]) -> str | None:
    if error["type"] in ("literal_error", "enum"):
        return str(error.get("ctx", {}).get("expected", "another value"))
    return _KINDS.get(error["type"])


def _sentence(error: Mapping[str, Any], value: Any) -> str:
    kind, facts = error["type"], error.get("ctx", {})
    if (wanted := _kind(error)) is not None:
        return f"must be {wanted}{_but(value)}"
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"must be {words} {facts.get(name)}{_but(value)}"
    if kind in _LENGTHS:
        words, name, unit = _LENGTHS[kind]
        count = facts.get(name)
        unit = unit.removesuffix("s") if count == 1 else unit
        has = f": it has {len(value)}" if isinstance(value, (str, list, dict)) else ""
        return f"must have {words} {count} {unit}{has}"
    return _other_sentence(kind, facts)


def _other_sentence(kind: str, facts: Mapping[str, Any]) -> str:
    name = str(facts.get("discriminator", "type")).strip("'")
    known = {
        "missing": "is missing: add it",
        "extra_forbidden": "is no field of this request: leave it out, or check its spelling",
        "string_pattern_mismatch": f"must match the regular expression {facts.get('pattern')}",
        "union_tag_invalid": f".{name} must be one of {facts.get('expected_tags')}",
        "union_tag_not_found": f".{name} is missing: add it",
        "json_invalid": f"is not valid JSON: {facts.get('error')}",
    }
    if kind in ("value_error", "assertion_error") and str(facts.get("error", "")):
        return str(facts["error"])[:LONGEST_TEXT]
    return known.get(kind, "is not valid: see /docs for what it takes")


def _but(value: Any) -> str:
    """What the value is instead, without quoting any text of the request."""
    if value is None:
        return ": it is null"
    if isinstance(value, bool):
        return f": it is {str(value).lower()}"
    if isinstance(value, (int, float)):
        shown = str(value) if isinstance(value, float) or abs(value) < 10**15 else "a larger number"
        return f": it is {shown}"
    names: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}
    return f": it is {names[type(value)]}" if type(value) in names else ""
