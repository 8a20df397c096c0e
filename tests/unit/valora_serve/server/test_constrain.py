"""Answers that follow a JSON schema."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import ask, serving
from valora_data.contract.base_model import base_folder
from valora_serve.errors import RequestError
from valora_serve.server.constrain import Grammars


@pytest.fixture(scope="module")
def grammars():
    return Grammars(FakeEngine(tokenizer=AutoTokenizer.from_pretrained(base_folder("tiny"))))


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
     "required": ["a", "b"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"anyOf": [{"const": None}, {"type": "number", "minimum": 0, "maximum": 9}]},
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(schema=st.sampled_from(SCHEMAS), seed=st.integers(0, 2**32))
def test_any_walk_through_a_constraint_keeps_to_the_schema(grammars, schema, seed):
    jsonschema = pytest.importorskip("jsonschema_rs")
    tokenizer = grammars._engine.tokenizer
    (constraint,) = asyncio.run(grammars.json(schema))
    rng = np.random.default_rng(seed)
    tokens = []
    padded = len(tokenizer) + 13  # a vocabulary that is padded to a round number
    for _ in range(400):
        allowed = np.ones(padded, dtype=bool)
        constraint.mask(allowed)
        assert not allowed[len(tokenizer) :].any()
        choices = np.flatnonzero(allowed)
        assert choices.size
        if tokenizer.eos_token_id in choices:
            break
        # Short tokens end sooner: digits could go on for ever.
        token = int(rng.choice(choices))
        tokens.append(token)
        constraint.advance(token)
    else:
        return
    assert jsonschema.is_valid(schema, json.loads(tokenizer.decode(tokens)))


def test_a_mask_only_takes_away(grammars):
    allowed = np.zeros(len(grammars._engine.tokenizer), dtype=bool)
    asyncio.run(grammars.json({"type": "integer"}))[0].mask(allowed)
    assert not allowed.any()


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"$ref": "http://127.0.0.1:1/x"}, {"$ref": "file:///etc/passwd"},
     {"pattern": "(", "type": "string"}, {"properties": 5}, False, {"enum": ["x" * 300_000]}],
)  # fmt: skip
def test_schemas_that_cannot_be(grammars, schema):
    with pytest.raises(RequestError, match="schema"):
        asyncio.run(grammars.json(schema))


def test_a_huge_schema_is_400():
    schema = {"type": "object"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    many = {"enum": ["x" * 100] * 5000}
    engine = FakeEngine(tokenizer=AutoTokenizer.from_pretrained(base_folder("tiny")))
    with serving(engine) as server:
        assert ask(server, response_format=form).status_code in (200, 400)
        form["json_schema"]["schema"] = many
        assert ask(server, response_format=form).status_code == 400
