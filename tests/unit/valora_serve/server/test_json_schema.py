"""JSON schemas: what is tightened, what is refused."""

import json

import pytest

from valora_serve.errors import RequestError
from valora_serve.server.json_schema import prepare


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"minimum": 3, "maximum": 4.5}, {"minimum": 3, "maximum": 4.5}),
        ({"exclusiveMinimum": 0}, {"minimum": 1e-15}),
        ({"exclusiveMaximum": 1}, {"maximum": 0.999999999999999}),
        ({"exclusiveMinimum": -2, "minimum": -3}, {"minimum": -1.99999999999999}),
        ({"exclusiveMinimum": 1, "minimum": 2}, {"minimum": 2}),
        ({"minimum": 1e-300}, {"minimum": 1e-15}), ({"maximum": 1e-300}, {"maximum": 0}),
        ({"minimum": -1e-300}, {"minimum": 0}),
        ({"minimum": 9007199254740993}, {"minimum": 9007199254741000}),
        ({"maximum": 2**63 - 1}, {"maximum": 9 * 10**18}),
        ({"maximum": 1e300}, {"maximum": 9 * 10**18}),
        ({"minimum": -(2**63)}, {"minimum": -9 * 10**18}),
        ({"multipleOf": 0.25}, {"multipleOf": 0.25, "minimum": -(10**11), "maximum": 10**11}),
        ({"multipleOf": 3, "minimum": 0}, {"multipleOf": 3, "minimum": 0, "maximum": 10**15}),
        ({"multipleOf": 3, "type": "integer"}, {"multipleOf": 3, "type": "integer"}),
        ({"uniqueItems": False}, {}), ({"format": "nonsense"}, {}),
        ({"format": "uuid"}, {"format": "uuid"}),
        ({"pattern": r"^a.b[.]\.$"}, {"pattern": r"^a[^\n\r\u2028\u2029]b[.]\.$"}),
        (True, ...), ({"type": "array", "items": {"$ref": "#"}}, ...),
        ({"type": "array", "prefixItems": [True, False], "minItems": 1}, ...),
        # a text has no properties
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ...),
        ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
          "required": ["a"]}, ...),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "integer"}}}, ...),
        ({"$ref": "#there", "$defs": {"x": {"$anchor": "there"}}}, ...),
        ({"const": {"a": 2**53, "b": -0.5, "c": None}}, ...),
        ({"pattern": r"^(?:a|[^\]b])\d+\.\w{2,3}\/\-$"}, ...),
    ],
)  # fmt: skip
def test_limits_are_moved_inwards_and_the_rest_is_kept(given, made):
    before, made = json.dumps(given), given if made is ... else made
    assert prepare(given) == made
    assert prepare({"properties": {"minimum": given}}) == {"properties": {"minimum": made}}
    assert prepare({"anyOf": [{"items": given}, True]}) == {"anyOf": [{"items": made}, True]}
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (False, "No answer"), ({"const": 2**53 + 1}, str(2**53 + 1)),
        ({"enum": ["a", {"b": [1e300]}]}, "1e+300"), ({"const": 1e-300}, "1e-300"),
        ({"enum": [123456789.12345679]}, "15 digits"), ({"minimum": 1e19}, "1e+19"),
        ({"maximum": -1e19}, "1e+19"), ({"multipleOf": 0}, "multipleOf 0"),
        ({"multipleOf": -2}, "multipleOf -2"), ({"multipleOf": 1e-10}, "multipleOf 1e-10"),
        ({"multipleOf": 123456.7}, "multipleOf 123456.7"), ({"const": 10**400}, "10"),
        ({"pattern": "[[:alpha:]]"}, "pattern ["), ({"pattern": "[a&&b]"}, "&&"),
        ({"pattern": "(?i)a"}, "(?i)"), ({"pattern": "a(?=b)"}, "(?=b"),
        ({"pattern": r"\Aa\z"}, r"\A"), ({"pattern": "[]a]"}, "[]a"), ({"minimum": 10**400}, "10"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(schema, said):
    with pytest.raises(RequestError) as refused:
        prepare(schema)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


OBJECT = {"type": "object", "properties": {"a": {"type": ["object", "null"]}, "b": {}}}
REF = {"$ref": "#/$defs/x"}


def closed(schema):
    return {**schema, "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (OBJECT, closed(OBJECT | {"properties": {"a": closed({"type": ["object", "null"]}),
                                                 "b": {}}})),
        ({"properties": {}, "additionalProperties": True}, ...),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ...),
        ({"type": "string"}, ...),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, ...),
        ({"allOf": [REF], "$defs": {"x": {"properties": {}}}},
         {"allOf": [REF], "$defs": {"x": closed({"properties": {}})}}),
        ({"allOf": [REF, {"required": ["b"]}], "$defs": {"x": {"properties": {}}}}, ...),
        ({"properties": {}, **REF, "$defs": {"x": {"anyOf": [{"properties": {}}]}}}, ...),
        ({"type": "array", "items": {"anyOf": [{"properties": {}}, {"type": "null"}]}},
         {"type": "array", "items": {"anyOf": [closed({"properties": {}}), {"type": "null"}]}}),
    ],
)  # fmt: skip
def test_strict_schemas_take_no_further_keys_where_one_schema_names_them_all(given, made):
    assert prepare(given, strict=True) == (given if made is ... else made)
    assert prepare(given) == given
