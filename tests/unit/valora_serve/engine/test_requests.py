"""Too little memory for all requests and adapters at once: every request is still answered."""

import pytest

from tests.support.cases import others_slow
from tests.support.engine_reference import assert_empty, check_answers, make_engine, question, run
from valora_serve.orchestrator.registry import POLICIES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("policy", others_slow(["cost", "merge_only", "slora"], POLICIES))
def test_more_adapters_than_fit_and_a_base_request(base, adapters, reference, policy):
    engine = make_engine(base, adapters, policy=policy, slots=2, max_adapters=2, overlap=True)
    requests = [question(f"{name}{n}", name) for n in range(2) for name in "abcdef"]
    requests.insert(5, question("base"))
    check_answers(run(engine, requests, together=8), reference, *requests)
    assert_empty(engine)


@pytest.mark.parametrize(
    "policy", others_slow(["cost", "merge_only"], ["cost", "merge_only", "valora", "slora"])
)
def test_one_place_for_adapters(base, adapters, reference, policy):
    """The merged adapter is pinned, and must still make room for another."""
    engine = make_engine(base, adapters, policy=policy, slots=1, max_adapters=1)
    for name in "aba":
        requests = [question(f"{name}{n}", name, tokens=12) for n in range(4)]
        check_answers(run(engine, requests), reference, *requests)
    requests = [question("x", "c"), question("y"), question("z", "d")]
    check_answers(run(engine, requests), reference, *requests)
    assert_empty(engine)
