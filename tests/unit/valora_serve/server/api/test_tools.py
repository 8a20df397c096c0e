"""Tools of the chat endpoint: forced calls, their form, and what is refused."""

import json

import openai
import pytest

from tests.support.http_helpers import chat
from valora_serve.server.api.schema import ChatRequest
from valora_serve.server.api.tools import CallReader, forced_call

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "weather at a place",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["C", "F"]},
                "place": {"$ref": "#/$defs/place"},
            },
            "required": ["unit", "place"],
            "additionalProperties": False,
            "$defs": {"place": {"enum": ["Bern", "Rome"]}},
        },
        "strict": True,
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(client, **more):
    defaults = {"model": "tiny", "messages": [{"role": "user", "content": "weather?"}]}
    return client.chat.completions.create(**({"max_tokens": 200} | defaults | more))


def assert_weather(call):
    assert call.type == "function"
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"unit", "place"}
    assert arguments["unit"] in {"C", "F"}
    assert arguments["place"] in {"Bern", "Rome"}


@pytest.mark.parametrize(
    "choice",
    [
        NAMED,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
    ],
)
def test_a_named_function_is_called(server, client, choice):
    answer = ask(client, tools=[STOP, WEATHER], tool_choice=choice, n=2, parallel_tool_calls=True)
    for option in answer.choices:
        assert option.finish_reason == "tool_calls"
        assert option.message.content is None
        (call,) = option.message.tool_calls
        assert_weather(call)
    first, second = (option.message.tool_calls[0].id for option in answer.choices)
    assert first != second
    told = server.engine.asked[-1].messages[0]
    assert told["role"] == "system"
    assert '"name": "weather"' in told["content"]
    assert '"stop"' not in told["content"]


def test_one_of_several_functions_is_called(client):
    answer = ask(client, tools=[WEATHER, STOP], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name in {"weather", "stop"}
    (call,) = ask(client, tools=[STOP], tool_choice="required").choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("stop", {})


def test_a_streamed_call_is_the_same(client):
    options = {"tools": [WEATHER], "tool_choice": "required"}
    whole = ask(client, **options).choices[0].message.tool_calls[0]
    chunks = list(ask(client, **options, stream=True))
    deltas = [d for c in chunks for d in c.choices[0].delta.tool_calls or ()]
    assert deltas[0].id
    assert (deltas[0].type, deltas[0].function.name) == ("function", "weather")
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    assert "".join(delta.function.arguments for delta in deltas) == whole.function.arguments
    assert len(deltas) > 3  # as they are generated
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_ends_by_length(client):
    option = ask(client, tools=[WEATHER], tool_choice="required", max_tokens=3).choices[0]
    assert option.finish_reason == "length"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("f", "{}"), ('g"é', '{"a": {"b": "}"}}'), ("h", '{"name": "x", "arguments": {}}')],
)
def test_a_call_is_read_in_pieces_of_any_size(name, arguments, size):
    text = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
    reader = CallReader()
    found = "".join(reader.push(text[at : at + size]) for at in range(0, len(text), size))
    assert (reader.name, found + reader.rest(complete=True)) == (name, arguments)
    cut = CallReader()
    part = cut.push(text[:-2])
    assert part + cut.rest(complete=False) == arguments[:-1]


def test_a_conversation_with_calls_is_continued(server, client):
    call = ask(client, tools=[WEATHER], tool_choice="required").choices[0].message
    messages = [
        {"role": "user", "content": "weather?"},
        call,
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "17"},
        {"role": "assistant", "content": None, "refusal": "I will not say."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None},
        {"role": "function", "name": "weather", "content": "18"},
    ]
    assert ask(client, messages=messages, tools=[WEATHER], tool_choice="none").choices
    seen = server.engine.asked[-1].messages
    assert [one["role"] for one in seen] == [
        "user", "assistant", "user", "assistant", "assistant", "assistant", "user",
    ]  # fmt: skip
    said = json.loads(seen[1]["content"])
    assert said["name"] == "weather"
    assert said["arguments"] == json.loads(call.tool_calls[0].function.arguments)
    assert [one["content"] for one in seen[2:4]] == ["17", "I will not say."]
    assert seen[4]["content"] == [{"type": "text", "text": "No."}]
    assert seen[5]["content"] == ""


