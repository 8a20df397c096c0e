"""Tools of chat and Responses: what is called, in which form, and what is refused."""

import json
from contextlib import contextmanager

import jsonschema
import openai
import pydantic
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.support.http_helpers import chat


def function(name="f", **more):
    return {"type": "function", "function": {"name": name, **more}}


WEATHER = function(
    "weather",
    description="weather at a place",
    parameters={
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "place": {"$ref": "#/$defs/place"}},
        "required": ["unit", "place"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["Bern", "Rome"]}},
    },
    strict=True,
)
STOP, NAMED = function("stop"), function("weather")
BERN = '{"unit": "C", "place": "Bern"}'


def called(name="weather", arguments=BERN):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def ask(client, **more):
    defaults = {"model": "tiny", "messages": [{"role": "user", "content": "weather?"}]}
    return client.chat.completions.create(**({"max_tokens": 300} | defaults | more))


def respond(client, **more):
    tools = [{"type": "function", **one["function"]} for one in more.pop("tools", [WEATHER, STOP])]
    defaults = {"model": "tiny", "input": "weather?", "max_output_tokens": 300, "tools": tools}
    return client.responses.create(**(defaults | more))


@contextmanager
def scripted(server, text):
    """The fake engine says a text, as far as its constraint allows."""
    server.engine.script = text
    try:
        yield
    finally:
        server.engine.script = ""


def of(message):
    """Content and calls of a message."""
    calls = message.tool_calls or ()
    return message.content, [(call.function.name, call.function.arguments) for call in calls]


def of_output(output):
    """The same of the output of a response, whose text comes first."""
    texts = [part.text for item in output if item.type == "message" for part in item.content]
    calls = [(one.name, one.arguments) for one in output if one.type == "function_call"]
    assert len(output) == len(texts) + len(calls)
    assert [one.type for one in output[: len(texts)]] == ["message"] * len(texts)
    return "".join(texts) or None, calls


TWO = [("weather", BERN), ("stop", "{}")]
BOTH = called() + "\n" + called("stop", "{}")
ANSWERS = [
    ("It is warm. \n", {}, "It is warm. \n", []),
    ("a <tool_cal", {}, "a <tool_cal", []),
    ('{"name": "weather"}', {}, '{"name": "weather"}', []),
    (called(), {}, None, TWO[:1]),
    (BOTH, {}, None, TWO),
    ("I look.\n\n" + called(), {}, "I look.", TWO[:1]),
    (BOTH, {"parallel_tool_calls": False}, None, TWO[:1]),
    (BOTH, {"tool_choice": "required"}, None, TWO),
    ("no", {"tool_choice": "required", "tools": [STOP]}, None, TWO[1:]),
    (BOTH, {"tool_choice": NAMED}, None, TWO[:1]),
    (called(), {"tool_choice": {"type": "allowed_tools", "allowed_tools":
     {"mode": "auto", "tools": [NAMED]}}}, None, TWO[:1]),
]  # fmt: skip


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FORMED = {"tools": [WEATHER], "response_format": FORM}


@pytest.mark.parametrize(
    ("script", "more", "content", "calls"),
    [*ANSWERS, ("{", FORMED, '{"a":"b"}', []), (called(), FORMED, None, TWO[:1])],
)
def test_chat_answers_with_text_or_calls(server, client, script, more, content, calls):
    options = {"tools": [WEATHER, STOP], "n": 2, "logprobs": True, **more}
    streamed = ChatCompletionStreamState()
    with scripted(server, script):
        whole = ask(client, **options)
        for chunk in ask(client, **options, stream=True):
            streamed.handle_chunk(chunk)
    ids = [call.id for one in whole.choices for call in one.message.tool_calls or ()]
    assert len(set(ids)) == 2 * len(calls)
    reason = "tool_calls" if calls else "stop"
    for one, same in zip(whole.choices, streamed.get_final_completion().choices, strict=True):
        assert of(one.message) == of(same.message) == (content, calls)
        assert (one.index, one.finish_reason) == (same.index, same.finish_reason)
        assert one.finish_reason == reason
        assert one.logprobs.content and one.logprobs.content == same.logprobs.content


