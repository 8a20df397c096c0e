"""Sentences about invalid requests: they name the field and the remedy, and nothing of Python."""

import re
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError
from pydantic_core._pydantic_core import list_all_errors

from tests.support.http_helpers import CHAT, serving
from valora_serve.errors import FieldError
from valora_serve.server.api import schema
from valora_serve.server.api.registry import endpoints
from valora_serve.server.bodies import validated
from valora_serve.server.sentences import refusal

INTERNALS = re.compile(
    r"function-|_sound|pydantic|constrained|\[|\(\)|\bstr\b|\bint\b|\bdict\b|\bNone\b|"
    r"valid (string|integer|number|list|dictionary|boolean)|"
    r"Input should|Value error|Field required|Extra inputs"
)
LONG = "x" * 5_000


def said(model, found):
    with pytest.raises(FieldError) as caught:
        validated(found, model)
    return caught.value


@pytest.mark.parametrize("error", list_all_errors(), ids=lambda error: error["type"])
def test_every_error_of_pydantic_gets_a_plain_sentence(error):
    context = dict(error.get("example_context") or {})
    if "error" in context:
        context["error"] = ValueError("holds a thing: leave it out")
    place = ("a",) if error["type"] == "missing" else ("a", "function-after[_sound(), str]")
    item = {"type": error["type"], "loc": place, "ctx": context}
    sentence = str(refusal([item], {"a": 5}))
    assert sentence.startswith("a"), sentence
    assert not INTERNALS.search(sentence), sentence


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content",
         "messages.0.content must be a text or a list: it is 5"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages.0.content.0",
         "messages.0.content.0.type is missing: add it"),
        ({"messages": [{"role": "user", "content": [{"type": "txt"}]}]}, "messages.0.content.0",
         "messages.0.content.0.type must be one of 'text', 'image_url', 'video_url', 'frames', "
         "'refusal', 'input_audio', 'file'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages.0.content.0.text", "messages.0.content.0.text is missing: add it"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 1}]}]},
         "messages.0.content.0.image_url",
         "messages.0.content.0.image_url must be an object or a text: it is 1"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content", None),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role", None),
        ({"messages": []}, "messages", "messages must have at least 1 item: it has 0"),
        ({"messages": "hello"}, "messages", "messages must be a list: it is a text"),
        ({}, "messages", "messages is missing: add it"),
        ([], None, "The body must be an object: it is a list"),
        ({"messages": [{"role": "user", "content": "a"}], "temperature": 3}, "temperature",
         "temperature must be at most 2.0: it is 3"),
        ({"messages": [{"role": "user", "content": "a"}], "n": 1.5}, "n",
         "n must be a whole number: it is 1.5"),
        ({"messages": [{"role": "user", "content": "a"}], "n": None, "stop": [1]}, "stop.0",
         "stop.0 must be a text: it is 1"),
        ({"messages": [{"role": "user", "content": "a"}], "max_token": 4}, "max_token",
         "max_token is no field of this request: leave it out, or check its spelling"),
        ({"messages": [{"role": "user", "content": "a"}], LONG: 4}, LONG[:60], None),
        ({"messages": [{"role": "user", "content": "a"}], "seed": 10**30}, "seed", None),
    ],
)  # fmt: skip
def test_sentences_of_the_chat_endpoint(body, param, sentence):
    error = said(schema.ChatRequest, body)
    assert error.param == param
    assert sentence is None or str(error) == sentence
    assert not INTERNALS.search(str(error))
    assert len(str(error)) < 400


def wrong_values():
    return [None, True, -1, 0, 1.5, 10**40, -1e300, "", "a", "\ud800", [], {}, [[]], [{}], [""],
            {"a": 1}, [1, "a"], {"type": "x"}, LONG]  # fmt: skip


def below(model):
    """All kinds of requests of all endpoints, and their parts."""
    list(endpoints())  # imports them
    return {one for kind in model.__subclasses__() for one in {kind} | below(kind)}


def bodies(model):
    """Bodies in which one field, at any depth, is wrong."""
    for name, field in model.model_fields.items():
        for value in wrong_values():
            yield {field.alias or name: value}


@pytest.mark.parametrize(
    "model",
    sorted(below(schema.Body), key=lambda model: model.__name__),
    ids=lambda model: model.__name__,
)  # fmt: skip
def test_no_message_of_any_request_shows_what_it_is_made_of(model):
    for body in bodies(model):
        try:
            model.model_validate(body)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            message = str(refusal(found, body))
            plain = message.partition("the regular expression")[0]
            assert not INTERNALS.search(plain), (body, message)
            assert "\n" not in message
            assert len(message) < 500


def test_errors_of_paths_and_of_fields_that_hold_models():
    class Inner(BaseModel):
        kind: Literal["a"]
        x: Annotated[float, Field(gt=2)]

    class Outer(BaseModel):
        items: dict[str, Inner | int]
        other: Any = None

    assert str(said(Outer, {"items": {"Inner": {"kind": "a", "x": 1}}})) == (
        "items.Inner.x must be more than 2.0: it is 1"
    )
    assert str(said(Outer, {"items": {"k": "int"}})) == (
        "items.k must be an object or a whole number: it is a text"
    )


def test_sentences_reach_the_client():
    with serving() as server:
        answer = server.client.post(CHAT, json={"messages": [{"role": "user", "content": 1.5}]})
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": "messages.0.content must be a text or a list: it is 1.5",
            "type": "invalid_request_error",
            "param": "messages.0.content",
            "code": "invalid_request",
        }
        headers = {"content-type": "application/json"}
        empty = server.client.post(CHAT, content=b"", headers=headers).json()["error"]
        assert empty["message"] == "The body is missing: add it"
        broken = server.client.post(CHAT, content=b'{"messages"', headers=headers).json()["error"]
        assert broken["message"].startswith("The body is not valid JSON: ")
        assert server.client.get("/nothing").json()["error"]["message"] == (
            "There is nothing at this path: /docs lists the paths of this server"
        )
        assert server.client.get(CHAT).json()["error"]["message"] == (
            "GET is not possible at this path: use POST"
        )
