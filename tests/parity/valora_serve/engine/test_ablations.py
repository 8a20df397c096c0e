"""Engines with one part replaced by what other systems do: the answers stay PEFT's."""

import pytest
import torch

import tests.bench.valora_kernels.operators  # noqa: F401 - registers those to compare with
from tests.parity.valora_serve.engine.test_engine import mixed
from tests.support.cases import crossed
from tests.support.engine_reference import (
    add_requests,
    check_answers,
    collect,
    make_engine,
    question,
    run,
)
from valora_kernels.operators import OPERATORS
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import RequestError
from valora_serve.orchestrator.decision import PolicySettings
from valora_serve.types import Mode

OTHERS = sorted(set(OPERATORS) - {"atmm"})
REQUESTS = mixed([None, "attention", "mlp", "everything", "attention"] * 2, tokens=5)


@pytest.mark.parametrize(("name", "graphs"), crossed(OTHERS, [False, True]))
def test_operators(base, adapters, reference, name, graphs):
    engine = make_engine(
        base, adapters, operator=name, policy="algorithm1", graphs=graphs, prompt_graphs=graphs
    )
    if graphs:
        engine.warm_up()
    check_answers(run(engine, REQUESTS, together=5), reference, *REQUESTS)


@pytest.mark.parametrize("policy", ["valora", "algorithm1", "cost"])
def test_without_mixture_mode(base, adapters, reference, policy):
    settings = PolicySettings(mixture=False, theta=0.0)
    engine = make_engine(base, adapters, policy=policy, policy_settings=settings)
    modes, found = set(), {}
    add_requests(engine, *REQUESTS)
    while engine.busy:
        outputs = engine.step()
        modes |= {one.mode for one in outputs}
        collect(outputs, found)
    check_answers(found, reference, *REQUESTS)
    assert Mode.MIXTURE not in modes and Mode.UNMERGED in modes


def test_merging_by_matrix_gives_the_same_weights(base, adapters, reference):
    swift = make_engine(base, adapters, policy="merge_only")
    slow = make_engine(base, adapters, policy="merge_only", switch="by_matrix")
    for engine in (swift, slow):
        check_answers(run(engine, REQUESTS), reference, *REQUESTS)
        assert engine.merge_state.switches > 2
    for key in [*sorted(swift.adapters.resident)[:2], None]:
        for engine in (swift, slow):
            engine.merge_state.switch(Mode.MERGED if key else Mode.UNMERGED, key)
        for one, other in zip(swift.lmm.linears.merged, slow.lmm.linears.merged, strict=True):
            assert torch.equal(one.live, other.live)


def test_adapters_in_pages_of_their_own(base, adapters, reference):
    engine = make_engine(base, adapters, pages=96, adapter_share=0.25, policy="valora")
    check_answers(run(engine, REQUESTS, together=5), reference, *REQUESTS)
    held = engine.stats().pages_adapters
    assert 0 < held <= 24
    # All pages of keys and values can be taken without an adapter giving any of its own back.
    assert engine.pool.free == 72 - 1
    assert engine.pool.take(engine.pool.free + 1, 1) is None
    assert engine.stats().pages_adapters == held


def test_pages_that_hold_no_adapter(base, adapters):
    engine = make_engine(base, adapters, pages=64, block_size=4, adapter_share=0.01)
    prepared = engine.prepare(question("x", "everything"))
    with pytest.raises(
        RequestError, match=r"adapter everything and context need .* 1 are kept.*adapter_share"
    ):
        engine.add(prepared)


def test_operators_need_a_whole_model():
    with pytest.raises(ValueError, match=r"tensor_parallel: .*use operator=atmm"):
        EngineSettings(operator="padded", tensor_parallel=2)
