"""Numbers that JSON cannot hold, and errors of adapters that compute them."""

import json
import math
from dataclasses import replace

import openai
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import CHAT, chat, serving
from valora_serve.errors import NonFiniteError, QuarantinedError
from valora_serve.types import Finish, Logprob, Output, TokenLogprobs

VALUES = (math.nan, math.inf, -math.inf, -1e30, -0.25)
BODIES = {CHAT: chat("hello"), "/v1/completions": {"prompt": "hello"}}
REASON = "merging it makes base weights infinite or NaN"


class Strange(FakeEngine):
    """Says every log probability that a model can compute, and breaks where it is told."""

    breaks_at = None

    @staticmethod
    def _logprobs(request, word, index, chars):
        if request.sampling.logprobs is None:
            return ()
        chosen = Logprob(index, word, VALUES[index % len(VALUES)])
        top = [Logprob(90 + n, f"<{n}>", value) for n, value in enumerate(VALUES)]
        return (TokenLogprobs(chosen, tuple(top)),)

    async def _answer(self, request, arrival):
        made = 0
        async for output in super()._answer(request, arrival):
            if made == self.breaks_at:
                wrong = NonFiniteError("adapter-1 computed NaN or infinity for this request: no")
                yield Output(request.id, finish=Finish.ERROR, error=wrong)
                return
            made += 1
            yield output

    def stats(self):
        found = {"adapter-1": REASON} if self.refuse else {}
        return replace(super().stats(), non_finite=4, unmergeable=("person",), quarantined=found)


@pytest.fixture
def server():
    with serving(Strange()) as running:
        yield running


def events(response):
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_no_log_probability_breaks_an_answer(server, path, stream):
    body = {"max_tokens": 5, "stream": stream}
    asked = {"logprobs": True, "top_logprobs": 5} if path == CHAT else {"logprobs": 5}
    response = server.client.post(path, json=BODIES[path] | body | asked)
    assert response.status_code == 200
    parts = events(response) if stream else [response.json()]
    assert not any("error" in part for part in parts)
    found, tops = [], []
    for choice in (choice for part in parts for choice in part["choices"]):
        logprobs = choice.get("logprobs") or {}
        for item in logprobs.get("content") or ():
            found.append(item["logprob"])
            tops.append([top["logprob"] for top in item["top_logprobs"]])
        found += logprobs.get("token_logprobs") or ()
        tops += [list(top.values()) for top in logprobs.get("top_logprobs") or ()]
    assert found == [-9999.0] * 4 + [-0.25]
    assert tops == [[-9999.0] * 4 + [-0.25]] * 5


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_is_not_finite(server, path):
    server.engine.breaks_at = 2
    body = BODIES[path]
    whole = server.client.post(path, json=body)
    assert whole.status_code == 422
    assert whole.json()["error"]["code"] == "non_finite_output"
    streamed = server.client.post(path, json=body | {"stream": True})
    assert streamed.status_code == 200  # two tokens were sent before
    assert events(streamed)[-1]["error"]["code"] == "non_finite_output"
    server.engine.breaks_at = 0
    if path != CHAT:  # a chat stream begins with the role
        assert server.client.post(path, json=body | {"stream": True}).status_code == 422


def test_a_quarantined_adapter(server):
    server.engine.refuse = QuarantinedError(f"adapter adapter-1 is quarantined ({REASON}): no")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=5)
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.chat.completions.create(model="adapter-1", **chat("hello"))
    assert refused.value.code == "adapter_quarantined"
    assert len(server.engine.asked) == 1  # clients do not repeat it
    listed = {one["id"]: one for one in server.client.get("/v1/models").json()["data"]}
    assert listed["adapter-1"]["quarantined"] == REASON
    assert listed["person"]["quarantined"] is None
    assert server.client.get("/v1/models/adapter-1").json()["quarantined"] == REASON
    status = server.client.get("/v1/status").json()
    assert status["quarantined"] == {"adapter-1": REASON}
    assert (status["unmergeable"], status["non_finite"]) == (["person"], 4)
    metrics = server.client.get("/metrics").text
    for line in ("valora_models_quarantined 1.0", "valora_models_unmergeable 1.0",
                 "valora_non_finite_outputs_total 4.0"):  # fmt: skip
        assert line in metrics
