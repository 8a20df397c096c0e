"""Decisions of every policy in situations that can be worked out by hand."""

import io
import math
from dataclasses import replace
from functools import partial

import pytest

from tests.bench.valora_serve.sim_slora import LastComeFirstServed
from tests.support import policy_views
from tests.support.policy_views import COSTS, LIMITS, policy, taken, view, waiting
from valora_serve.orchestrator.cost_model import H200_7B, StepShape
from valora_serve.orchestrator.decision import DecisionTrace, PolicySettings, window
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.types import Mode

MERGED, MIXTURE, UNMERGED = Mode.MERGED, Mode.MIXTURE, Mode.UNMERGED
running = policy_views.running
recent = partial(running, served=0.99)  # computed 10 ms ago
VIEWED = {"now", "merged", "resident", "arrived"}


def decide(name, run=(), wait=(), most=None, costs=COSTS, **more):
    """Decide once with a new policy; `more` are limits, facts of the view and settings."""
    limits = {k: more.pop(k) for k in [*more] if hasattr(LIMITS, k)} | (
        {"max_requests": most} if most else {}
    )
    seen = {k: more.pop(k) for k in [*more] if k in VIEWED}
    chooser = make_policy(name, costs, PolicySettings(**more))
    return chooser.decide(view(run, wait, limits=replace(LIMITS, **limits), **seen))


def later(*given, **more):
    """A decision that is made when its test runs."""
    return partial(decide, *given, **more)


def several(make, count, *given, first=0, **more):
    return [make(first + i, *given, **more) for i in range(count)]


def sized(pages, one):
    one.pages = pages
    return one


