"""The chat endpoint, asked with OpenAI's client, over the fake engine."""

import math
from dataclasses import replace

import pytest

from tests.support.fake_engine import WORDS, FakeEngine
from tests.support.http_helpers import CHAT, chat, data_url, encoded, picture, refused, serving

IMAGE_URL, TALL_URL = (data_url(encoded(picture(*size))) for size in ((40, 20), (10, 50)))
PNG, TALL = ({"type": "image_url", "image_url": {"url": url}} for url in (IMAGE_URL, TALL_URL))
TEXT = {"type": "text", "text": "x"}


def ask(client, content="describe", **more):
    defaults = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    return client.chat.completions.create(**(defaults | more))


def test_an_answer_and_its_stream(client):
    answer = ask(client, max_tokens=3)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role) == (" ".join(WORDS[:3]), "assistant")
    assert choice.finish_reason == "length"
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (5, 3, 8)
    assert used.prompt_tokens_details.cached_tokens == 1
    assert answer.model == "tiny"
    whole = ask(client).choices[0]
    assert whole.finish_reason == "stop"
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(WORDS)
    assert len({c.id for c in chunks}) == 1
    assert all(chunk.usage is None for chunk in ask(client, stream=True))


def test_what_is_asked_reaches_the_engine(server, client):
    given = {"temperature": 0.7, "top_p": 0.9, "seed": 11, "frequency_penalty": -0.5,
             "presence_penalty": 1.5}  # fmt: skip
    more = {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "ignore_eos": True,
            "repetition_penalty": 1.25}  # fmt: skip
    own = {"valora": {"head": False, "min_score": 0.25, "deadline": 7}}
    ask(client, **given, stop=["zebra"], max_completion_tokens=9, logit_bias={"7": -100, "0": 2.5},
        extra_body=more | own)  # fmt: skip
    asked, bias = server.engine.asked[-1], ((7, -100.0), (0, 2.5))
    wanted = given | more | {"stop": ("zebra",), "max_tokens": 9, "logit_bias": bias}
    assert {name: getattr(asked.sampling, name) for name in wanted} == wanted
    assert (asked.head, asked.min_score) == (False, 0.25)
    assert 6 < asked.deadline <= 7


def test_log_probabilities_of_answers_that_quote_them(client):
    """Streams have the same ones: see `test_tools.py`."""
    said = chat('see "logprobs":null and "logprobs":[]')["messages"]
    whole = ask(client, messages=said, logprobs=True, top_logprobs=2, n=3, max_tokens=5)
    first, second = whole.choices[0].logprobs.content[:2]
    assert (first.token, second.token, second.bytes) == ("a", " red", list(b" red"))
    assert first.logprob == pytest.approx(math.log(0.5))
    assert [top.token for top in first.top_logprobs] == ["a", "?"]
    assert first.top_logprobs[1].logprob == -9999.0  # JSON has no infinity
    plain = ask(client, messages=said, n=3, max_tokens=5)
    assert [one.message for one in plain.choices] == [one.message for one in whole.choices]
    assert all(one.logprobs is None for one in plain.choices)
    assert ask(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_too_many_log_probabilities_are_refused_at_once(server):
    body = chat("x", n=16, max_tokens=2000, logprobs=True, top_logprobs=20)
    before = len(server.engine.asked)
    refused(server.client.post(CHAT, json=body), 400, "ask for fewer")
    assert len(server.engine.asked) == before
    body |= {"n": 2, "max_tokens": 10**7}  # no more than the context holds
    assert server.client.post(CHAT, json=body).status_code == 200


def test_images_come_in_the_order_of_their_parts(server, client):
    ask(client, [PNG, TEXT, TALL])
    asked = server.engine.asked[-1]
    assert [image.size for image in asked.images] == [(40, 20), (10, 50)]
    assert [part["type"] for part in asked.messages[0]["content"]] == ["image", "text", "image"]


def test_a_box_heads_boxes_are_in_pixels_and_in_words(client):
    message = chat(url=IMAGE_URL)["messages"]
    answer = ask(client, model="person", messages=message)
    assert answer.choices[0].message.content == "<ref>person</ref><box>(0,0),(500,500)</box>"
    assert answer.choices[0].finish_reason == "stop"
    block = answer.valora
    assert (block["kind"], block["adapter"], block["bundle"]) == ("detection", "adapter-1", "d@1")
    assert block["images"] == [
        {"width": 40, "height": 20,
         "detections": [{"label": "person", "confidence": 0.9, "box": [0.0, 0.0, 20.0, 10.0]}]}
    ]  # fmt: skip
    assert block["mode"] == "merged"
    written = ask(client, model="person", max_tokens=2, extra_body={"valora": {"head": False}})
    assert (written.choices[0].message.content, written.valora["kind"]) == ("a red", None)


MARKED = {"cache_control": {"type": "ephemeral"}, "x": [{"y": None}]}
CALL = {"id": "a", "index": 0, **MARKED, "function": {"name": "f", "arguments": "{}", **MARKED}}


@pytest.mark.parametrize(
    "message",
    [
        {"content": [{**TEXT, **MARKED}], **MARKED},
        {"content": "x", "name": None, "tool_calls": None, "audio": None, "reasoning_content": []},
        {"content": [TEXT, {"type": "image_url", "image_url": IMAGE_URL, **MARKED}]},
        *({"content": [TEXT, {"type": "image_url", "image_url": {"url": IMAGE_URL, **more}}]}
          for more in ({"detail": "original"}, {"detail": 7}, {"detail": None, **MARKED})),
        {"role": "assistant", "content": None, "tool_calls": [CALL], "provider_fields": {}},
        *({"role": role, "content": [TEXT, {"type": "image_url", "image_url": IMAGE_URL}]}
          for role in ("system", "developer", "user", "assistant", "tool", "function")),
        {"content": []}, {"role": "system", "content": ""}, {"role": "assistant", "content": []},
    ],
)  # fmt: skip
def test_messages_of_other_clients_are_taken(server, message):
    body = {"messages": [{"role": "user", **message}, {"role": "user", "content": "x"}],
            "stream": True, "stream_options": {"include_usage": None, **MARKED}}  # fmt: skip
    answer = server.client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["chat/completions", "completions", "embeddings", "responses"])
