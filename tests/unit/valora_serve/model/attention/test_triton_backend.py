"""The Triton backend against dense attention in fp64, on the CPU in Triton's interpreter."""

import pytest
import torch

from tests.support.attention_cases import Case
from tests.support.cases import others_slow
from tests.support.engine_reference import make_engine, run, tokens
from tests.support.lora_cases import DEVICE
from valora_serve.model.attention.triton_backend import Tiling, TritonBackend
from valora_serve.types import Request, SamplingParams

pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu runs it on a GPU"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}

DECODES = [(0, 1), (64, 1), (65, 1), (150, 1)]
MIXED = [(70, 1), (0, 75), (61, 7), (0, 1)]


def check(found, case, layer=0, scale=0.3):
    expected = case.expected(layer, scale)
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


FORMS = [
    (DECODES, 64, (2, 2), 16, torch.float16), (MIXED, 96, (4, 2), 8, torch.float32),
    (DECODES, 128, (7, 1), 32, torch.float16), (MIXED, 64, (7, 1), 32, torch.float16),
    (DECODES, 80, (6, 2), 5, torch.float32), (MIXED, 24, (20, 1), 1, torch.float32),
    (DECODES, 256, (2, 1), 16, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shares", "width", "heads", "block_size", "dtype"), others_slow(FORMS[1:6:2], FORMS)
)
def test_against_the_formula(shares, width, heads, block_size, dtype):
    case = Case(
        shares, heads=heads, block_size=block_size, width=width, dtype=dtype, seed=width, spare=2
    )
    check(case.run("triton", 1, 0.3), case, layer=1)


@pytest.mark.parametrize("splits", others_slow([8], [2, 8]))
def test_sequences_are_split(splits, monkeypatch):
    """Shorter ones than splits, and those that end at the border of one, too."""
    monkeypatch.setattr(Tiling, "splits", lambda _, sequences: splits)
    case = Case(
        [(0, 1), (63, 1), (64, 1), (65, 1), (129, 1), (320, 1)], heads=(4, 2), block_size=16
    )
    check(case.run("triton", 0, 0.3), case)


@pytest.mark.parametrize(
    ("kind", "heads", "sizes", "steps"),
    [
        ("decode_plan", (4, 2), (3,),
         [[(9, 1), (0, 1), (70, 1)], [(200, 1), (3, 1), (4, 1)], [(0, 1)] * 3]),
        ("mixed_plan", (6, 2), (4, 48),
         [[(9, 1), (0, 40)], [(0, 1)], [(30, 30), (3, 1), (0, 2), (64, 9)], [(0, 48)],
          [(5, 1)] * 4]),
    ],
)  # fmt: skip
def test_steps_in_fixed_buffers(kind, heads, sizes, steps):
    """One plan follows all of them, on one cache."""
    first = Case(max(steps, key=lambda shares: sum(map(sum, shares))), heads=heads)
    plan = getattr(TritonBackend(first.cache), kind)(*sizes)
    buffer = plan._buffer.data_ptr()
    for seed, shares in enumerate(steps):
        case = Case(shares, heads=heads, seed=seed, after=first)
        plan.update(case.rows)
        used = int(case.rows.starts[-1])
        found = case.run_plan(plan, 0, 0.3, padding=sizes[-1] - used)
        check(found[:used], case)
        assert plan._buffer.data_ptr() == buffer
        held = case.cache.layers[0][0].isfinite().all(-1).all(-1).nonzero().tolist()
        assert {*map(tuple, held)} == case.written()  # what pads a step writes nothing


def test_an_engine_answers_alike(random_llava):
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    asked = [Request(str(n), text="Where is it? " * n, sampling=sampling) for n in (1, 2, 3)]
    answers = []
    for options in ({"attention": "torch"}, {"attention": "triton", "prompt_graphs": True}):
        engine = make_engine(str(random_llava), chunk=24, max_tokens=64, policy="slora", **options)
        engine.warm_up()
        answers.append(tokens(run(engine, asked, together=2)))
        engine.close()
    assert answers[0] == answers[1]
    assert all(map(len, answers[0].values()))
