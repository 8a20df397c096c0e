"""The completions endpoint, asked with OpenAI's client."""

import json
import math

import pytest


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
    joined = "".join(texts)
    starts = [sum(map(len, texts[:place])) for place in range(len(ids))]
    assert found["text_offset"] == [*starts, len(joined)]
    stream = streamed(server, **body)[0]
    assert stream["logprobs"] == found
    assert stream["text"] == answer["choices"][0]["text"]


def test_only_the_prompt_is_scored_with_max_tokens_0(server, tokenizer):
    ids = tokenizer("a green key")["input_ids"]
    body = {"prompt": ids, "max_tokens": 0, "logprobs": 1, "echo": True}
    answer = complete(server, **body)
    choice = answer["choices"][0]
    assert choice["text"] == tokenizer.decode(ids)
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]
    stream = streamed(server, **body)[0]
    assert stream == {key: choice[key] for key in ("text", "logprobs", "finish_reason")}
    assert complete(server, prompt="once", max_tokens=0, echo=True)["choices"][0]["text"] == "once"


def test_log_probabilities_of_a_long_prompt(server, tokenizer):
    answer = complete(server, prompt=[7, 8, 9] * 600, max_tokens=0, logprobs=20, echo=True)
    found = answer["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == 1800
    assert all(len(top) <= 20 for top in found["top_logprobs"][1:])
    assert found["tokens"][600] == tokenizer.decode([7])
    stream = streamed(server, prompt=[7, 8, 9] * 600, max_tokens=0, logprobs=20, echo=True)[0]
    assert stream["logprobs"] == found


def test_penalties_and_bias_reach_the_engine(server):
    complete(
        server, prompt="a", max_tokens=1, frequency_penalty=-0.5, presence_penalty=1.5,
        repetition_penalty=1.25, logit_bias={"7": -100, "0": 2.5},
    )  # fmt: skip
    params = server.engine.asked[-1].sampling
    assert (params.frequency_penalty, params.presence_penalty) == (-0.5, 1.5)
    assert params.repetition_penalty == 1.25
    assert params.logit_bias == ((7, -100.0), (0, 2.5))
    complete(server, prompt="a", max_tokens=1, frequency_penalty=0, logit_bias={})
    params = server.engine.asked[-1].sampling
    assert not params.penalised
    assert not params.logit_bias


TEXTS = ["naïve 😀 中文", "plain text", " leading", "<s>typed", "e\u0301 mixed 👩\u200d🚀 end"]


@pytest.mark.parametrize("text", TEXTS)
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
