"""JSON bodies: what is refused, what that costs, and how it is said."""

import json
import time

import pytest

from tests.support.http_helpers import CHAT, refused
from valora_serve.errors import RequestError
from valora_serve.server.api.schema import (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    VisionRequest,
)
from valora_serve.server.bodies import Bodies
from valora_serve.server.settings import ServerSettings

SAID = b'{"messages":[{"role":"user","content":"x"}],'
PART = b'{"type":"text","text":"a"},'


def keys(count):
    return b",".join(b'"%d":0' % number for number in range(count)) + b"}"


HOSTILE = {  # made one by one, as they are large
    "keys": (ChatRequest, lambda: SAID + keys(1_500_000)),
    "fewer keys": (ChatRequest, lambda: SAID + keys(80_000)),
    "metadata": (ChatRequest, lambda: SAID + b'"metadata":{' + keys(1_500_000) + b"}"),
    "objects": (ChatRequest, lambda: SAID + b'"prediction":[' + b"{}," * 3_000_000 + b"1]}"),
    "messages": (ChatRequest, lambda: b'{"messages":[' + b'{"role":"user"},' * 900_000 + b"{}]}"),
    "parts": (
        ChatRequest,
        lambda: b'{"messages":[{"role":"user","content":[' + PART * 900_000 + b"1]}]}",
    ),
    "nested": (ChatRequest, lambda: b"[" * 1_000_000),
    "digits": (ChatRequest, lambda: b'{"temperature":' + b"9" * 20_000_000 + b"}"),
    "tokens": (CompletionRequest, lambda: b'{"prompt":[' + b"1," * 1_700_000 + b"1]}"),
    "lists": (CompletionRequest, lambda: b'{"prompt":[' + b"[]," * 900_000 + b"1]}"),
    "items": (ResponsesRequest, lambda: b'{"input":[' + b'{"role":"user"},' * 500_000 + b"{}]}"),
    "images": (VisionRequest, lambda: b'{"images":[' + b'"data:",' * 400_000 + b'"x"]}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_costs_little(name):
    model, body = HOSTILE[name][0], HOSTILE[name][1]()
    bodies = Bodies(ServerSettings())
    began = time.thread_time()
    with pytest.raises(RequestError) as refused:
        bodies._parsed(body, model)
    assert time.thread_time() - began < 1.0  # 0.2 s; 5 s to name 1.5 million keys
    assert len(str(refused.value)) < 600


def test_bodies_paths_and_forms_are_refused_alike(plain):
    for body, said in (([], "The body: "), ({}, "messages: ")):
        refused(plain.client.post(CHAT, json=body), 400, said)
    for path, code, said in (
        ("/v2", 410, "/v1/vision/{domain}"), ("/v2/models/x/infer", 410, "/v1/vision/{domain}"),
        ("/v2x", 404, "/docs lists the paths"),
    ):  # fmt: skip
        refused(plain.client.post(path, content=b"{"), code, said)
    answer = plain.client.get("/v1/examples/person/many/0")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "number"
    form = {"files": {"image": b"x"}, "data": {"min_score": "high"}}
    answer = plain.client.post("/v1/vision/person", **form)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_score")


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"", b"null", b"\xff\xfe", b'"\\ud800"', b'{"messages": NaN}',
        b'{"temperature": 1e999}', SAID + b'"n": 1}}', SAID + b'"tools": [{"type": "function", '
        b'"function": {"name": "a", "parameters": {"const": 1e999}}}]}',
        b'{"messages": {}, "messages": 1}', b'{"model": "\\ud800", "messages": []}',
        json.dumps({"messages": [{"role": "user", "content": "x" * 500_000}]}).encode(),
        SAID[:-1].replace(b"x", b"\xe9") + b"}", (SAID[:-1] + b"}").decode().encode("utf-16"),
    ],
)  # fmt: skip
def test_odd_json_is_400(plain, body):
    answer = plain.client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert len(answer.content) < 1000


def test_a_byte_order_mark_is_left_out(plain):
    head = {"content-type": "application/json; charset=UTF-8"}
    content = b"\xef\xbb\xbf" + SAID[:-1] + b"}"
    assert plain.client.post(CHAT, content=content, headers=head).status_code == 200
