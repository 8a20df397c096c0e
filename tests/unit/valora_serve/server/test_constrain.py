"""Answers that follow a JSON schema."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import jsonschema_rs
import numpy as np
import pytest
from transformers import AddedToken, AutoTokenizer

from tests.support.cases import others_slow
from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import CHAT, ask, chat, refused, serving, until
from valora_data.contract.base_model import base_folder
from valora_serve.errors import OverloadedError, RequestError
from valora_serve.server import constrain
from valora_serve.server.constrain import MAX_OF_ONE, Grammar, GrammarConstraint, Grammars


@pytest.fixture(scope="module")
def grammars(tokenizer):
    made = Grammars(FakeEngine(tokenizer=tokenizer))
    made.read()
    yield made
    made.close()


def made(grammars, schema, count=1):
    return asyncio.run(grammars.constraints(Grammar.json(schema), count))


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    "text",
    ["2020-12-31T23:59:59Z", "2020-12-31T12:30:60Z", "2020-02-30T10:00:00Z", "2020-02-29T10:00:00Z",
     "2020-12-31T23:59:59.123+05:30", "2021-02-29", "2020-02-29", "2000-02-29", "1900-02-29",
     "0010-04-30", "2020-04-31", "24:00:00Z", "23:59:59Z", "23:59:59+24:00", "x"],
)  # fmt: skip
@pytest.mark.parametrize("form", ["date", "time", "date-time", "nonsense"])
def test_dates_and_times_are_exactly_those_that_exist(grammars, form, text):
    schema = {"type": "string", "format": form}
    (constraint,) = made(grammars, schema)
    tokens = grammars._tokenizer.tokenize_str(json.dumps(text))
    taken = constraint._matcher.validate_tokens(tokens) == len(tokens)
    assert taken == jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(text)


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"$ref": "http://127.0.0.1:1/x"}, {"$ref": "file:///etc/passwd"},
     {"$schema": "http://127.0.0.1:1/x", "type": "integer"},
     {"pattern": "(", "type": "string"}, {"properties": 5}, {"properties": {"a": 5}}, False,
     {"$ref": "#/$defs/missing"}, {"$ref": 5}, {"anyOf": [[]]}, {"enum": ["x" * 300_000]},
     {"not": {"type": "string"}}, {"if": {"type": "string"}, "then": {"minLength": 3}},
     {"type": "array", "uniqueItems": True}, {"type": "array", "contains": {"type": "integer"}},
     {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
     {"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"enum": []}, {"type": []},
     {"type": "integer", "minimum": 5, "maximum": 3}, {"type": "string", "format": 5},
     {"exclusiveMinimum": 0, "exclusiveMaximum": 1e-300, "type": "number"},
     {"type": "object", "required": ["a"], "additionalProperties": False},
     {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "array", "minItems": -1},
     {"minimum": "5"}, {"exclusiveMaximum": [5]}, {"multipleOf": "2", "exclusiveMinimum": None},
     {"allOf": 5, "format": "date"}, {"type": "string", "minLength": 3, "pattern": "^.?$"},
     json.loads('{"items":' * 900 + "{}" + "}" * 900)],
)  # fmt: skip
def test_schemas_that_cannot_be(grammars, schema):
    with pytest.raises(RequestError, match="schema") as error:
        made(grammars, schema)
    assert "\n" not in str(error.value)


def test_what_no_answer_follows_is_said_with_the_reason(grammars):
    with pytest.raises(RequestError, match="No answer satisfies"):
        made(grammars, {"$ref": "#"})
    for pattern, reason in (("[z-a]", "invalid character class range"), ("a\n(", "unclosed group")):
        with pytest.raises(RequestError) as error:
            made(grammars, {"properties": {"x": {"type": "string", "pattern": pattern}}})
        assert f"pattern {pattern!a}: {reason}".replace("'", "") in str(error.value)


def texts(count, name):
    properties = {f"{name}{n}": {"type": "string"} for n in range(count)}
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(("way", "count"), [("mask", 1), ("advance", 2), ("check", 1)])
def test_a_constraint_that_fails_in_the_middle_is_an_error(way, count, monkeypatch, tokenizer):
    wanted = form({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 3})
    before, calls = getattr(GrammarConstraint, way), []

    def failing(self, argument):
        calls.append(argument)
        if way == "check" or len(calls) > 3:
            raise RequestError("The JSON schema is too complex")
        return before(self, argument)

    monkeypatch.setattr(GrammarConstraint, way, failing)
    with serving(FakeEngine(tokenizer=tokenizer)) as server:
        refused(ask(server, response_format=wanted, n=count, max_tokens=50), 400, "too complex")
        calls.clear()
        answer = ask(server, response_format=wanted, n=count, max_tokens=50, stream=True)
        assert "too complex" in answer.text
        assert '"finish_reason":"stop"' not in answer.text
        assert server.inside == 0


def test_an_answer_that_is_no_json_is_an_error(grammars):
    (constraint,) = made(grammars, {"type": "array"})
    for text in ("", "[1", "[1]]", "[NaN]" * 2, "[" * 100_000):
        with pytest.raises(RequestError, match="does not follow"):
            constraint.check(text)
    constraint.check("[" + "9" * 10_000 + "]")


def test_a_mask_only_takes_away_and_a_token_that_is_not_allowed_is_an_error(grammars):
    (constraint,) = made(grammars, {"type": "integer"})
    allowed = np.zeros(len(grammars._engine.tokenizer), dtype=bool)
    constraint.mask(allowed)
    assert not allowed.any()
    with pytest.raises(RequestError):
        constraint.advance(grammars._engine.tokenizer("x")["input_ids"][0])
    with pytest.raises(RequestError):
        constraint.mask(np.ones(len(grammars._engine.tokenizer), dtype=bool))


@pytest.mark.parametrize("special", [False, True])
def test_tokens_that_are_added_may_be_text_unless_they_are_special(special):
    """Qwen's <tool_call> is one token, which its models begin calls with."""
    tokenizer = AutoTokenizer.from_pretrained(base_folder("tiny"))
    tokenizer.add_tokens([AddedToken("<tool_call>", special=special)], special_tokens=special)
    (added,) = tokenizer("<tool_call>", add_special_tokens=False)["input_ids"]
    rules = ['start: TEXT | begin "x"', r"TEXT: /(.|\n)*/", 'begin[lazy]: TEXT "<tool_call>"']
    with contextlib.closing(Grammars(FakeEngine(tokenizer=tokenizer))) as grammars:
        grammars.read()
        (constraint,) = asyncio.run(grammars.constraints(Grammar({}, "\n".join(rules))))
        allowed = np.ones(len(tokenizer), dtype=bool)
        constraint.mask(allowed)
        assert allowed[added] == (not special)
        if not special:
            assert constraint.advance(added)
            assert constraint.advance(tokenizer("x")["input_ids"][-1]) is False


