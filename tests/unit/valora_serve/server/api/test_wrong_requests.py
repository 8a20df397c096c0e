"""Requests of every endpoint that are wrong, or ask for what is not served."""

import json

import pytest

from tests.support.http_helpers import CHAT, PNG_URL, chat, data_url, refused
from tests.unit.valora_serve.server.api.test_tools import NAMED, STOP, function

WRONG = {
    CHAT: (chat("x"), [
        ({"messages": []}, "messages: "), ({"temprature": 1}, "temprature: "),
        ({"temperature": 3}, "temperature: "), ({"n": 5}, "more than 4"), ({"stop": 1}, "stop: "),
        ({"stop": ["a", "b" * 1001]}, "stop"), ({"stop": ""}, "stop"),
        ({"top_logprobs": 2}, "logprobs"), ({"stream_options": {"include_usage": True}}, "stream"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "schema"),
        ({"response_format": {"type": "json_object"}, "model": "person"}, "head"),
        ({"messages": [{"role": "user", "content": ""}]}, "no text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content: "),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages.0.content.0.text: "),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "0.type: Say what it is"),
        ({"seed": 2**64}, "seed"), ({"messages": [{"role": "user", "content": "\ud800"}]}, ""),
        ({"tools": [function(f"f{number}") for number in range(129)]}, "128"),
        ({"tools": [function(description="x" * 400_001)]}, "characters"),
        ({"tools": [function(parameters={"description": "x" * 200_001})]}, "200000"),
        ({"tools": [STOP, function("g", parameters={"properties": {"x": {"not": {}}}})]},
         "function g: "),
        ({"tools": [STOP, function("g", parameters={"properties": {"x": {"minimum": "y"}}})]},
         "function g: "),
        ({"tools": [STOP, function("g", parameters={"properties": {"x": {"$ref": "#/y"}}})]},
         "function g: "),
        ({"tools": [function(paramters={})]}, "paramters"),
        ({"tools": [STOP], "tool_choice": {"type": "allowed_tools", "allowed_tools":
          {"mode": "auto", "tools": [NAMED]}}}, "they are stop"),
        ({"tool_choice": "required"}, "send tools"), ({"tool_choice": NAMED}, "send tools"),
        ({"tools": [STOP], "tool_choice": NAMED}, "they are stop"),
        ({"tools": [STOP], "tool_choice": "any"}, "'none' or 'required'"),
        ({"tools": [STOP], "tool_choice": {"type": "x" * 999}}, "'allowed_tools'"),
        ({"tools": [STOP], "tool_choice": {}}, "tool_choice.type: Say what it is"),
        ({"tools": [STOP], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"tools": [STOP, STOP], "tool_choice": "required"}, "twice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type: Input"),
        ({"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
        ({"tools": [function("a b")]}, "name"),
        *(({"tools": [function(parameters=given)], "tool_choice": "required"}, said)
          for given, said in (({"type": "string"}, "an object"),
                              ({"properties": {"x": {"type": "y"}}}, "schema"))),
        ({"tools": [STOP], "tool_choice": "required", "model": "person"}, "calls no tools"),
        ({"functions": ["f"]}, "send tools"), ({"function_call": "f"}, "send tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities.1: Input should be 'text'"),
        ({"audio": {"voice": "x", "format": "wav"}}, "answers are text"),
        ({"web_search_options": {}}, "searches nothing"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"messages": [{"role": "user", "content": None}]}, "content is null"),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "content is null"),
        *(({"model": "d", **chat(url=PNG_URL), **given}, said) for given, said in (  # a bundle
            ({"stream": True}, "leave out stream,"), ({"n": 2}, "leave out n,"),
            ({"logprobs": True, "top_logprobs": 2}, "leave out logprobs, top_logprobs,"),
            ({"top_logprobs": 2}, "leave out top_logprobs,"),
            ({"response_format": {"type": "json_object"}}, "leave out response_format,"),
            ({"valora": {"head": False}}, "leave out valora.head,"),
            ({"valora": {"adapters": [{"name": "adapter-1"}]}}, "leave out valora.adapters,"),
            ({"tools": [function()]}, "leave out tools,"),
            ({"stop": ["a"] * 17}, "List should have at most 16 items"),
            ({"stream_options": {}}, "set stream"),
            ({"modalities": ["audio"]}, "modalities.0: Input should be 'text'"),
            ({"audio": {}}, "audio: not served"),
            ({"function_call": {"name": "f"}}, "send tool_choice"),
        )),
    ]),
    "/v1/completions": ({"prompt": "a"}, [
        ({"prompt": []}, ""), ({"prompt": ""}, ""), ({"prompt": [""]}, ""),
        ({"prompt": ["a"] * 5}, ""), ({"prompt": [[]]}, ""), ({"prompt": ["a", 1]}, ""),
        ({"prompt": "a", "best_of": 2}, ""), ({"prompt": "a", "max_tokens": 0}, ""),
        ({"prompt": "a", "max_tokens": -1, "echo": True}, ""),
        ({"prompt": "a", "max_tokens": 0, "echo": True, "max_completion_tokens": 5}, ""),
        ({"prompt": "a", "suffix": "b"}, ""), ({"prompt": [1, 99999]}, ""),
        ({"prompt": "x" * 3000}, ""), ({"prompt": [2**70]}, ""), ({"prompt": [-1, 5000]}, ""),
        ({"prompt": ["a"] * 3, "n": 2}, "6 answers are asked for"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        *(({"repetition_penalty": value}, "repetition_penalty") for value in (0, 1e-30, 1e30)),
        *(({"logit_bias": value}, "logit_bias") for value in (
            *({token: 1} for token in ("x", "-5", "05", "1_0", "٣", "9" * 20)), {"5": 101},
            {"5": "much"}, [5], {str(token): 1 for token in range(301)},
        )),
        *(({"valora": {"adapters": given}}, said) for given, said in (
            *(([{"name": "adapter-1", "weight": weight}], "adapters.0.weight: ")
              for weight in (4.01, -5, "NaN", None)),
            ([{"weight": 1}], "adapters.0.name: "), ([{"name": "adapter-1"}] * 3, "adapters: "),
            ([{"name": "adapter-1", "strength": 1}], "adapters.0.strength: "),
            ({"adapter-1": 1}, "adapters: "),
        )),
    ]),
    "/v1/vision/person": ({}, [
        ({}, "Send images"), ({"images": []}, "images"), ({"images": "x"}, "images"),
        ({"images": [PNG_URL] * 100}, "images"), ({"frames": [PNG_URL] * 1000}, "frames"),
        ({"images": [PNG_URL], "video": PNG_URL}, "video"),
        ({"images": [PNG_URL], "min_score": 2}, "min_score"),
        ({"images": [PNG_URL], "deadline": 0}, "deadline"), ({"image": PNG_URL}, "image"),
        ({"images": ["data:image/png;base64,!"]}, "base64"), ({"images": ["/etc/passwd"]}, "URL"),
        ({"images": [data_url(b"no image")]}, "image"),
        ({"images": [PNG_URL], "max_tokens": 1.5}, "max_tokens"),
    ]),
    "/v1/vision": ({"images": [PNG_URL]}, [
        ({"domains": given}, "domains") for given in (None, [], "person", 3, {}, [3], ["x"] * 1001)
    ]),
    "/v1/embeddings": ({"model": "tiny"}, [
        ({}, "Send input"), ({"input": ""}, "empty"), ({"input": []}, "empty"),
        ({"input": ["x", ""]}, "empty"), ({"input": [[]]}, "empty"),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "one of them"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"), ({"input": [1.5]}, "input"),
        ({"input": "x", "dimensions": 2}, "have 3"),
        ({"input": ["x"] * 1001}, "input"), ({"input": "x" * 400_001}, "characters"),
        ({"input": [5000]}, "token"), ({"input": "x", "inputs": "y"}, "inputs"),
    ]),
    "/v1/responses": ({"model": "tiny", "input": "x"}, [
        ({"model": "scene"}, "send one in a user message"),
        ({"model": "scene", "stream": True}, "send one in a user message"),
        ({"previous_response_id": "resp_1"}, "send the whole conversation"),
        ({"conversation": "conv_1"}, "send the whole conversation"),
        ({"prompt": {"id": "p"}}, "keeps no prompts"), ({"background": True}, "background"),
        ({"tools": [{"type": "web_search", "search_context_size": "low"}]}, "tools.0.type: Input"),
        ({"tools": [{"type": "function"}]}, "tools.0.function: Field"), ({"tools": [5]}, "tools.0"),
        ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "web_search"}},
         "tool_choice.type: Say what it is: 'function'"),
        ({"tool_choice": "required"}, "tool_choice"), ({"input": [{"type": 5}]}, "input"),
        ({"include": ["reasoning.encrypted_contents"]}, "include.0: Input should be"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "arguments"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "only reasoning"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type: Say what"),
        *(({"input": [{"role": "user", "content": [part]}]}, said) for part, said in (
            ({"type": "input_file", "file_id": "x"}, "content.0.type: Say what it is: 'text'"),
            ({"type": "input_image", "file_id": "x"}, "image_url"),
            ({"type": "input_image", "image_url": {"detail": "low"}}, "an object with it as"),
        )),
        ({"input": []}, "input"), ({"input": ""}, "no text"), ({"input": [5]}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "put schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"temprature": 1}, "temprature"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [(path, *case) for path, (_, cases) in WRONG.items() for case in cases],
)
def test_wrong_requests_are_400_and_say_why(server, path, more, said):
    content = json.dumps(WRONG[path][0] | more)
    headers = {"content-type": "application/json"}
    answer = server.client.post(path, content=content, headers=headers)
    refused(answer, 400, said)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    if error["param"] is not None:
        assert error["code"] == "invalid_request"
        assert error["message"].startswith(f"{error['param']}: ")
        assert "tagged-union" not in error["param"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_models_are_404_before_a_stream_begins_with_the_known_ones(server, path, stream):
    body = WRONG[path][0] | {"model": "persn", "stream": stream}
    assert refused(server.client.post(path, json=body), 404, "person") == "model_not_found"