A5, OTHERS = several(recent, 5, "a"), [running(9, "b"), running(10, None)]
LONG = several(running, 5, "a", left=200)
PUBLISHED = partial(later, "algorithm1_published", most=8, theta=0.5)
PRINTED = partial(later, "algorithm1", most=8, theta=0.5)
THREE = [waiting(i, "ab"[i == 2], arrival=0.9) for i in range(3)]  # two of three are of a
B4 = several(recent, 4, "b", first=20)
COST, VALORA, SLORA = (partial(later, name) for name in ("cost", "valora", "slora"))
EARLY = partial(later, "slora", early_abort=True, slo=6.0, now=10.0)
DEAR = replace(COSTS, decode_seconds=(*COSTS.decode_seconds[:-1], 0.1e-3))
CHEAP = replace(DEAR, prefill_seconds=(*COSTS.prefill_seconds[:-2], 4e-6, 0.0))
STARVED = [waiting(9, "x"), *(sized(10, waiting(i, "a", arrival=50.0)) for i in range(4))]
CASES = {
    # Algorithm 1, as printed: MaxBS, not the number of requests, is what shares refer to.
    "merged for more than half": (
        PRINTED([*several(recent, 5, "a"), recent(9, "b")]),
        {"mode": MERGED, "merged": "a", "batch": {f"r{i}" for i in range(5)}}),
    "no more than half": (
        PRINTED([*several(recent, 4, "a"), recent(9, "b")]), {"mode": UNMERGED, "count": 5}),
    "mixture for those that starve": (
        PRINTED([*several(recent, 5, "a"), running(9, "b", served=-1.0)]),
        {"mode": MIXTURE, "merged": "a", "count": 6, "reason": "starving: 1"}),
    "unmerged where more than half starve": (
        PRINTED([running(i, "ab"[i % 2], served=-1.0) for i in range(5)]
                + several(recent, 3, "a", first=10)),
        {"mode": UNMERGED, "merged": None, "count": 8}),
    "the step and the switch count as waiting": (PRINTED(A5, theta=1e-6), {"mode": UNMERGED}),
    "not on the device": (
        PRINTED([recent(20, "a")], several(waiting, 6, "z")), {"mode": UNMERGED, "loads": ("z",)}),
    # The published scheduler looks at waiting requests only.
    "running ones go on, that of b waits": (
        PUBLISHED(B4, THREE),
        {"mode": MIXTURE, "merged": "a", "batch": {"r20", "r21", "r22", "r23", "w0", "w1"}}),
    "a starving one joins": (
        PUBLISHED(B4, [*THREE[:2], waiting(2, "b")]), {"merged": "a", "count": 7}),
    "all starve": (PUBLISHED(B4, several(waiting, 3, "a")), {"mode": UNMERGED}),
    "one of two is no more than half": (PUBLISHED(B4, THREE[1:]), {"mode": UNMERGED}),
    "nobody may join: nothing is switched": (
        PUBLISHED(B4, THREE, most=4), {"batch": {"r20", "r21", "r22", "r23"}}),
    "it stays merged": (PUBLISHED([recent(20, "a")], merged="a"), {"mode": MERGED, "merged": "a"}),
    # The baselines.
    "merge_only serves the adapter of the oldest": (
        later("merge_only", [running(0, "a", arrival=0.5), running(1, "b", arrival=0.2)],
               [waiting(1, "b", arrival=0.9)], merged="a"),
        {"mode": MERGED, "merged": "b", "batch": {"r1", "w1"}}),
    **{f"nothing is preempted for a younger request {at}": (
        later("merge_only", [running(0, "b", arrival=at)], [waiting(1, "a", arrival=0.5)], most=1),
        {"preempt": gone, "batch": batch})
       for at, gone, batch in ((0.1, (), {"r0"}), (0.9, ("r0",), {"w1"}))},
    **{f"{name} where the oldest does not fit": (
        later(name, [], [sized(40, waiting(1, None)), sized(1, waiting(2, None))], free_pages=20),
        {"batch": batch}) for name, batch in (("slora", set()), ("unmerge_only", {"w2"}))},
    # Filling the batch.
    **{f"clustering prefers adapters in the batch {count}": (
        SLORA([running(0, "a"), running(1, "b")],
              [waiting(i, "_cab"[i], arrival=i / 10) for i in (1, 2, 3)], most=4, clusters=count),
        {"batch": {"r0", "r1", *batch}})
       for count, batch in ((0, {"w1", "w2"}), (2, {"w2", "w3"}))},
    "the youngest is preempted if pages run out": (
        SLORA([running(i, "a", arrival=i / 10, pages=1, held=6) for i in range(3)],
              [waiting(1, "a", arrival=0.9)], free_pages=1),
        {"preempt": ("r2",), "batch": {"r0", "r1"}}),
    "adapters are loaded oldest first as memory allows": (
        SLORA([], [waiting(i, name, arrival=i / 10) for i, name in enumerate("axyz")],
              resident="a", free_pages=3 + 16 + 2 * 16 + 1), {"loads": ("x", "y")}),
    "younger ones do not take a starved one's pages": (
        later("unmerge_only", [running(0, "a")], STARVED, now=50.1, resident="a", free_pages=30,
               patience=10.0), {"loads": ("x",), "within": {"r0", "w0"}}),
    "where nothing runs, the last page": (
        SLORA([], [sized(10, waiting(0, None))], free_pages=10), {"batch": {"w0"}}),
    # Valora.
    "the adapter of most requests is merged": (
        VALORA(several(running, 5, "a")), {"mode": MERGED, "merged": "a", "count": 5}),
    "running requests of others are never paused": (
        VALORA(LONG + OTHERS), {"mode": MIXTURE, "merged": "a", "count": 7}),
    "unmerged where second terms cost more": (
        VALORA(LONG + OTHERS, costs=DEAR), {"mode": UNMERGED, "merged": None, "count": 7}),
    "long prompts of the merged one have no term": (
        VALORA(LONG + OTHERS, several(waiting, 4, "a", first=20, prompt=4000), costs=CHEAP),
        {"mode": MIXTURE, "merged": "a"}),
    "valora unmerges where more than half starve": (
        VALORA(several(running, 4, "a"), [waiting(i, "bcdef"[i]) for i in range(5)], now=5.0,
               merged="a", hysteresis=0.4), {"mode": UNMERGED, "merged": None, "count": 9}),
    "all starve on the merged adapter: merged mode": (
        VALORA(several(running, 4, "a"), now=30.0, merged="a", theta=0.01),
        {"mode": MERGED, "count": 4}),
    "no merge for a request about to end": (VALORA([running(0, "a", left=1)]), {"merged": None}),
    "a merge for a long one": (VALORA([running(0, "a", left=100)]), {"merged": "a"}),
    "hysteresis: 6 of 11 do not take over": (
        VALORA(several(running, 6, "a") + several(running, 5, "b", first=10), merged="b",
               hysteresis=0.1), {"merged": {None, "b"}}),
    "hysteresis: 5 of 10 stay": (
        VALORA(several(running, 5, "a") + [running(10 + i, "bcdef"[i]) for i in range(5)],
               merged="a", hysteresis=0.1), {"merged": "a"}),
    **{f"ties go to the merged {name}": (
        VALORA([running(i, "a" if i % 2 else "b") for i in range(8)], merged=name, hysteresis=0.2),
        {"merged": name}) for name in "ab"},
    "an adapter that nobody asks for does not stay": (
        VALORA([], [waiting(1, "b")], merged="a", hysteresis=0.6, theta=9.0), {"batch": {"w1"}}),
    # Cost.
    "a prompt where as many decode as fit": (
        COST([*several(running, 4, "a"), replace(running(9, "b"), prompt_left=9)], max_tokens=4),
        {"batch": {"r0", "r1", "r2", "r3"}}),
    "cost merges where the next steps pay for it": (
        COST(several(running, 4, "a", left=100)), {"merged": "a"}),
    "and does not where they do not": (COST(several(running, 4, "a", left=1)), {"merged": None}),
    "the shortest go first": (
        COST([], [waiting(1, "a", output=400), waiting(2, "a", output=5),
                  waiting(3, "b", output=90)], now=0.1, most=2), {"batch": {"w2", "w3"}}),
    "but for who has waited for long": (
        COST([], [waiting(1, "a", output=400), waiting(2, "a", arrival=29.9, output=5)], now=30.0,
             most=1, patience=20.0), {"batch": {"w1"}}),
    **{f"urgent ones before short ones, when it is time {now}": (
        COST([], [waiting(1, "a", output=100, latency_limit=1.0), waiting(2, "a", output=5)],
             now=now, most=1), {"batch": {first}}) for now, first in ((0.4, "w1"), (0.0, "w2"))},
    # Early abort.
    "who is too late is aborted": (
        EARLY([], [waiting(1, "a"), waiting(2, "a", arrival=9.0)]),
        {"abort": {"w1": "6 s"}, "batch": {"w2"}}),
    "nothing is loaded for the aborted": (
        EARLY([], [waiting(1, "x"), waiting(2, "y", arrival=9.0)], resident=""),
        {"abort": {"w1": ""}, "loads": ("y",)}),
    "nor do they keep pages, although they have starved": (
        EARLY([], [waiting(1, "x"), waiting(2, "a", arrival=9.0)], resident="a", free_pages=20,
              patience=5.0), {"batch": {"w2"}, "loads": (), "abort": {"w1": ""}}),
    "alone": (EARLY([], [waiting(1, "x")]), {"batch": set(), "loads": (), "abort": {"w1": ""}}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_decisions(case):
    make, wanted = CASES[case]
    decision = make()
    batch, merged = taken(decision), wanted.get("merged", decision.merged)
    assert decision.mode is wanted.get("mode", decision.mode)
    assert decision.merged in (merged if isinstance(merged, set) else {merged})
    assert batch == wanted.get("batch", batch) and batch <= wanted.get("within", batch)
    assert len(batch) == wanted.get("count", len(batch))
    assert decision.preempt == wanted.get("preempt", decision.preempt)
    assert decision.prefetch == wanted.get("loads", decision.prefetch)
    assert wanted.get("reason", "") in decision.reason
    assert dict(decision.abort).keys() == wanted.get("abort", {}).keys()
    assert all(wanted["abort"][key] in why for key, why in decision.abort)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("free", "admitted"), [(12, set()), (13, {"w7"}), (27, {"w7", "w8"})])
def test_admission_leaves_a_page_for_every_running_request(name, free, admitted):
    """w7 takes 10 pages beside three that grow, w8 10 beside four."""
    wait = [sized(10, waiting(7, "a", arrival=0.1)), sized(10, waiting(8, "a", arrival=0.2))]
    batch = taken(decide(name, several(running, 3, "a"), wait, now=0.3, free_pages=free))
    assert {key for key in batch if key.startswith("w")} <= admitted
    assert name not in ("slora", "unmerge_only") or batch == {"r0", "r1", "r2"} | admitted


@pytest.mark.parametrize("name", POLICIES)
def test_running_requests_continue_while_pages_are_reserved_for_a_starved_one(name):
    """It waits for its adapter and for more pages than are free; the next asks the bare model."""
    run = [running(n, "a", arrival=0.5 + n / 10, served=0.9) for n in range(2)]
    decision = decide(
        name, run, [waiting(1, "z", arrival=-1000.0), waiting(2, None)], free_pages=10
    )
    assert taken(decision) >= {"r0", "r1"} - set(decision.preempt)
    assert decision.batch or decision.preempt


def test_adapters_beyond_what_a_step_takes_take_turns():
    run = [running(i, "abcde"[i], arrival=0.0) for i in range(5)]
    chooser, seen = policy("unmerge_only"), set()
    for step in range(3):
        decision = chooser.decide(view(run, now=1.0 + step, limits=replace(LIMITS, max_adapters=2)))
        assert len(decision.batch) == 2 and decision.until == 0
        seen |= taken(decision)
    assert seen == {f"r{i}" for i in range(5)}
    # Rows of one decode in every step; the prompt of another is computed all the same.
    prompt, chooser = running(9, "b", served=0.0), policy("unmerge_only")
    prompt.prompt_left, limits = 100, replace(LIMITS, max_adapters=1)
    decoding = running(1, "a", served=0.0)
    found = [chooser.decide(view([decoding, prompt], now=n, limits=limits)) for n in (1.0, 2.0)]
    assert sorted(sorted(taken(one)) for one in found) == [["r1"], ["r9"]]


def test_dlora_pauses_the_others_while_merged():
    run, chooser = several(running, 19, "a"), policy("dlora")
    assert chooser.decide(view(run)).merged == "a"  # all are its: enters
    run.append(running(50, "b"))
    limits = replace(LIMITS, max_requests=32)
    decision = chooser.decide(view(run, merged="a", limits=limits))
    assert decision.mode is MERGED and "r50" not in taken(decision)
    run += several(running, 15, "b", first=60)
    decision = chooser.decide(view(run, merged="a", limits=replace(limits, max_requests=64)))
    assert decision.mode is UNMERGED and len(decision.batch) == 35


def test_valora_keeps_others_back_up_to_theta_only():
    run, other = several(running, 5, "a"), waiting(1, "b", arrival=1.0)
    chooser = policy("valora", theta=0.1)
    decision = chooser.decide(view(run, [other], now=1.01, merged="a"))
    assert decision.mode is MERGED and "w1" not in taken(decision)
    # Credit counts the step, too, so θ is crossed a little before 0.1 s of waiting.
    assert 1.08 < decision.until < 1.1
    decision = chooser.decide(view(run, [other], now=1.1, merged="a"))
    assert decision.mode is MIXTURE and "w1" in taken(decision)


def test_credit_is_waiting_plus_execution_plus_switch():
    chooser, other = policy("valora", theta=10.0), waiting(1, "b", arrival=0.75)
    credits = []
    for more in ({}, {"merged": "a"}):
        chooser.decide(view(several(running, 5, "a"), [other], now=1.0, **more))
        credits.append(other.credit)
    assert credits[0] - credits[1] == pytest.approx(COSTS.switch(None, "a", 64))
    assert 0.25 + 0.004 < credits[1] < 0.25 + 0.01


def test_running_requests_do_not_starve_while_decisions_are_repeated():
    """Skipped decisions do not make running requests look as if they had starved."""
    chooser, run = policy("valora", theta=0.05), several(running, 6, "a")
    assert chooser.decide(view(run, now=1.0, merged="a")).until > 1e6
    chooser.decide(view(run, now=3.0, merged="a"))
    assert all(r.served == 3.0 for r in run)


def test_prompts_are_collected_only_while_others_decode():
    """With many decoding and arrivals every 10 ms, one prompt waits for the next; alone not."""
    chooser, run = policy("cost"), several(running, 60, "a", left=100)
    limits = replace(LIMITS, max_requests=100)
    for i in range(40):  # learns the rate
        now = i * 0.01
        new = [waiting(i, "a", arrival=now)]
        chooser.decide(view(run, new, now=now, limits=limits, arrived=[now]))
    late = waiting(99, "a", arrival=0.4)
    more = {"merged": "a", "limits": limits, "arrived": [0.4]}
    held = chooser.decide(view(run, [late], now=0.4, **more))
    assert "w99" not in taken(held) and len(held.batch) == 60 and held.until > 0.4
    freed = chooser.decide(view(run, [late], now=held.until + 1e-6, merged="a", limits=limits))
    assert "w99" in taken(freed)
    assert "w99" in taken(chooser.decide(view([], [late], now=0.4, merged="a")))


def test_names_of_weighted_adapters_are_forgotten():
    chooser = policy("cost")
    for n in range(50):  # each weight makes a name, of which clients choose as many as they like
        one = waiting(n, f"a*{n}", arrival=0.1 * n, output=1)
        chooser.decide(view([], [one], now=0.1 * n, resident=[one.adapter], switchable=frozenset()))
    assert len(chooser._ranks) < 8


def test_prompts_stay_within_the_captured_sizes_and_fill_them():
    """Four prompts of 256 fit into 1,024 rows, but not beside 60 that decode."""
    wide = {"most": 100, "max_tokens": 8192, "chunk": 8192, "free_pages": 10**4}

    def tokens(sizes, decoding, wait, seconds, now=1.0):
        costs = replace(H200_7B, captured_rows=sizes, uncaptured_seconds=seconds)
        run = several(running, decoding, "a", left=100)
        return sum(
            count for _, count in decide("cost", run, wait, costs=costs, now=now, **wide).batch
        )

    wait = [waiting(i, "b", arrival=0.1 * i, prompt=256, output=100) for i in range(4)]
    assert tokens((1280,), 60, wait, 0.08) == 60 + 4 * 256
    assert 60 < tokens((1024,), 60, wait, 0.08) <= 1024
    # 128 prompt tokens beside 8 rows would be computed as 192 rows.
    late, sizes = several(waiting, 2, "b", prompt=300, output=100), (64, 128, 192, 2048)
    assert tokens(sizes, 8, late, 0.06, now=5.0) in sizes[:3]


ROOM = [running(0, "a", arrival=0.1), running(1, "b", arrival=0.9),
        running(2, "b", arrival=0.95, latency_limit=50.0)]  # fmt: skip
URGENT = [waiting(8, "a", arrival=0.98, output=0),
          waiting(7, "a", arrival=0.99, output=0, latency_limit=0.03)]  # fmt: skip


@pytest.mark.parametrize("name", ["cost", "valora"])
@pytest.mark.parametrize(
    ("run", "wait", "more", "batch", "preempt", "loads"),
    [
        # The earliest due time goes first.
        ([], [waiting(1, "a", output=5), waiting(2, "a", output=5, deadline=1.06),
              waiting(3, "b", output=5, latency_limit=1.04)], {"most": 1}, {"w3"}, (), ()),
        # Each takes 0.1 s and is due in 1 s; all twenty, one after the other, take 2 s.
        ([], [waiting(50, "a", output=2), *several(waiting, 20, "a", output=20, latency_limit=2.0)],
         {"most": 1}, {"w0"}, (), ()),
        # Who cannot be in time takes no precedence,
        ([], [waiting(1, "a", output=5), waiting(2, "a", output=5, latency_limit=1.001)],
         {"most": 1}, {"w1"}, (), ()),
        # but most answers are shorter than their 4,000 tokens.
        ([], [waiting(1, "a", output=5), waiting(2, "a", output=4000, latency_limit=2.0)],
         {"most": 1}, {"w2"}, (), ()),
        # The youngest without a limit makes room, unless it has waited for long or there is room.
        (ROOM, URGENT, {"most": 3}, {"r0", "r2", "w7"}, ("r1",), ()),
        (ROOM, URGENT, {"most": 3, "patience": 0.01}, {"r0", "r1", "r2"}, (), ()),
        (ROOM, URGENT, {}, {"r0", "r1", "r2", "w7", "w8"}, (), ()),
        ([], [waiting(1, "x"), waiting(2, "y", arrival=0.99, output=0, latency_limit=0.03)],
         {"free_pages": 3 + 16, "resident": ""}, set(), (), ("y",)),
        ([running(0, "a", arrival=0.1, pages=1), running(1, "a", arrival=0.2, pages=1),
          running(2, "a", arrival=0.3, pages=1, deadline=9.0)], [], {"free_pages": 1},
         {"r0", "r2"}, ("r1",), ()),
    ],
)  # fmt: skip
def test_latency_limits(name, run, wait, more, batch, preempt, loads):
    found = decide(name, run, wait, **more)
    assert (taken(found), found.preempt, found.prefetch) == (batch, preempt, loads)


def test_a_long_queue_is_shown_by_its_ends_and_its_most_urgent():
    queue = [waiting(i, "a", arrival=float(i)) for i in range(100)]
    for number, limit in ((50, 9.0), (40, 30.0), (60, 1.0), (99, 2.0), (2, 500.0)):
        queue[number].latency_limit = limit
    assert window(queue, 100) is queue
    shown = [int(r.id[1:]) for r in window(queue, 12)]
    # Six of the oldest, the three newest, and of those with a limit 50, 60 and 40: due at 59 to 70.
    assert shown == [0, 1, 2, 3, 4, 5, 40, 50, 60, 97, 98, 99]


@pytest.mark.parametrize(
    ("deadline", "own", "domain", "due"),
    [(None, None, None, None), (7.0, None, None, 7.0), (7.0, 1.0, None, 3.0), (2.5, 1.0, None, 2.5),
     (None, 9.0, "plates", 6.0), (None, 1.0, "plates", 3.0), (5.0, None, "plates", 5.0),
     (None, None, "other", None)],
)  # fmt: skip
def test_the_earliest_limit_counts(deadline, own, domain, due):
    request = waiting(1, "a", arrival=2.0, deadline=deadline, latency_limit=own, domain=domain)
    assert PolicySettings(latency_limits={"plates": 4.0}).due(request) == due


def overloaded(chooser):
    """Let ten requests of `a` come a second for five seconds, none of which can be taken in."""
    wait = []
    for second in range(5):
        new = [waiting(100 * second + i, "a", arrival=second + i / 10) for i in range(10)]
        wait += new
        limits, arrived = replace(LIMITS, max_requests=1), [r.arrival for r in new]
        chooser.decide(
            view([running(0, "a")], wait, now=second + 1.0, limits=limits, arrived=arrived)
        )
    return wait


def test_the_newest_go_first_under_overload_after_preempted_ones():
    one = replace(LIMITS, max_requests=1)
    chooser = policy("slora", early_abort=True, slo=100.0)
    wait = overloaded(chooser)
    assert taken(chooser.decide(view([], wait, now=5.5, limits=one))) == {"w409"}
    chooser = policy("slora", early_abort=True, slo=1.0)
    wait, again = overloaded(chooser), waiting(800, "a", arrival=-3.0, served=4.0)
    decision = chooser.decide(view([], [again, *wait], now=5.5, limits=one))
    assert taken(decision) == {"w800"} and "w800" not in dict(decision.abort)


@pytest.mark.parametrize(("overload", "wanted"), [(True, ("z",)), (False, ("p",))])
def test_the_adapter_of_the_newest_is_loaded_first_under_overload(overload, wanted):
    """There is room for one adapter beside the one that runs."""
    chooser = policy("slora", early_abort=True, slo=100.0)
    wait = overloaded(chooser) if overload else []
    wait = [waiting(900, "p", arrival=-0.5), *wait, waiting(901, "z", arrival=5.2)]
    limits = replace(LIMITS, max_requests=1, free_pages=16 + 1)
    now = view([running(0, "a")], wait, now=5.5, limits=limits, resident="a", arrived=[5.2])
    assert chooser.decide(now).prefetch == wanted


@pytest.mark.parametrize(
    ("kind", "wanted"), [(LastComeFirstServed, ("z", "p")), (POLICIES["slora"], ("p", "z"))]
)
def test_adapters_are_loaded_in_the_order_of_a_plan(kind, wanted):
    now = view([running(0, "a")], [waiting(1, "p"), waiting(2, "z")], resident="a")
    assert kind(COSTS, PolicySettings()).decide(now).prefetch == wanted


@pytest.mark.parametrize(("told", "first"), [(range(100), "w9"), (range(10), "w0")])
def test_arrivals_count_that_the_view_leaves_out(told, first):
    """Of 100 a second the view shows the 10 oldest; 20 a second are taken in."""
    chooser = policy("slora", early_abort=True, slo=100.0)
    shown = [waiting(i, "a", arrival=i / 1000, output=1) for i in range(10)]
    for second in range(4):
        new = several(waiting, 20, "a", first=1000 * second + 100)
        limits = replace(LIMITS, max_requests=20, max_tokens=20 * 32)
        arrived = [second + i / 100 for i in told]
        chooser.decide(view([], new, now=second + 1.0, limits=limits, arrived=arrived))
    assert taken(
        chooser.decide(view([], shown, now=4.5, limits=replace(LIMITS, max_requests=1)))
    ) == {first}


def test_the_time_of_a_prefill_is_learnt_from_requests_with_one_token_too():
    chooser, beside = policy("slora", early_abort=True, slo=6.0), running(0, None)
    for number in range(3):
        new = waiting(number, "a", arrival=2.0 * number)
        chooser.decide(view([beside], [new], now=2.0 * number))
        chooser.finished(f"w{number}")
    chooser.decide(view([beside], now=6.0))
    wait = [waiting(7, "a", arrival=5.0), waiting(8, "a", arrival=8.5)]
    decision = chooser.decide(view([beside], wait, now=10.0))
    assert [key for key, _ in decision.abort] == ["w7"]  # 5 s of waiting and 2 s of prefill


def test_a_trace_is_one_line_a_step_and_ends_with_the_disk(caplog):
    seen = view([running(0, "a"), running(1, "b")], [waiting(1, "a"), waiting(2, "x")], now=12.5)
    decision, file = policy("slora").decide(seen), io.StringIO()
    DecisionTrace(file).write(seen, decision)
    assert file.getvalue() == (
        "   12.500000 unmerged -                   2d+32p run 2 wait 2  +x always unmerged\n"
    )

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    writer = DecisionTrace(Full())
    for _ in range(3):
        writer.write(seen, decision)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text


def test_weights_change_once_prompts_have_paid_for_it():
    chooser, now, merged = make_policy("cost", H200_7B, PolicySettings()), 0.0, None

    def asked(adapters):
        """Answer lone prompts of adapters; how many until the weights have changed."""
        nonlocal now, merged
        before = merged
        for number, adapter in enumerate(adapters):
            now += 0.1
            one = waiting(number, adapter, arrival=now, output=0)
            merged = chooser.decide(view(wait=[one], now=now, merged=merged)).merged
            if merged != before:
                return number
        return None

    assert asked("ab" * 100) is None, "what a saves, b takes twice"
    merge = 1.1 * H200_7B.switch(None, "a")
    unmerged, alone = (
        H200_7B.step(StepShape(prefill=32, terms=n, work=64 * n, ranks=2 * n)) for n in (32, 0)
    )
    assert asked("a" * 100) == math.ceil(merge / (unmerged - alone)) - 1, "the last counts, too"
    assert merged == "a"
    assert asked("ab" * 100) is not None
    assert merged is None
    assert asked("b" * 100) is not None
    assert merged == "b"
