"""Too little memory for all requests and adapters at once: every request is still answered."""

from pathlib import Path

import pytest

from tests.support.engine_reference import (
    Reference,
    assert_empty,
    check_answers,
    make_engine,
    question,
    run,
)
from valora_serve.orchestrator.registry import POLICIES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("policy", POLICIES)
def test_few_pages(base: str, adapters: dict[str, Path], reference: Reference, policy: str) -> None:
    """All requests together need far more pages than there are."""
    whole = make_engine(base, {"a": adapters["a"], "b": adapters["b"]})
    needed = [whole.adapters.pages(key) for key in whole.registry.known()]
    engine = make_engine(
        base, {"a": adapters["a"], "b": adapters["b"]}, policy=policy, overlap=True,
        pages=max(needed) + 7, block_size=16,
    )  # fmt: skip
    requests = [
        question(f"{n}", [None, "a", "b"][n % 3], tokens=[5, 40, 60][n % 3]) for n in range(6)
    ]
    check_answers(run(engine, requests), reference, *requests)
    assert_empty(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_adapters_than_fit_and_a_base_request(
    base: str, adapters: dict[str, Path], reference: Reference, policy: str
) -> None:
    engine = make_engine(base, adapters, policy=policy, slots=2, max_adapters=2, overlap=True)
    requests = [question(f"{name}{n}", name) for n in range(2) for name in "abcdef"]
    requests.insert(5, question("base"))
    check_answers(run(engine, requests, together=8), reference, *requests)
    assert_empty(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_place_for_adapters(
    base: str, adapters: dict[str, Path], reference: Reference, policy: str
) -> None:
    """The merged adapter is pinned, and must still make room for another."""
    engine = make_engine(base, adapters, policy=policy, slots=1, max_adapters=1)
    for name in "aba":
        requests = [question(f"{name}{n}", name, tokens=12) for n in range(4)]
        check_answers(run(engine, requests), reference, *requests)
    requests = [question("x", "c"), question("y"), question("z", "d")]
    check_answers(run(engine, requests), reference, *requests)
    assert_empty(engine)


def test_pages_for_one_adapter_at_a_time(
    base: str, adapters: dict[str, Path], reference: Reference
) -> None:
    whole = make_engine(base, adapters)
    most = max(whole.adapters.pages(key) for key in whole.registry.known())
    engine = make_engine(base, adapters, pages=most + 4, policy="valora")
    requests = [question(f"{name}{n}", name, tokens=12) for name in "fe" for n in range(3)]
    for one in requests:
        check_answers(run(engine, [one]), reference, one)
    check_answers(run(engine, requests), reference, *requests)
    assert_empty(engine)
