"""The choice of tokens, against closed forms."""

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from valora_serve.model.sampler import (
    TokenChoice,
    TokenCounts,
    bias_arrays,
    make_generator,
    sample,
    top_logprobs,
)
from valora_serve.types import SamplingParams

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 0.5, 1.2, -1.0, 1.1, 0.0, -3.0, 0.7])
DRAWS = 4000


def choice(forbidden=(), allowed=None, prompt=(), answer=(), **given):
    params = SamplingParams(**given)
    counts = TokenCounts(prompt) if params.penalised else None
    if counts is not None:
        counts.update([*prompt, *answer[: len(answer) // 2]], len(prompt))
        counts.update([*prompt, *answer], len(prompt))
    mask = None
    if allowed is not None:
        mask = np.zeros(len(LOGITS), dtype=np.bool_)
        mask[list(allowed)] = True
    bias = bias_arrays(params)
    return TokenChoice(params, make_generator(params, CPU), forbidden, mask, counts, bias)


def shares(logits, one):
    """How often each token comes in many draws of one stream."""
    rows = logits.expand(DRAWS, -1)
    found = sample(rows, [one] * DRAWS)
    return torch.bincount(found, minlength=logits.numel()) / DRAWS


def assert_drawn(found, probabilities):
    """Within four standard errors everywhere, and nothing that cannot come."""
    probabilities = probabilities / probabilities.sum()
    error = (probabilities * (1 - probabilities) / DRAWS).sqrt()
    assert bool((found[probabilities == 0] == 0).all())
    assert bool(((found - probabilities).abs() <= 4 * error + 1e-9).all()), (found, probabilities)


def only(kept, temperature=1.0):
    """Probabilities when only these tokens are left."""
    left = torch.zeros_like(LOGITS)
    left[list(kept)] = (LOGITS / temperature).softmax(-1)[list(kept)]
    return left


# Falling probabilities: 0.390 0.175 0.159 0.106 0.087 0.053 0.019 0.003 of 0 2 4 7 1 5 3 6.
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"temperature": 0.3}, range(8)), ({}, range(8)), ({"temperature": 2.5}, range(8)),
        ({"top_k": 1}, [0]), ({"top_k": 2}, [0, 2]), ({"top_k": 4}, [0, 2, 4, 7]),
        ({"top_k": 8}, range(8)), ({"top_k": 99}, range(8)), ({"top_k": 2**40}, range(8)),
        ({"top_p": 0.0}, [0]), ({"top_p": 5e-324}, [0]), ({"top_p": 1e-300}, [0]),
        ({"top_p": 0.3}, [0]), ({"top_p": 0.45}, [0, 2]), ({"top_p": 0.8}, [0, 2, 4, 7]),
        ({"top_p": 1 - 1e-16}, range(8)), ({"top_p": 1.0}, range(8)),
        ({"min_p": 0.0}, range(8)), ({"min_p": 1e-300}, range(8)),
        ({"min_p": 0.25}, [0, 2, 4, 7]), ({"min_p": 0.41}, [0, 2]), ({"min_p": 1 - 1e-16}, [0]),
        ({"min_p": 1.0}, [0]), ({"top_k": 1_000_000, "top_p": 1.0, "min_p": 0.0}, range(8)),
        # what is forbidden never comes, and a cut counts only what is allowed
        ({"forbidden": [0, 2]}, [1, 3, 4, 5, 6, 7]),
        ({"forbidden": [0], "allowed": [0, 3, 6], "top_k": 2}, [3, 6]),
        ({"allowed": [3, 5, 6], "top_p": 0.7}, [5]),  # 0.26 0.71 0.04
        ({"allowed": [3, 5, 6], "top_p": 0.8}, [5, 3]),
    ],
)  # fmt: skip
def test_cuts(given, kept):
    found = shares(LOGITS, choice(**{"temperature": 1.0, "seed": 3} | given))
    assert_drawn(found, only(kept, given.get("temperature", 1.0)))


def test_seeds():
    """Large ones are told apart, too, and without one every request draws its own."""
    flat = torch.zeros(1, 1000)

    def drawn(seed, count=6):
        one = choice(temperature=1.0, seed=seed)
        return [int(sample(flat, [one])[0]) for _ in range(count)]

    streams = {seed: drawn(seed) for seed in (0, 1, -1, 2**62 + 7, -(2**63) + 5, 2**63 - 3)}
    assert len({tuple(tokens) for tokens in streams.values()}) == len(streams)
    assert all(drawn(seed) == tokens for seed, tokens in streams.items())
    assert len({drawn(None, 1)[0] for _ in range(8)}) > 1


