"""The endpoints of texts, completions and embeddings, asked with OpenAI's client."""

import asyncio
import base64
import json
import math

import numpy as np
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import PNG_URL, refused, serving
from valora_serve.server.api.requests import AT_ONCE, numbered
from valora_serve.types import Request, SamplingParams


def test_completions_of_several_prompts_and_tokens(server, client):
    answer = client.completions.create(
        model="tiny", prompt=["one", "two"], n=2, seed=0, max_tokens=1
    )
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == "a" and texts[:2] == texts[2:]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [request.text for request in server.engine.asked[-4:]] == ["one", "one", "two", "two"]
    seeds = [request.sampling.seed for request in server.engine.asked[-4:]]
    assert seeds[0] == 0 and seeds[:2] == seeds[2:]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 4)
    client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=1)
    assert server.engine.asked[-1].token_ids == (5, 6, 7)
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(
        model="tiny", prompt=[[1], [2, 3]], max_tokens=2, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "a red", 1: "a red"}


def test_no_answer_repeats_that_of_another_seed():
    found = []
    for first in (-(2**63), -1, 0, 1, 2, 2**63 - 1):
        request = Request("r", sampling=SamplingParams(seed=first))
        seeds = [one.sampling.seed for one in numbered(request, 128)]
        assert seeds[0] == first and all(-(2**63) <= one < 2**63 for one in seeds)
        found += seeds
    assert len({*found}) == 6 * 128


def complete(server, **body):
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server, **body):
    """Text and log probabilities of each choice, joined from the events of a stream."""
    found = {}
    with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                into = found.setdefault(choice["index"], {"text": "", "logprobs": {}})
                into["text"] += choice["text"]
                into["finish_reason"] = choice["finish_reason"]
                for key, values in (choice["logprobs"] or {}).items():
                    into["logprobs"].setdefault(key, []).extend(values)
    return found


@pytest.mark.parametrize("count", [0, 1, 3])
def test_echo_with_logprobs_as_lm_eval_asks(server, tokenizer, count):
    ids = tokenizer("a green key over the blue ring")["input_ids"]
    body = {"prompt": ids, "max_tokens": 1, "logprobs": count, "echo": True, "temperature": 0}
    answer = complete(server, **body)
    found = answer["choices"][0]["logprobs"]
    texts = [tokenizer.decode([token]) for token in ids]
    assert found["tokens"] == [*texts, "a"]
    prompt = [None, *(-place / 8 for place in range(1, len(ids)))]
    prompt[2] = -9999.0  # impossible
    assert found["token_logprobs"] == [*prompt, pytest.approx(math.log(0.5))]
    assert found["top_logprobs"][0] is None
    for top in found["top_logprobs"][1:-1]:
        # tokens with the same text share an entry, which is the likeliest's
        expected = {}
        for token in range(65, 65 + count):
            expected.setdefault(tokenizer.decode([token]), -float(token))
        assert top == expected
    stream = streamed(server, **body)[0]
    assert stream["logprobs"] == found
    assert stream["text"] == answer["choices"][0]["text"]