@pytest.mark.parametrize(("script", "more", "content", "calls"), ANSWERS[::2])
def test_responses_answer_with_text_or_calls(server, client, script, more, content, calls):
    options = {"tools": [WEATHER, STOP], "include": ["message.output_text.logprobs"], **more}
    choice = options.get("tool_choice")
    if isinstance(choice, dict):  # Responses' form has no object in between
        inner = dict(choice.get("function") or choice["allowed_tools"])
        inner |= {"tools": [{"type": "function", "name": "weather"}]} if "tools" in inner else {}
        options["tool_choice"] = {"type": choice["type"], **inner}
    with scripted(server, script):
        whole = respond(client, **options)
        events = list(respond(client, **options, stream=True))
    last = events[-1].response
    assert of_output(whole.output) == of_output(last.output) == (content, calls)
    assert whole.status == last.status == "completed"
    assert [tool.name for tool in whole.tools] == [
        one["function"]["name"] for one in options["tools"]
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    wanted = [("created", None), ("in_progress", None)]
    for place, item in enumerate(last.output):
        inner = text if item.type == "message" else call
        wanted += [(kind, place) for kind in ("output_item.added", *inner, "output_item.done")]
    seen = [(one.type[9:], getattr(one, "output_index", None)) for one in events]
    assert list(dict.fromkeys(seen)) == [*wanted, ("completed", None)]
    for place, item in enumerate(last.output):
        mine = [event for event in events if getattr(event, "output_index", None) == place]
        assert mine[-1].item == item
        said = "".join(event.delta for event in mine if event.type.endswith("delta"))
        assert said == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert {getattr(event, "item_id", item.id) for event in mine} == {item.id}


def test_the_clients_own_streams_read_calls(server, client):
    class Weather(pydantic.BaseModel):
        unit: str
        place: str

    tool = openai.pydantic_function_tool(Weather)
    asked = {"model": "tiny", "tools": [tool], "max_tokens": 300}
    wanted = Weather(unit="C", place="Bern")
    with scripted(server, f"Look.\n{called('Weather')}\n{called('Weather')}"):
        messages = [{"role": "user", "content": "weather?"}]
        with client.chat.completions.stream(messages=messages, **asked) as stream:
            choice = stream.get_final_completion().choices[0]
        flat = {"type": "function", **tool["function"]}
        with client.responses.stream(model="tiny", input="x", tools=[flat]) as stream:
            response = stream.get_final_response()
    assert choice.message.content == response.output_text == "Look."
    made = [call.function.parsed_arguments for call in choice.message.tool_calls]
    assert made == [wanted, wanted]
    assert [one.parsed_arguments for one in response.output[1:]] == [wanted.model_dump()] * 2


@pytest.mark.parametrize("limit", [5, 60])
def test_what_is_cut_off_ends_by_length(server, client, limit):
    with scripted(server, "Look.\n" + BOTH):
        whole = ask(client, tools=[WEATHER, STOP], max_tokens=limit).choices[0]
        response = respond(client, max_output_tokens=limit)
        forced = ask(client, tools=[STOP], tool_choice="required", max_tokens=5).choices[0]
    assert whole.finish_reason == forced.finish_reason == "length"
    assert (response.status, response.output[-1].status) == ("incomplete", "incomplete")
    assert of(forced.message) == (None, [])
    content, calls = of(whole.message)
    assert "Look.".startswith(content)
    assert of_output(response.output) == (content, calls)
    for (name, arguments), (wanted, full) in zip(calls, TWO, strict=False):
        assert name == wanted
        assert full.startswith(arguments)


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        (None, "{}"), ({"type": "object", "properties": {}}, "{}"),
        ({"properties": {"b": {"type": "null"}}}, '{"b":null}'),
        ({"properties": {"b": {"enum": [1]}}, "allOf": [{"properties": {"a": {"enum": [2]}}}]},
         '{"b":1,"a":2}'),
        ({"properties": {"b": {"$ref": "#"}, "c": {"const": 1}}}, '{"b":{"c":1}}'),
        # Names of keywords as names of parameters, and the other way round.
        ({"properties": {"examples": {"$ref": "#/$defs/enum"}, "default": {"$ref": "#/$defs/d"},
                         "enum": {"const": {"$ref": "#/x"}}, "const": {"type": "null"},
                         "$ref": {"enum": ["#/y"]}},
          "$defs": {"enum": {"enum": [1]}, "d": {"default": {"$ref": "#/z"}, "type": "boolean"}}},
         '{"examples":1,"default":true,"enum":{"$ref":"#/x"},"const":null,"$ref":"#/y"}'),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties":
          {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}}},
         '{"next":{"next":null}}'),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "title": "T", "properties":
          {"a": {"type": ["string", "null"], "title": "A", "default": None, "x-order": 1}}},
         '{"a":null}'),
    ],
)  # fmt: skip
def test_arguments_follow_the_parameters(server, client, parameters, arguments):
    arguments = json.dumps(json.loads(arguments))  # with the spaces of chat templates
    tools = [STOP, function("f", parameters=parameters)]
    with scripted(server, called("f", arguments)):
        assert of(ask(client, tools=tools).choices[0].message) == (None, [("f", arguments)])
    jsonschema.validate(json.loads(arguments), {"type": "object", **(parameters or {})})
    with scripted(server, called("f", '{"invented": 1')):
        (_, made) = of(ask(client, tools=tools, max_tokens=2000).choices[0].message)[1][0]
    if "properties" in (parameters or {"properties": {}}) and "allOf" not in (parameters or {}):
        assert '"invented"' not in made