# What float32 rounds to 0, cannot hold, or divides to infinity.
TINY = [0.0, 5e-324, 1e-300, 1e-45, 1.5e-45, 1e-38, 1.2e-38, 1e-20, 9e-6]


@pytest.mark.parametrize("temperature", TINY)
def test_a_tiny_temperature_is_greedy(temperature):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(7, 300, generator=generator) * 100
    logits[1] *= 1e30
    logits[2] *= 1e-30
    logits[3, 40:80] = logits[3].max() + 1  # the first of equals
    logits[4, 9] = -torch.inf
    choices = [choice(temperature=temperature, seed=seed) for seed in range(7)]
    assert sample(logits, choices).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 0.01, 0.3, 1.0, 2.0, 1e30, 1e300])
def test_any_temperature_gives_the_distribution_of_float64(temperature):
    logits = torch.tensor([3e-5, 0.0, -2e-5, 1e-5]) + LOGITS[4]
    wanted = ((logits.double() - logits.double().max()) / temperature).softmax(-1)
    assert_drawn(shares(logits, choice(temperature=temperature, seed=9)), wanted)


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 2.0])
def test_large_and_infinite_logits(temperature):
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([largest, -torch.inf, largest, -largest])
    wanted = torch.tensor([0.5, 0.0, 0.5, 0.0])
    assert_drawn(shares(logits, choice(temperature=temperature, seed=10)), wanted)
    logits = torch.tensor([-torch.inf, 1.0, torch.inf, largest])
    assert_drawn(shares(logits, choice(temperature=temperature, seed=11)), torch.eye(4)[2])


def test_the_tail_of_a_large_vocabulary_can_come():
    """In float32 the sums of 200,000 probabilities pass 1 before their end."""
    logits = torch.zeros(200_000)
    logits[:1000] = 1e-3  # these sort first
    found = sample(logits.expand(60, -1), [choice(temperature=1.0, seed=13)] * 60)
    assert int(found.max()) > 195_000
    assert len(set(found.tolist())) > 55


PROMPT, ANSWER = [4, 6, 6, 1], [2, 0, 2, 3, 2, 6]


# How often each token is in the answer alone: OpenAI's penalties count no others.
COUNTS = torch.tensor([1.0, 0.0, 3.0, 1.0, 0.0, 0.0, 1.0, 0.0])
BIAS = {3: 2.5, 0: -1.5, 6: 4.0, 7: -100.0}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        *(({"repetition_penalty": one}, RepetitionPenaltyLogitsProcessor(one))
          for one in (0.5, 1.3, 4.0)),
        *(({"frequency_penalty": frequency, "presence_penalty": presence},
           lambda _, x, f=frequency, p=presence: x - COUNTS * f - (COUNTS > 0) * p)
          for frequency, presence in ((0.7, 0.0), (0.0, 1.1), (-2.0, 0.4), (0.3, -1.9))),
        ({"logit_bias": tuple(BIAS.items())},
         SequenceBiasLogitsProcessor({(token,): value for token, value in BIAS.items()})),
    ],
)  # fmt: skip
def test_penalties_and_bias_are_those_of_transformers(given, wanted):
    expected = wanted(torch.tensor([PROMPT + ANSWER]), LOGITS[None].clone())
    drawn = choice(prompt=PROMPT, answer=ANSWER, temperature=0.8, seed=15, **given)
    assert_drawn(shares(LOGITS, drawn), (expected[0] / 0.8).softmax(-1))


def test_bias_comes_after_penalties_and_before_what_is_allowed():
    forced = choice(logit_bias=((6, 100.0),), answer=[6] * 9, frequency_penalty=2.0)
    banned = choice(logit_bias=((0, -100.0),), answer=[0], frequency_penalty=-2.0)
    masked = choice(logit_bias=((3, -100.0), (5, -100.0), (0, 100.0)), allowed=[3, 5])
    early = choice([6], logit_bias=((6, 100.0),))
    found = sample(LOGITS.expand(4, -1), [forced, banned, masked, early]).tolist()
    assert found == [6, 2, 5, 0]


def test_log_probabilities_are_those_before_any_restriction():
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    tokens = sample(logits, [choice([0], temperature=0.1, top_k=1), choice()])
    found = top_logprobs(logits, tokens, 3)
    scores = logits.double().softmax(-1).log()
    assert found.chosen.tolist() == pytest.approx(
        [float(scores[0, 2]), float(scores[1, 7])], abs=1e-6
    )
    assert found.tokens.tolist() == [[0, 2, 4], [7, 5, 3]]
    assert found.values[0].tolist() == pytest.approx(scores[0, [0, 2, 4]].tolist(), abs=1e-6)
    assert top_logprobs(logits, tokens, 0).tokens.shape == (2, 1)
