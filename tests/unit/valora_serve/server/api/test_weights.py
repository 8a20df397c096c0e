"""Adapters with weights in requests of all endpoints that take them."""

import pytest

TURN = [{"role": "user", "content": "x"}]
BODIES = {
    "/v1/chat/completions": {"messages": TURN, "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/embeddings": {"input": "x"},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
}
NAME = "adapter-1"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", [None, "tiny", NAME])
def test_the_engine_gets_the_weights(server, path, model):
    for weights in ([(NAME, 0.5)], [(NAME, 1.0), ("person", -4.0)]):
        given = [{"name": name, "weight": weight} for name, weight in weights]
        if weights[0][1] == 1:
            del given[0]["weight"]
        body = BODIES[path] | {"model": model, "valora": {"adapters": given}}
        asked = len(server.engine.asked)
        answer = server.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == NAME
        (request,) = server.engine.asked[asked:]
        assert request.adapters == tuple(weights)
        assert request.model == (model or "tiny")


def test_each_adapter_counts(server):
    def counted(name):
        text = server.client.get("/metrics").text
        lines = [one for one in text.splitlines() if f'model_name="{name}"' in one]
        return sum(float(one.split()[-1]) for one in lines if "generation_tokens" in one)

    before = counted(NAME), counted("tiny")
    given = [{"name": NAME, "weight": 0.5}, {"name": NAME, "weight": 0.25}]
    body = BODIES["/v1/chat/completions"] | {"valora": {"adapters": given}}
    assert server.client.post("/v1/chat/completions", json=body).status_code == 200
    server.client.get("/metrics")
    assert (counted(NAME), counted("tiny")) == (before[0] + 1, before[1])