@pytest.mark.parametrize(("words", "count"), [("a green key", 1), ("a ring " * 600, 20)])
def test_only_the_prompt_is_scored_with_max_tokens_0(server, tokenizer, words, count):
    ids = tokenizer(words)["input_ids"]
    body = {"prompt": ids, "max_tokens": 0, "logprobs": count, "echo": True}
    answer = complete(server, **body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (tokenizer.decode(ids), "length")
    assert choice["logprobs"]["tokens"] == [tokenizer.decode([token]) for token in ids]
    assert all(len(top) <= count for top in choice["logprobs"]["top_logprobs"][1:])
    used = answer["usage"]
    assert (used["completion_tokens"], used["total_tokens"]) == (0, used["prompt_tokens"])
    stream = streamed(server, **body)[0]
    assert stream == {key: choice[key] for key in ("text", "logprobs", "finish_reason")}
    assert complete(server, prompt="once", max_tokens=0, echo=True)["choices"][0]["text"] == "once"


@pytest.mark.parametrize("words", [["a ring " * 25] * 2, [[5, 6, 7] * 15] * 2])
def test_log_probabilities_of_echoed_prompts_count(server, monkeypatch, words):
    monkeypatch.setattr("valora_serve.server.api.requests.MAX_LOGPROBS", 180)
    body = {"prompt": words, "max_tokens": 0, "logprobs": 1, "echo": True}
    refused(server.client.post("/v1/completions", json=body), 400, "more than 180: ask for fewer")
    assert complete(server, **body | {"prompt": words[0]})
    assert complete(server, **body | {"logprobs": None})


@pytest.mark.parametrize(
    "text", ["naïve 😀 中文", "plain text", " leading", "<s>typed", "e\u0301 mixed 👩\u200d🚀 end"]
)
@pytest.mark.parametrize("as_tokens", [False, True])
def test_offsets_of_an_echoed_prompt_are_places_in_its_text(server, tokenizer, text, as_tokens):
    """Every token begins where the text of those before it ends, parts of characters included."""
    ids = tokenizer(text)["input_ids"]
    body = {"prompt": ids if as_tokens else text, "max_tokens": 1, "logprobs": 0, "echo": True}
    choice = complete(server, **body)["choices"][0]
    found, shown = choice["logprobs"], tokenizer.decode(ids) if as_tokens else text
    assert choice["text"] == shown + "a"
    assert found["text_offset"][-1] == len(shown)
    hidden = 0 if as_tokens or shown.startswith("<s>") else 1 if ids[0] == 1 else 0
    for place, at in enumerate(found["text_offset"][:-1]):
        before = tokenizer.decode(ids[hidden:place]) if place > hidden else ""
        assert at == len(before.rstrip("\ufffd"))


def expected(text, images=0):
    """The fake engine's embedding, with length 1."""
    vector = np.array([len(text), images, sum(map(ord, text)) % 97], np.float64)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_each_text_gets_its_own_embedding(client, form):
    options = {} if form is None else {"encoding_format": form}
    texts = ["a red star", "blue", "ünïcode"]
    answer = client.embeddings.create(model="adapter-1", input=texts, **options)
    assert (answer.object, answer.model) == ("list", "adapter-1")
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, text in zip(answer.data, texts, strict=True):
        found = item.embedding
        if form == "base64":
            found = np.frombuffer(base64.b64decode(found), "<f4")
        assert found == pytest.approx(expected(text), abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, texts))


def test_a_text_and_tokens(server, client):
    (item,) = client.embeddings.create(model="tiny", input="one", dimensions=3).data
    assert item.embedding == pytest.approx(expected("one"), abs=1e-6)
    for given, seen in (([5, 6, 7], [(5, 6, 7)]), ([[5], [6, 7]], [(5,), (6, 7)])):
        before = len(server.engine.asked)
        client.embeddings.create(model="person", input=given)
        asked = server.engine.asked[before:]
        assert sorted(one.token_ids for one in asked) == seen
        assert all(one.embed and one.model == "person" for one in asked)


def test_a_conversation_with_an_image(server):
    parts = [{"type": "image_url", "image_url": {"url": PNG_URL}}]
    for content, kinds in (
        (parts, ["image"]),
        ([*parts, {"type": "text", "text": "a star"}], ["image", "text"]),
    ):
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        answer = server.client.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 1
        asked = server.engine.asked[-1]
        assert [part["type"] for part in asked.messages[0]["content"]] == kinds
        assert len(asked.images) == 1


def test_a_hidden_state_that_is_not_finite_is_an_error():
    class Diverged(FakeEngine):
        async def _answer(self, request, arrival):
            async for output in super()._answer(request, arrival):
                output.head.logits[0, 0] = np.inf
                yield output

    with serving(Diverged()) as server:
        refused(server.client.post("/v1/embeddings", json={"input": "x"}), 500, "not finite")


def test_many_texts_are_embedded_some_at_a_time_within_one_deadline():
    class Slow(FakeEngine):
        most = 0

        async def _answer(self, request, arrival):
            self.most = max(self.most, len(self.running))
            await asyncio.sleep(0.1)
            async for output in super()._answer(request, arrival):
                yield output

    engine = Slow()
    texts = [f"text {number}" for number in range(2 * AT_ONCE + 10)]
    with serving(engine) as server:
        body = {"input": texts, "valora": {"deadline": 20}}
        found = server.client.post("/v1/embeddings", json=body).json()["data"]
        assert engine.most == AT_ONCE
        assert [one["index"] for one in found] == list(range(len(texts)))
        alone = server.client.post("/v1/embeddings", json={"input": texts[-1]}).json()["data"]
        assert found[-1]["embedding"] == alone[0]["embedding"] != found[0]["embedding"]
        [(_, left)] = {(one.arrival, one.deadline) for one in engine.asked[: len(texts)]}
        assert 19 < left <= 20  # also of the last, before which two groups came
