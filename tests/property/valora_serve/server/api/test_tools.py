"""Whatever is sampled, an answer is text or valid calls, in whatever pieces it comes."""

import asyncio
import json

import jsonschema_rs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.support.fake_engine import FakeEngine
from tests.support.json_schemas import random_answer, schemas
from valora_data.contract.base_model import base_folder
from valora_serve.errors import RequestError
from valora_serve.server.api.schema import Function
from valora_serve.server.api.tools import MAX_CALLS, AnswerReader, Tools
from valora_serve.server.constrain import Grammars

NAME = "f.G-1"
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(FakeEngine(tokenizer=AutoTokenizer.from_pretrained(base_folder("tiny"))))
    made.read()
    yield made
    made.close()


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    inner=schemas,
    begin=st.sampled_from(
        ["", "<to", "é \n<tool_call", f'x\n<tool_call>\n{{"name": "{NAME}',
         f"{STOP}\n<tool_call>", f'<tool_call>\n{{"name": "{NAME}", "arguments": {{"a']
    ),
    text=st.booleans(),
    several=st.booleans(),
    size=st.integers(1, 30),
)  # fmt: skip
@example(0, {}, "", True, True, 1)
@example(6, {"pattern": "[[:alpha:]]"}, "", False, False, 9)  # which ECMA-262 reads differently
def test_an_answer_is_text_or_valid_calls(grammars, seed, inner, begin, text, several, size):
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"],
              "$defs": {"n": {"type": "null"}}}  # fmt: skip
    functions = [Function(name="stop"), Function(name=NAME, parameters=schema)]
    tools = Tools(functions, text=text, several=several)
    try:
        grammar = tools.grammar(None, strict=False)
        (constraint,) = asyncio.run(grammars.constraints(grammar))
    except RequestError as error:
        assert f"function {NAME}: " in str(error) or "too complex" in str(error)
        return
    if not (text or begin.startswith("<tool_call>")) or (STOP in begin and not several):
        begin = ""
    # the vocabulary is padded to a round number
    said = random_answer(constraint, grammars._engine.tokenizer, seed, padded=64, begin=begin)
    if said is None:
        return
    message = AnswerReader(tools).message(said)
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert len(calls) <= (MAX_CALLS if several else 1)
    for name, arguments in calls:
        allowed = {"maxProperties": 0} if name == "stop" else schema
        assert jsonschema_rs.is_valid(allowed, json.loads(arguments))
    if calls:
        written = "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            for name, arguments in calls
        )
        assert said.removesuffix(written).rstrip() == (message.content or "")
    else:
        assert text
        assert message.content == said
    reader = AnswerReader(tools)
    deltas = []
    for at in range(0, len(said), size):
        deltas += reader.push(said[at : at + size], last=at + size >= len(said))
    assert "".join(one.get("content", "") for one in deltas) == (message.content or "")
    found = {}
    for call in (call for one in deltas for call in one.get("tool_calls", ())):
        function = call["function"]
        name, before = found.get(call["index"], (function.get("name"), ""))
        found[call["index"]] = (name, before + function["arguments"])
    assert list(found.values()) == calls