@pytest.mark.parametrize(
    "more",
    [
        {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"tool_choice": "auto"},
        {"tools": [], "tool_choice": "auto"}, {"tools": [WEATHER], "tool_choice": "none"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": False},
        {"functions": [], "function_call": "none"}, {"function_call": "auto"},
        {"modalities": ["text"], "audio": None, "reasoning_effort": "low", "verbosity": "low",
         "prediction": {"type": "content", "content": "x"}, "web_search_options": None,
         "prompt_cache_retention": "24h", "moderation": None,
         "prompt_cache_options": {"mode": "implicit"}},
    ],
)  # fmt: skip
def test_requests_without_tools_are_answered_in_words(server, more):
    answer = server.client.post("/v1/chat/completions", json=chat("x") | more)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert message["content"].startswith("a red")
    assert message["tool_calls"] is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tools": [WEATHER]}, "set tool_choice to required"),
        ({"tools": [WEATHER], "tool_choice": "auto"}, "set tool_choice to required"),
        ({"tool_choice": "required"}, "send tools"),
        ({"tool_choice": NAMED}, "send tools"),
        ({"tools": [STOP], "tool_choice": NAMED}, "they are stop"),
        ({"tools": [STOP], "tool_choice": "any"}, "'any'"),
        ({"tools": [STOP], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "function"),
        ({"tools": [STOP], "tool_choice": {}}, "names no function"),
        ({"tools": [STOP], "tool_choice": {"type": "allowed_tools"}}, "allowed_tools"),
        ({"tools": [STOP, STOP], "tool_choice": "required"}, "twice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type is 'custom'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search'"),
        ({"tools": [{"type": "function"}]}, "lacks its function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters":
          {"type": "string"}}}], "tool_choice": "required"}, "an object"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters":
          {"properties": {"x": {"type": "y"}}}}}], "tool_choice": "required"}, "schema"),
        ({"tools": [STOP], "tool_choice": "required", "model": "person"}, "calls no tools"),
        ({"functions": [{"name": "f"}]}, "send tools"),
        ({"function_call": {"name": "f"}}, "send tool_choice"),
        ({"modalities": ["text", "audio"]}, "'audio'"),
        ({"audio": {"voice": "x", "format": "wav"}}, "answers are text"),
        ({"web_search_options": {}}, "searches nothing"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"messages": [{"role": "user", "content": None}]}, "content is null"),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "content is null"),
        ({"messages": [{"role": "user", "content": [
            {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}]}]},
         "input_audio, which the model cannot read"),
        ({"messages": [{"role": "user", "content": [
            {"type": "file", "file": {"file_id": "x"}}]}]}, "file, which the model cannot read"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_in_one_sentence(server, more, said):
    answer = server.client.post("/v1/chat/completions", json=chat("x") | more)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert said in message
    assert "\n" not in message


def test_the_clients_error_says_why(client):
    with pytest.raises(openai.BadRequestError, match="tool_choice auto is not served"):
        ask(client, tools=[WEATHER])


def test_references_in_parameters_lead_to_the_same_places():
    body = ChatRequest(messages=[{"role": "user", "content": "x"}], tools=[STOP, WEATHER],
                       tool_choice="required")  # fmt: skip
    schema = forced_call(body).schema()
    (place,) = (
        part["properties"]["place"]["$ref"]
        for part in schema["$defs"].values()
        if "place" in part["properties"]
    )
    found = schema
    for step in place.removeprefix("#/").split("/"):
        found = found[step]
    assert found == {"enum": ["Bern", "Rome"]}