@pytest.mark.parametrize(
    "more",
    [
        {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"tool_choice": "auto"},
        {"tools": [], "tool_choice": "auto"}, {"tools": [WEATHER], "tool_choice": "none"},
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools":
         {"mode": "auto", "tools": []}}},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": False},
        {"functions": [], "function_call": "none"}, {"function_call": "auto"},
        {"modalities": ["text"], "audio": None, "reasoning_effort": "low", "verbosity": "low",
         "prediction": {"type": "content", "content": "x"}, "web_search_options": None,
         "prompt_cache_retention": "24h", "moderation": None,
         "prompt_cache_options": {"mode": "implicit"}, "user": "u", "store": False,
         "metadata": {"a": "b"}, "presence_penalty": 0, "logit_bias": {}, "top_k": -1, "n": None,
         "repetition_penalty": 1.0, "stop": None, "stream": None, "temperature": None},
    ],
)  # fmt: skip
def test_requests_without_tools_are_answered_in_words(server, more):
    answer = server.client.post("/v1/chat/completions", json=chat("x") | more)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert message["content"].startswith("a red")
    assert message["tool_calls"] is None


def test_fields_that_frameworks_add_to_tools_are_taken(server, client):
    extra = {"cache_control": {"type": "ephemeral"}}
    tool = {**WEATHER, **extra, "function": {**WEATHER["function"], **extra}}
    assert ask(client, tools=[tool, function("f", strict=None, description=None)]).choices
    flat = {"type": "function", "name": "f", "parameters": None, "strict": None}
    flat |= {"defer_loading": False, "allowed_callers": None, "output_schema": None}
    assert client.responses.create(model="tiny", input="x", tools=[flat]).status == "completed"


def test_many_functions_with_many_parameters(server, client):
    properties = {f"p{number}": {"type": "string"} for number in range(6)}
    parameters = {"type": "object", "properties": properties, "required": ["p0"]}
    tools = [function(f"server_tool-{number}", parameters=parameters) for number in range(128)]
    with scripted(server, called("server_tool-127", '{"p0": "x", "p5": "y"}')):
        answer = ask(client, tools=tools).choices[0].message
    assert of(answer) == (None, [("server_tool-127", '{"p0": "x", "p5": "y"}')])
