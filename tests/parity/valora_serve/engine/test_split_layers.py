"""Adapters on every linear layer, with two processes against one, for several architectures.

In a file of its own, as a process belongs to one group at a time.
"""

from dataclasses import replace

import pytest

from tests.parity.valora_serve.engine.test_engine import Forced
from tests.parity.valora_serve.engine.test_tensor_parallel import MODES, assert_equal
from tests.parity.valora_serve.model.test_lmm import FAMILIES, TARGETS, requests_of
from tests.support.engine_reference import make_engine, run
from tests.support.forked import forked_workers
from tests.support.serve_helpers import LANGUAGE, make_adapters
from valora_serve.types import SamplingParams

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "how"),
    [("qwen2_5_vl", "slora"), ("qwen3_vl", "replicate_a"), ("qwen2", "slora"),
     ("mistral", "replicate_a")],
)  # fmt: skip
def test_adapters_on_every_linear_of_other_architectures(family, how, tmp_path):
    base = str(FAMILIES[family](tmp_path / family, seed=3))
    part = rf"{LANGUAGE}|model\.layers.*\.(q|o)_proj"
    kinds = {"all": (1, 3, 6, TARGETS[family]), "part": (2, 4, 9, part)}
    adapters = make_adapters(tmp_path, base, 0.3, **kinds)
    asked = [
        replace(one, sampling=SamplingParams(max_tokens=3, temperature=0.0, logprobs=20))
        for one in requests_of(family, ["all", None, "part"])
    ]
    one = make_engine(base, adapters)
    with forked_workers():
        two = make_engine(base, adapters, fresh=True, tensor_parallel=2, lora_parallel=how)
    try:
        for choose in MODES.values():
            found = []
            for engine in (one, two):
                engine.policy = Forced(choose, engine)
                found.append(run(engine, asked))
            assert_equal(found[1], found[0])
    finally:
        two.close()
