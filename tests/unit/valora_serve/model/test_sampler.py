"""The choice of tokens, against closed forms."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from valora_serve.model.sampler import TokenChoice, make_generator, sample, top_logprobs
from valora_serve.types import SamplingParams

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 0.5, 1.2, -1.0, 1.1, 0.0, -3.0, 0.7])
DRAWS = 4000


def choice(
    forbidden: Sequence[int] = (), allowed: Sequence[int] | None = None, **given: object
) -> TokenChoice:
    params = SamplingParams(**given)  # type: ignore[arg-type]
    mask = None
    if allowed is not None:
        mask = np.zeros(len(LOGITS), dtype=np.bool_)
        mask[list(allowed)] = True
    return TokenChoice(params, make_generator(params, CPU), forbidden, mask)


def shares(logits: torch.Tensor, one: TokenChoice) -> torch.Tensor:
    """How often each token comes in many draws of one stream."""
    rows = logits.expand(DRAWS, -1)
    found = sample(rows, [one] * DRAWS)
    return torch.bincount(found, minlength=logits.numel()) / DRAWS


def assert_drawn(found: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Within four standard errors everywhere, and nothing that cannot come."""
    probabilities = probabilities / probabilities.sum()
    error = (probabilities * (1 - probabilities) / DRAWS).sqrt()
    assert bool((found[probabilities == 0] == 0).all())
    assert bool(((found - probabilities).abs() <= 4 * error + 1e-9).all()), (found, probabilities)


def only(kept: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Probabilities when only these tokens are left."""
    left = torch.zeros_like(LOGITS)
    left[list(kept)] = (LOGITS / temperature).softmax(-1)[list(kept)]
    return left


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature(temperature: float) -> None:
    one = choice(temperature=temperature, seed=1)
    assert_drawn(shares(LOGITS, one), (LOGITS / temperature).softmax(-1))


@pytest.mark.parametrize(("k", "kept"), [(1, [0]), (2, [0, 2]), (4, [0, 2, 4, 7]), (99, range(8))])
def test_top_k(k: int, kept: Sequence[int]) -> None:
    assert_drawn(shares(LOGITS, choice(temperature=1.0, top_k=k, seed=2)), only(kept))


# Falling probabilities: 0.390 0.175 0.159 0.106 0.087 0.053 0.019 0.003 of 0 2 4 7 1 5 3 6.
@pytest.mark.parametrize(
    ("p", "kept"),
    [(0.0, [0]), (0.3, [0]), (0.45, [0, 2]), (0.8, [0, 2, 4, 7]), (1.0, range(8))],
)
def test_top_p_keeps_the_token_that_reaches_it(p: float, kept: Sequence[int]) -> None:
    assert_drawn(shares(LOGITS, choice(temperature=1.0, top_p=p, seed=3)), only(kept))


@pytest.mark.parametrize(
    ("m", "kept"), [(0.0, range(8)), (0.25, [0, 2, 4, 7]), (0.41, [0, 2]), (1.0, [0])]
)
def test_min_p_is_a_share_of_the_likeliest(m: float, kept: Sequence[int]) -> None:
    assert_drawn(shares(LOGITS, choice(temperature=1.0, min_p=m, seed=4)), only(kept))


def test_cuts_come_after_the_temperature() -> None:
    hot = 3.0
    flat = (LOGITS / hot).softmax(-1)
    order = flat.argsort(descending=True)
    count = int((flat[order].cumsum(0) < 0.6).sum()) + 1
    cold = LOGITS.softmax(-1)
    assert count > int((cold[cold.argsort(descending=True)].cumsum(0) < 0.6).sum()) + 1
    one = choice(temperature=hot, top_p=0.6, seed=5)
    assert_drawn(shares(LOGITS, one), only(order[:count].tolist(), hot))


def test_neighbours_with_other_wishes() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0), LOGITS * 2, LOGITS])
    choices = [
        choice(temperature=1.0, top_k=1, seed=1),
        choice(),
        choice(temperature=0.5, min_p=1.0, seed=2),
        choice(temperature=5.0, seed=3, allowed=[6]),
    ]
    for _ in range(20):
        assert sample(logits, choices).tolist() == [0, 7, 0, 6]


def test_a_seed_repeats_whatever_runs_beside() -> None:
    params: dict[str, Any] = {"temperature": 1.3, "top_p": 0.9, "seed": 42}
    alone = choice(**params)
    first = [int(sample(LOGITS[None], [alone])[0]) for _ in range(50)]
    beside = choice(**params)
    generator = torch.Generator().manual_seed(0)
    again = []
    for step in range(50):
        others = [choice(temperature=1.0 + step % 3) for _ in range(step % 4)]
        place = step % (len(others) + 1)
        choices = [*others[:place], beside, *others[place:]]
        logits = torch.randn(len(choices), 8, generator=generator)
        logits[place] = LOGITS
        again.append(int(sample(logits, choices)[place]))
    assert first == again
    other = choice(**{**params, "seed": 43})
    assert first != [int(sample(LOGITS[None], [other])[0]) for _ in range(50)]


def test_without_a_seed_every_request_draws_its_own() -> None:
    flat = torch.zeros(1, 1000)
    drawn = [int(sample(flat, [choice(temperature=1.0)])[0]) for _ in range(8)]
    assert len(set(drawn)) > 1


def test_large_seeds() -> None:
    for seed in (0, 2**63, 2**64 - 1, -1):
        sample(LOGITS[None], [choice(temperature=1.0, seed=seed)])


def test_greedy_takes_the_likeliest_and_leaves_the_logits() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    before = logits.clone()
    assert sample(logits, [choice(), choice()]).tolist() == [0, 7]
    assert sample(logits, [choice([0]), choice(allowed=[1, 3])]).tolist() == [2, 3]
    sample(logits, [choice(temperature=2.0, top_k=3), choice([7], temperature=1.0)])
    assert torch.equal(logits, before)


def test_what_is_forbidden_never_comes() -> None:
    one = choice([0, 2], temperature=1.0, seed=6)
    assert_drawn(shares(LOGITS, one), only([1, 3, 4, 5, 6, 7]))
    one = choice([0], [0, 3, 6], temperature=1.0, top_k=2, seed=7)
    assert_drawn(shares(LOGITS, one), only([3, 6]))


def test_a_cut_counts_only_what_is_allowed() -> None:
    one = choice(allowed=[3, 5, 6], temperature=1.0, top_p=0.7, seed=8)  # 0.26 0.71 0.04
    assert_drawn(shares(LOGITS, one), only([5]))
    one = choice(allowed=[3, 5, 6], temperature=1.0, top_p=0.8, seed=8)
    assert_drawn(shares(LOGITS, one), only([5, 3]))


def test_zero_noise_draws_nothing_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponential noise can be exactly 0; 0 / 0 must not win."""

    def noise(values: torch.Tensor, **_: object) -> torch.Tensor:
        values.fill_(1.0)[5:] = 0.0  # places of tokens that top-k has cut off
        return values

    monkeypatch.setattr(torch.Tensor, "exponential_", noise)
    assert int(sample(LOGITS[None], [choice(temperature=1.0, top_k=2, seed=1)])[0]) == 0


def test_log_probabilities_are_those_before_any_restriction() -> None:
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