@pytest.mark.parametrize("tokenizer", [None, "not a fast tokenizer"])
def test_a_tokenizer_that_takes_no_schema_is_told(tokenizer):
    with serving(FakeEngine(tokenizer=tokenizer)) as server:
        assert ask(server).status_code == 200
        refused(ask(server, response_format={"type": "json_object"}), 400, "tokenizer")


def chain(count, item):
    """A schema whose parts refer to each other in a chain."""
    parts = {f"d{n}": item({"$ref": f"#/$defs/d{n - 1}"}) for n in range(1, count)}
    return {"$defs": parts | {"d0": {"type": "integer"}}, "$ref": f"#/$defs/d{count - 1}"}


ENDLESS = [
    {"anyOf": [texts(20, "k") for _ in range(30)]}, texts(1000, "p"),
    {"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}},
     "required": ["c"]}}, "$ref": "#/$defs/n"},
    {"properties": {"deep": texts(800, "q")}, "required": ["deep"], "type": "object"},
    {"allOf": [{"type": "string", "pattern": f".*{chr(97 + n)}.{{{10 + n}}}"}
               for n in range(20)]},
    {"type": "object", "patternProperties": {f"^{chr(97 + n // 20)}.*{chr(97 + n % 20)}$": True
                                             for n in range(400)}},
    {"allOf": [{"type": "integer", "multipleOf": step} for step in (9973, 9967, 9949, 9941)]},
    chain(2900, lambda part: {"type": "array", "items": part}),
    chain(900, lambda part: {"anyOf": [{"type": "array", "items": part}, {"properties":
                                                                          {"a": part}}]}),
]  # fmt: skip


@pytest.mark.parametrize("schema", others_slow([ENDLESS[0], *ENDLESS[2:4], *ENDLESS[7:]], ENDLESS))
def test_schemas_that_would_take_for_ever_or_end_the_process_are_refused(grammars, schema):
    with pytest.raises(RequestError, match="schema"):
        made(grammars, schema)
    assert made(grammars, {"type": "integer"})


def test_the_process_ends_with_a_server_that_is_killed_while_it_begins():
    code = "import os; from valora_serve.server.json_schema import process as p; p().submit(id)"
    command = [sys.executable, "-c", f"{code}; os.kill(os.getpid(), 9)"]
    subprocess.run(command, check=False, capture_output=True, timeout=30)  # until both have ended


def test_a_process_that_is_killed_while_it_is_idle_is_replaced(grammars):
    for minimum in (1, 2):
        assert made(grammars, {"type": "integer", "minimum": minimum})
        os.kill(grammars._process.submit(os.getpid).result(), signal.SIGKILL)
        until(lambda: grammars._process._broken)