def test_texts_that_are_too_long_are_told_as_openai_does(server, path):
    """LiteLLM looks for these words, and others for the code, to ask a longer model."""
    text = "x" * 400_001
    sent = {"chat/completions": chat(text), "completions": {"prompt": text}}
    sent = sent.get(path, {"input": text})
    error = server.client.post(f"/v1/{path}", json=sent).json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is ")


# The prompt of a domain


@pytest.mark.parametrize("stream", [False, True])
def test_each_image_of_a_box_head_is_a_prompt_of_its_own(server, client, stream):
    before = len(server.engine.asked)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = ask(client, [PNG, TALL], model="person", n=2, **options)
    asked = server.engine.asked[before:]
    assert [[image.size for image in one.images] for one in asked] == [[(40, 20)], [(10, 50)]] * 2
    assert len({one.id for one in asked}) == 4
    assert all(part["type"] == "image" for one in asked for part in one.messages[0]["content"][1:])
    chunks = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    said = [(one.index, (one.delta if stream else one.message).content) for one in choices]
    both = "\n".join(["<ref>person</ref><box>(0,0),(500,500)</box>"] * 2)
    assert [one for one in said if one[1]] == [(0, both), (1, both)]
    assert [one.index for one in choices if one.finish_reason] == [0, 1]
    block = next(one.valora for one in chunks if getattr(one, "valora", None))
    assert [(i["width"], i["detections"][0]["box"]) for i in block["images"]] == [
        (40, [0.0, 0.0, 20.0, 10.0]), (10, [0.0, 0.0, 5.0, 25.0]),
    ]  # fmt: skip
    assert chunks[-1].usage.prompt_tokens == 2 * 69


def test_the_other_doors_to_a_domain_warn_too(server, client):
    answer = client.completions.create(model="person", prompt="detect person")
    assert "text completions" in answer.valora["warnings"][0]
    chunks = list(client.completions.create(model="person", prompt="detect", stream=True))
    assert chunks[-1].valora["warnings"] == answer.valora["warnings"]
    assert client.completions.create(model="adapter-1", prompt="x").valora["warnings"] == []
    for more in ({}, {"prompt": "detect person"}, {"prompt": " "}):
        body = server.client.post("/v1/vision/person", json={"images": [IMAGE_URL]} | more).json()
        assert body["warnings"] == []


def test_a_domains_answers_are_as_long_as_those_that_were_measured():
    engine = FakeEngine()
    engine._served["caption"] = replace(engine._served["caption"], max_tokens=3)
    with serving(engine) as server:
        for model, more, most in (("caption", {}, 3), ("caption", {"max_tokens": 7}, 7),
                                  ("adapter-1", {}, 256)):  # fmt: skip
            body = chat("describe the image.", IMAGE_URL, model=model, **more)
            assert server.client.post(CHAT, json=body).status_code == 200
            assert engine.asked[-1].sampling.max_tokens == most
        server.client.post("/v1/vision/caption", json={"images": [IMAGE_URL]})
        assert engine.asked[-1].sampling.max_tokens == 3
