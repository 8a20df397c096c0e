"""The embeddings endpoint, asked with OpenAI's client, over the fake engine."""

import asyncio

import numpy as np
import openai
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import data_url, encoded, picture, refused, serving
from valora_serve.server.api.requests import AT_ONCE


def expected(text, images=0):
    """The fake engine's embedding, with length 1."""
    vector = np.array([len(text), images, sum(map(ord, text)) % 97], np.float64)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_each_text_gets_its_own_embedding(client, form):
    options = {} if form is None else {"encoding_format": form}
    texts = ["a red star", "blue", "ünïcode"]
    answer = client.embeddings.create(model="adapter-1", input=texts, **options)
    assert answer.object == "list"
    assert answer.model == "adapter-1"
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, text in zip(answer.data, texts, strict=True):
        found = item.embedding
        if form == "base64":
            import base64

            found = np.frombuffer(base64.b64decode(found), "<f4")
        assert found == pytest.approx(expected(text), abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, texts))


def test_a_text_and_tokens(server, client):
    (item,) = client.embeddings.create(model="tiny", input="one").data
    assert item.embedding == pytest.approx(expected("one"), abs=1e-6)
    for given, seen in (([5, 6, 7], [(5, 6, 7)]), ([[5], [6, 7]], [(5,), (6, 7)])):
        before = len(server.engine.asked)
        client.embeddings.create(model="person", input=given)
        asked = server.engine.asked[before:]
        assert sorted(one.token_ids for one in asked) == seen
        assert all(one.embed and one.model == "person" for one in asked)


def test_a_conversation_with_an_image(server):
    parts = [{"type": "image_url", "image_url": {"url": data_url(encoded(picture()))}}]
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


def test_dimensions_are_those_of_the_model(client):
    assert client.embeddings.create(model="tiny", input="x", dimensions=3).data
    with pytest.raises(openai.BadRequestError, match="have 3"):
        client.embeddings.create(model="tiny", input="x", dimensions=2)


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