def test_a_schema_is_compiled_again_if_the_process_is_killed_meanwhile(grammars):
    made(grammars, {"type": "integer", "minimum": 3})  # another process, where it was killed
    killed = grammars._process.submit(os.getpid).result()
    grammars._process.submit(time.sleep, 60)
    with ThreadPoolExecutor() as thread:
        compiling = thread.submit(made, grammars, {"type": "integer", "minimum": 4})
        until(lambda: len(grammars._process._pending_work_items) == 2)
        os.kill(killed, signal.SIGKILL)
        assert compiling.result()


@pytest.fixture
def waiting(monkeypatch):
    """Compilations wait for `go`; `begun` holds the names of their schemas."""
    found, before = SimpleNamespace(begun=[], go=threading.Event()), Grammars._compile

    def compile_later(grammars, grammar, key):
        found.begun.append(grammar.schemas["json"].get("title"))
        assert found.go.wait(20)
        return before(grammars, grammar, key)

    monkeypatch.setattr(Grammars, "_compile", compile_later)
    yield found
    found.go.set()


async def asked(grammars, title, client="", **more):
    return await grammars.constraints(Grammar.json({"title": title} | more), client=client)


def test_clients_take_turns_and_who_leaves_is_not_compiled_for(grammars, waiting):
    async def case():
        waiting.go.set()
        await asked(grammars, "cached", "b")
        waiting.go.clear()
        waiting.begun.clear()
        many = [asyncio.create_task(asked(grammars, f"a{n}", "a")) for n in range(MAX_OF_ONE)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as error:
            await asked(grammars, "one too many", "a")
        assert error.value.retry_after >= 1
        await asked(grammars, "cached", "a")
        same = [asyncio.create_task(asked(grammars, "b", "b")) for _ in range(3)]
        await asyncio.sleep(0)
        for task in [*many[3:], same[0]]:
            task.cancel()
        await asyncio.wait([*many[3:], same[0]])
        await asyncio.to_thread(until, lambda: waiting.begun == ["a0"])
        waiting.go.set()
        await asyncio.gather(*many[:3], *same[1:])
        assert waiting.begun == ["a0", "b", "a1", "a2"]
        for _ in range(2):  # refused again without being compiled again
            with pytest.raises(RequestError):
                await asked(grammars, "wrong", type="nonsense")
        assert waiting.begun[4:] == ["wrong"]

    asyncio.run(case())


def test_a_client_with_many_schemas_leaves_those_of_others_in_the_cache(grammars, waiting):
    async def case():
        waiting.go.set()
        await asked(grammars, "mine", "me")
        for number in range(constrain.REMEMBERED + 5):
            await asked(grammars, f"theirs {number}", "they")
        waiting.begun.clear()
        await asked(grammars, "mine", "me")
        assert not waiting.begun

    asyncio.run(case())


def test_answers_that_fill_a_lexer_do_not_end_their_schema_for_all(grammars):
    schema = {"type": "string", "pattern": "^(a|b)*a(a|b){16}$"}
    draw = np.random.default_rng(0)
    vocabulary = [grammars._tokenizer.tokenize_str(text)[0] for text in "ab"]
    (quote,) = grammars._tokenizer.tokenize_str('"')

    def answer():
        (constraint,) = made(grammars, schema)
        constraint.advance(quote)
        for token in draw.choice(vocabulary, 150):
            constraint.mask(np.ones(len(grammars._engine.tokenizer), dtype=bool))
            constraint.advance(int(token))

    with pytest.raises(RequestError, match="too complex"):
        for _ in range(100):
            answer()
    answer()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_the_deadline_counts_while_a_schema_waits_and_while_it_is_compiled(
    waiting, path, tokenizer
):
    def body(title):
        said = {"title": title}
        if path == "/v1/responses":
            text = {"format": {"type": "json_schema", "schema": said, "name": "x"}}
            return {"input": "x", "text": text, "valora": {"deadline": 0.2}}
        return {"prompt": "x", "response_format": form(said), "valora": {"deadline": 0.2}}

    engine = FakeEngine(tokenizer=tokenizer)
    with serving(engine) as server:
        for title in ("is compiled", "waits"):
            refused(server.client.post(path, json=body(title)), 504, "schema")
        waiting.go.set()
        assert waiting.begun == ["is compiled"]
    assert not engine.asked


def test_a_cached_schema_is_answered_while_clients_that_left_and_others_wait(waiting, tokenizer):
    with serving(FakeEngine(tokenizer=tokenizer)) as server:
        cached = {"response_format": form({"title": "cached"})}
        waiting.go.set()
        assert ask(server, **cached).status_code == 200
        waiting.go.clear()
        for number in range(MAX_OF_ONE):
            body = chat(response_format=form({"title": f"{number}"}))
            with contextlib.suppress(httpx.ReadTimeout):
                server.client.post(CHAT, json=body, timeout=0.05)
        # One is compiled, and nobody waits for it either.
        until(lambda: not server.context.grammars._waiting)
        assert ask(server, **cached).status_code == 200
        waiting.go.set()
