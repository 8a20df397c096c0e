"""Shares under overload: kept within the bound of the Virtual Token Counter, and never wasted."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.valora_serve.orchestrator.test_policies import (
    Machine,
    World,
    explained,
    policy_of,
)
from tests.support.random_tests import examples
from valora_serve.errors import SettingsError
from valora_serve.orchestrator.admission import ANSWER_WEIGHT, PROMPT_WEIGHT, FairShares
from valora_serve.orchestrator.decision import PolicySettings, RequestView, window

KEEPS = ["cost", "valora", "unmerge_only", "slora", "by_name"]
"""Policies that leave no waiting request out."""


def machine_of(name, asked, **settings):
    """Have clients ask at once: (client, adapter, prompt tokens, tokens to generate) each."""
    clients, *rows = zip(*asked, strict=True)
    requests = [(adapter, 0.0, *sizes, None) for adapter, *sizes in zip(*rows, strict=True)]
    world = World(requests, (4, 64, 10_000, 8, 64), 1, clients=clients)
    return Machine(policy_of(name, **settings), world, 20_000)


def served(machine, asked):
    """Tokens that each client was served, weighted, from what is left of its requests."""
    found = Counter()
    for one, (client, _, prompt, output) in zip(machine.requests, asked, strict=True):
        done = prompt - one.prompt_left
        answer = output - one.output_left if done == prompt else 0
        found[client] += PROMPT_WEIGHT * done + ANSWER_WEIGHT * answer
    return found


@st.composite
def backlogs(draw):
    """Clients with shares and work of different kinds, which all of them bring at once."""
    clients = [f"c{i}" for i in range(draw(st.integers(2, 4)))]
    shares = {c: draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])) for c in clients}
    kinds = {c: (draw(st.integers(1, 30)), draw(st.integers(1, 20))) for c in clients}
    return shares, kinds


@pytest.mark.parametrize("name", KEEPS)
@examples(5)
@given(backlog=backlogs(), same=st.booleans())
def test_shares_are_kept_while_all_have_work(name, backlog, same):
    shares, kinds = backlog
    asked = [(c, f"a{0 if same else n}", *own) for n, (c, own) in enumerate(kinds.items())] * 40
    machine = machine_of(name, asked, fair=True, shares=shares, patience=0.05)
    most = max(prompt for prompt, _ in kinds.values()), max(o for _, o in kinds.values())
    # 2 max(w_p L_input, w_q M) of the paper, M being the tokens of a whole batch.
    bound = 2 * max(PROMPT_WEIGHT * most[0], ANSWER_WEIGHT * 4 * sum(most)) / min(shares.values())
    levels, write = [], machine.trace.write

    def watch(view, decision):
        write(view, decision)
        if set(kinds) <= {r.client for r in view.waiting}:
            got = served(machine, asked)
            levels.append([got[client] / shares[client] for client in kinds])
            assert max(levels[-1]) - min(levels[-1]) <= bound

    machine.trace.write = watch
    with explained(machine):
        machine.run()
        assert any(map(any, levels)) and not np.isnan(machine.end).any()  # nobody starves


@pytest.mark.parametrize(
    "name", [*KEEPS, "dlora", "merge_only", "algorithm1", "algorithm1_published"]
)
@examples(10)
@given(kinds=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=12))
def test_one_client_alone_gets_what_it_would_get_anyway(name, kinds):
    ends = []
    for share in (0.01, 5.0):
        asked = [("only", "a1", *sizes) for sizes in kinds]
        machine = machine_of(name, asked, fair=True, shares={"only": share})
        machine.run()
        ends.append((machine.end.tolist(), machine.steps))
    assert ends[0] == ends[1]


def test_what_others_leave_is_used():
    """A client with a small share has the machine for itself as soon as nobody else asks."""
    asked = [("small", "a0", 4, 6)] * 30 + [("large", "a1", 4, 6)] * 3
    machine = machine_of("slora", asked, fair=True, shares={"large": 1000.0})
    alone = machine_of("slora", asked)
    machine.run()
    alone.run()
    assert machine.steps <= alone.steps + 2


def view(identity, client, prompt=10):
    return RequestView(identity, "a", 8, 0.0, prompt, client=client)


def compute(shares, request, prompt=0, answer=0):
    """Admit and compute a part of a request as an engine does."""
    shares.admitted([request])
    request.prompt_left -= prompt
    request.kv_tokens += prompt
    if prompt:
        shares.order([request], [], 10)
    request.kv_tokens += answer
    shares.order([request], [], 10)


def test_counters_by_hand():
    shares = FairShares({"b": 2.0})
    a, b = view("1", "a"), view("2", "b", prompt=9)
    assert shares.order([], [a, b], 10) == [a, b]
    compute(shares, a, prompt=10, answer=3)
    compute(shares, b, prompt=9, answer=1)
    assert shares.counters == {"a": 10 + 2 * 3, "b": (9 + 2 * 1) / 2}
    b.kv_tokens += 4
    shares.finished("2")  # its last tokens are charged
    assert shares.counters["b"] == (9 + 2 * 5) / 2
    cached = view("3", "b")
    shares.admitted([cached])
    cached.prompt_left, cached.kv_tokens = 0, 74  # 64 tokens came from the prefix cache
    shares.finished("3")
    assert shares.counters["b"] == (9 + 2 * 5) / 2 + 10 / 2


def test_whoever_comes_back_gains_nothing_by_having_been_away():
    shares = FairShares({})
    first, second = view("1", "busy"), view("2", "busy")
    shares.order([], [first, second], 10)
    compute(shares, first, prompt=10, answer=45)
    late = view("3", "late")
    shares.order([first], [second, late], 10)
    assert shares.counters == {"busy": 100.0, "late": 100.0}


def test_the_order_takes_turns_by_share():
    shares = FairShares({"b": 2.0})
    queue = [view(f"a{i}", "a") for i in range(4)] + [view(f"b{i}", "b") for i in range(4)]
    ordered = [r.id for r in shares.order([], queue, 100)]
    assert ordered == ["a0", "b0", "b1", "a1", "b2", "b3", "a2", "a3"]
    assert sorted(r.id for r in shares.order([], queue, 2)) == sorted(ordered)


def test_a_long_queue_hides_no_client():
    queue = [view(f"f{i}", "flood") for i in range(900)]
    queue += [view(f"q{i}", "quiet") for i in range(3)]
    queue += [view(f"g{i}", "flood") for i in range(900)]
    shown = [r.id for r in window(queue, 64)]
    assert {"q0", "q1", "q2", "f0", "g899"} <= set(shown)
    assert len(shown) <= 64


@pytest.mark.parametrize(
    "share", [0.0, -1.0, float("nan"), float("inf"), 1e-16, 9e-7, 1.1e6, 1e300]
)
def test_shares_that_are_refused(share):
    """Whoever waited beside one of 1e-16 was lifted to 1e18 tokens, where its own did not count."""
    with pytest.raises(SettingsError, match=r"at least 1e-06 and at most 1e\+06 for gold"):
        PolicySettings(shares={"gold": share})


def test_others_take_turns_after_one_with_the_smallest_share():
    shares = FairShares(PolicySettings(shares={"small": 1e-6}).shares)
    small = view("small", "small", prompt=10**6)
    shares.order([], [small], 10)
    compute(shares, small, prompt=10**6, answer=10**6)
    queues = {
        client: [view(f"{client}{i}", client, prompt=5) for i in range(60)] for client in "ab"
    }
    waiting = [request for queue in queues.values() for request in queue]
    shares.order([small], waiting, 1)
    shares.finished("small")
    served = []
    for _ in range(50):
        request = shares.order([], waiting, 1)[0]
        waiting.remove(request)
        shares.admitted([request])
        request.prompt_left, request.kv_tokens = 0, 6
        shares.finished(request.id)
        served.append(request.client)
    assert served == ["a", "b"] * 25
