"""Numbers that JSON cannot hold, and errors of adapters that compute them."""

import json
import math
from dataclasses import replace

import openai
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import CHAT, chat, refused, serving
from valora_serve.errors import NonFiniteError, QuarantinedError
from valora_serve.server.api.common import json_logprob
from valora_serve.types import Finish, Output

BODIES = {CHAT: chat("hello"), "/v1/completions": {"prompt": "hello"}}
REASON = "merging it makes base weights infinite or NaN"


class Strange(FakeEngine):
    """Breaks where it is told: with an error, or without a last output."""

    breaks_at, wrong = None, None

    async def _answer(self, request, arrival):
        made = 0
        async for output in super()._answer(request, arrival):
            if made == self.breaks_at:
                if self.wrong is not None:
                    yield Output(request.id, finish=Finish.ERROR, error=self.wrong)
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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e30])
def test_no_log_probability_breaks_an_answer(value):
    assert json_logprob(value) == -9999.0
    assert json_logprob(-0.25) == -0.25


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("wrong", "status", "code"),
    [
        (NonFiniteError("adapter-1 computed NaN or infinity: no"), 422, "non_finite_output"),
        (None, 503, "unavailable"),
    ],
)
def test_an_answer_that_breaks_off(server, path, wrong, status, code):
    engine, body = server.engine, BODIES[path]
    engine.breaks_at, engine.wrong = 2, wrong
    assert refused(server.client.post(path, json=body), status) == code
    streamed = server.client.post(path, json=body | {"stream": True})
    assert streamed.status_code == 200  # two tokens were sent before
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert json.loads(lines[-2])["error"]["code"] == code
    assert lines[-1] == "[DONE]"
    engine.breaks_at = 0
    if path != CHAT:  # a chat stream begins with the role
        assert server.client.post(path, json=body | {"stream": True}).status_code == status
    assert server.inside == 0


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
