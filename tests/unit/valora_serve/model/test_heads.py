"""Running heads: against training's modules and closed forms, and mixed in one batch."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from tests.support.serve_helpers import make_box_head, make_label_head
from valora_data.contract.heads import read_head
from valora_data.contract.label_head import Pooling
from valora_data.contract.results import HeadResult
from valora_serve.errors import NonFiniteError, ServeError
from valora_serve.model.heads import HeadRequest, launch_heads

WIDTH = 20
GRID = (3, 4)
CELLS = 12


def run_heads(inputs):
    return launch_heads(inputs)()


def hidden(tokens, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, WIDTH, generator=generator).to(dtype)


def detection(folder, labels, seed):
    return make_box_head(folder / f"{seed}.safetensors", WIDTH, labels, GRID, seed=seed)


def linear(folder, count, seed, **options):
    labels = [f"label {n}" for n in range(count)]
    return make_label_head(folder / f"{seed}.safetensors", WIDTH, labels, seed=seed, **options)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_states_of_16_bits_are_read_in_float32(pooling, tmp_path):
    """The formulas are those of `tests/parity`."""
    head = read_head(linear(tmp_path, 101, 7, pooling=pooling), WIDTH)
    places = torch.tensor([2] * 4 + [9] * 5)
    low = HeadRequest(head, hidden(9, 2, torch.bfloat16), places=places)
    for other in (low.hidden.float(), *([low.hidden[-1:]] if pooling == "last" else ())):
        seen = {} if len(other) > 1 else {"places": None}
        one, two = run_heads([low, replace(low, hidden=other, **seen)])
        np.testing.assert_allclose(one.logits, two.logits, rtol=1e-5, atol=1e-5)


def test_a_task_that_cannot_be_answered(tmp_path):
    """The engine asks before a request is queued; what comes here all the same hits itself only."""
    head = read_head(detection(tmp_path, ["a"], 1), WIDTH)
    mean = read_head(linear(tmp_path, 3, 2, pooling="visual_mean"), WIDTH)
    assert "send an image" in mean.misfit(0, 0)
    assert "11 visual tokens" in head.misfit(CELLS - 1, 1)
    assert "2 images" in head.misfit(CELLS, 2)
    assert head.misfit(2 * CELLS, 2) is None
    assert "3 × 4 cells" in head.misfit(2 * CELLS, 1)
    good = HeadRequest(head, hidden(CELLS, 1), [(50, 60)])
    wrong = HeadRequest(mean, hidden(0, 1)), HeadRequest(head, hidden(CELLS - 1, 1), [(50, 60)])
    found, *errors, other = run_heads([good, *wrong, HeadRequest(mean, hidden(4, 1))])
    assert all(isinstance(error, ServeError) for error in errors)
    np.testing.assert_array_equal(found.logits, run_heads([good])[0].logits)
    assert other.kind == "classification"


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.0])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_hidden_states_that_are_not_finite_hit_only_their_own_request(value, pooling, tmp_path):
    """A hidden state of zeros is what a norm leaves of an overflow."""
    places = torch.tensor([2] * 4 + [9] * 5)
    head = read_head(linear(tmp_path, 3, 7, pooling=pooling), WIDTH)
    boxes = read_head(detection(tmp_path, ["a"], 1), WIDTH)
    good = HeadRequest(head, hidden(9, 2), places=places)
    find = HeadRequest(boxes, hidden(CELLS, 1), [(50, 60)])
    states = hidden(9, 3)
    if value == 0.0:
        states[:] = 0.0
    else:
        states[[2, 8], 5] = value
    bad = HeadRequest(head, states, places=places)
    broken_boxes = hidden(CELLS, 1)
    broken_boxes[5] = value
    blind = HeadRequest(boxes, broken_boxes, [(50, 60)], 0.01)
    results = run_heads([find, bad, good, blind])
    assert all(isinstance(results[number], NonFiniteError) for number in (1, 3))
    healthy = replace(bad, hidden=hidden(9, 3))
    expected = run_heads([find, healthy, good, replace(blind, hidden=hidden(CELLS, 1))])
    for number in (0, 2):
        assert isinstance(results[number], HeadResult)
        np.testing.assert_array_equal(results[number].logits, expected[number].logits)


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [("interpret", KeyError("unlucky"), "'unlucky'"),
     ("inputs", ZeroDivisionError("too short"), "too short"),
     ("inputs", torch.ones(1, 3), r"its inputs are [1, 3], of width 20 expected"),
     ("inputs", torch.ones(WIDTH), r"its inputs are [20], of width 20 expected")],
)  # fmt: skip
def test_a_head_that_fails_hits_only_itself(tmp_path, method, answer, said):
    def fail(*_, **__):
        if isinstance(answer, Exception):
            raise answer
        return answer

    head = read_head(linear(tmp_path, 3, 2), WIDTH)
    made = {one.name: getattr(head, one.name) for one in fields(head)}
    worse = type("Worse", (type(head),), {method: fail})(**made)
    results = run_heads([HeadRequest(worse, hidden(3, 8)), HeadRequest(head, hidden(3, 8))])
    assert f"classification head failed: {said}" in str(results[0])
    assert isinstance(results[1], HeadResult)
