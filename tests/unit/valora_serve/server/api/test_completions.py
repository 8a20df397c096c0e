"""The completions endpoint, asked with OpenAI's client."""

import math

import pytest


def test_completions(client):
    answer = client.completions.create(model="tiny", prompt="once", max_tokens=2, logprobs=1)
    assert answer.choices[0].text == "a red"
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", " red"]
    assert logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs[0] == {"a": pytest.approx(math.log(0.5))}


def test_completions_of_several_prompts_and_tokens(server, client):
    answer = client.completions.create(
        model="tiny", prompt=["one", "two"], n=2, seed=0, max_tokens=1
    )
    assert [choice.text for choice in answer.choices] == ["a", "red"] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [request.text for request in server.engine.asked[-4:]] == ["one", "one", "two", "two"]
    assert [request.sampling.seed for request in server.engine.asked[-4:]] == [0, 1, 0, 1]
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


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": []}, {"prompt": ""}, {"prompt": [""]}, {"prompt": ["a"] * 5}, {"prompt": [[]]},
        {"prompt": ["a", 1]}, {"prompt": "a", "best_of": 2}, {"prompt": "a", "echo": True},
        {"prompt": "a", "suffix": "b"}, {"prompt": [1, 99999]}, {"prompt": "x" * 3000},
        {"prompt": [2**70]}, {"prompt": [-1, 5000]},
    ],
)  # fmt: skip
def test_wrong_completions_are_400(server, body):
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
