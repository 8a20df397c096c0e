"""What each policy decides in situations that can be thought through by hand."""

import io
from dataclasses import replace

import pytest

from valora_serve.errors import SettingsError
from valora_serve.orchestrator.cost_model import H200_7B
from valora_serve.orchestrator.decision import PolicySettings, RequestView, StepLimits, View
from valora_serve.orchestrator.registry import POLICIES, make_policy
from valora_serve.orchestrator.trace import DecisionTrace
from valora_serve.types import Mode

COSTS = replace(
    H200_7B,
    decode_seconds=(4.4e-3, 14e-6, 6e-6, 0.0, 0.125e-6, 0.45e-3, 0.52e-6, 0.12e-6, 0.0),
    prefill_seconds=(
        8e-3,
        1e-6,
        0.0,
        20e-6,
        0.0,
        0.125e-6,
        1e-9,
        1.5e-3,
        3e-3,
        0.52e-6,
        0.017e-6,
        0.0,
    ),
)
"""A machine on which LoRA costs by the row, and a second term no more than a first."""

LIMITS = StepLimits(max_requests=16, max_tokens=512, free_pages=1000, max_adapters=8, chunk=512)


def waiting(i, adapter, arrival=0.0, prompt=32, output=50, **more):
    rank = 64 if adapter else 0
    pages = 3
    return RequestView(
        f"w{i}", adapter, rank, arrival, prompt, output_left=output, pages=pages,
        adapter_pages=16 if adapter else 0, **more,
    )  # fmt: skip


def running(i, adapter, arrival=0.0, left=50, **more):
    rank = 64 if adapter else 0
    defaults = {"held": 4, "adapter_pages": 16 if adapter else 0, "served": arrival}
    return RequestView(
        f"r{i}", adapter, rank, arrival, 0, kv_tokens=50, output_left=left, running=True,
        **{**defaults, **more},
    )  # fmt: skip


def view(run=(), wait=(), *, now=1.0, merged=None, mode=None, resident="abcdefgh", **more):
    if mode is None:
        mode = Mode.UNMERGED if merged is None else Mode.MERGED
    limits = more.pop("limits", LIMITS)
    return View(
        now, tuple(run), tuple(wait), mode, merged, frozenset(resident),
        more.pop("loading", frozenset()), limits, **more,
    )  # fmt: skip


def policy(name, **knobs):
    return make_policy(name, COSTS, PolicySettings(**knobs))


def taken(decision):
    return {key for key, _ in decision.batch}


def test_unknown_policy_lists_the_known():
    with pytest.raises(SettingsError, match=r"choose one of cost, dlora, .*valora"):
        make_policy("fifo", H200_7B)


@pytest.mark.parametrize("name", POLICIES)
def test_prompts_are_cut_to_chunk_and_token_limit(name):
    limits = replace(LIMITS, max_tokens=100, chunk=60)
    decision = policy(name).decide(
        view([running(0, "a")], [waiting(1, "a", prompt=500), waiting(2, "a", prompt=500)],
             now=0.0, limits=limits)
    )  # fmt: skip
    tokens = dict(decision.batch)
    assert tokens["r0"] == 1
    assert sum(tokens.values()) <= 100 and max(tokens.values()) <= 60


def test_valora_merges_what_most_ask_for():
    run = [running(i, "a") for i in range(5)]
    decision = policy("valora").decide(view(run))
    assert (decision.mode, decision.merged) == (Mode.MERGED, "a")
    assert len(decision.batch) == 5


def test_valora_never_stalls_running_requests_of_others():
    run = [running(i, "a", left=200) for i in range(5)] + [running(9, "b"), running(10, None)]
    decision = policy("valora").decide(view(run))
    assert (decision.mode, decision.merged) == (Mode.MIXTURE, "a")
    assert len(decision.batch) == 7


def test_valora_stays_unmerged_where_second_terms_cost_more_than_they_spare():
    run = [running(i, "a", left=200) for i in range(5)] + [running(9, "b"), running(10, None)]
    dear = replace(COSTS, decode_seconds=(*COSTS.decode_seconds[:-1], 0.1e-3))
    decision = make_policy("valora", dear).decide(view(run))
    assert (decision.mode, decision.merged) == (Mode.UNMERGED, None)
    assert len(decision.batch) == 7
    # Long prompts of the adapter in the weights have no term at all.
    coming = [waiting(i, "a", prompt=4000) for i in range(20, 24)]
    cheap = replace(
        COSTS,
        prefill_seconds=(*COSTS.prefill_seconds[:-2], 4e-6, 0.0),
        decode_seconds=dear.decode_seconds,
    )
    decision = make_policy("valora", cheap).decide(view(run, coming))
    assert (decision.mode, decision.merged) == (Mode.MIXTURE, "a")


def test_valora_keeps_others_back_up_to_theta_only():
    run = [running(i, "a") for i in range(5)]
    other = waiting(1, "b", arrival=1.0)
    chooser = policy("valora", theta=0.1)
    decision = chooser.decide(view(run, [other], now=1.01, merged="a"))
    assert decision.mode is Mode.MERGED and "w1" not in taken(decision)
    # Credit counts the step, too, so θ is crossed a little before 0.1 s of waiting.
    assert 1.08 < decision.until < 1.1
    decision = chooser.decide(view(run, [other], now=1.1, merged="a"))
    assert decision.mode is Mode.MIXTURE and "w1" in taken(decision)


def test_valora_unmerges_when_more_than_half_starve():
    run = [running(i, "a") for i in range(4)]
    wait = [waiting(i, "bcdef"[i], arrival=0.0) for i in range(5)]
    decision = policy("valora", hysteresis=0.4).decide(view(run, wait, now=5.0, merged="a"))
    assert (decision.mode, decision.merged) == (Mode.UNMERGED, None)
    assert len(decision.batch) == 9


def test_valora_does_not_merge_for_a_request_about_to_end():
    assert policy("valora").decide(view([running(0, "a", left=1)])).merged is None
    assert policy("valora").decide(view([running(0, "a", left=100)])).merged == "a"


def test_valora_hysteresis():
    """At 6 of 11 a new adapter is not merged, but one in the weights stays at 5 of 10."""
    even = [running(i, "a") for i in range(6)] + [running(i, "b") for i in range(10, 15)]
    assert policy("valora", hysteresis=0.1).decide(view(even, merged="b")).merged != "a"
    half = [running(i, "a") for i in range(5)] + [
        running(i, "bcdef"[i - 10]) for i in range(10, 15)
    ]
    decision = policy("valora", hysteresis=0.1).decide(view(half, merged="a"))
    assert decision.merged == "a"


def test_valora_ties_go_to_the_merged_adapter():
    run = [running(i, "a" if i % 2 else "b") for i in range(8)]
    for merged in "ab":
        assert policy("valora", hysteresis=0.2).decide(view(run, merged=merged)).merged == merged


def test_the_base_model_is_never_merged():
    run = [running(i, None) for i in range(6)]
    for name in POLICIES:
        decision = policy(name).decide(view(run))
        assert (decision.mode, decision.merged) == (Mode.UNMERGED, None), name
        assert len(decision.batch) == 6


def test_credit_is_waiting_plus_execution_plus_switch():
    chooser = policy("valora", theta=10.0)
    other = waiting(1, "b", arrival=0.75)
    chooser.decide(view([running(i, "a") for i in range(5)], [other], now=1.0))
    with_switch = other.credit
    chooser.decide(view([running(i, "a") for i in range(5)], [other], now=1.0, merged="a"))
    without = other.credit
    assert with_switch - without == pytest.approx(COSTS.switch(None, "a", 64))
    assert 0.25 + 0.004 < without < 0.25 + 0.01


def test_cost_merges_when_the_steps_ahead_pay_for_the_switch():
    long = [running(i, "a", left=100) for i in range(4)]
    short = [running(i, "a", left=1) for i in range(4)]
    assert policy("cost").decide(view(long)).merged == "a"
    assert policy("cost").decide(view(short)).merged is None


def test_cost_takes_the_shortest_first_when_not_all_fit():
    limits = replace(LIMITS, max_requests=2)
    wait = [waiting(1, "a", output=400), waiting(2, "a", output=5), waiting(3, "b", output=90)]
    decision = policy("cost").decide(view([], wait, now=0.1, limits=limits))
    assert taken(decision) == {"w2", "w3"}


def test_cost_takes_all_that_fit_if_groups_are_off():
    limits = StepLimits(
        max_requests=900, max_tokens=9000, free_pages=9000, max_adapters=8, chunk=512
    )
    run = [running(i, "a", left=400, served=1.0) for i in range(600)]
    for r in run:
        r.kv_tokens = 2000
    wait = [waiting(i, "a", arrival=0.9, prompt=8, output=400) for i in range(50)]
    few = policy("cost").decide(view(run, wait, limits=limits))
    many = policy("cost", groups=False).decide(view(run, wait, limits=limits))
    assert len(few.batch) == 600 and len(many.batch) == 650


def test_cost_serves_who_has_waited_for_patience_first():
    limits = replace(LIMITS, max_requests=1)
    wait = [waiting(1, "a", output=400), waiting(2, "a", arrival=29.9, output=5)]
    decision = policy("cost", patience=20.0).decide(view([], wait, now=30.0, limits=limits))
    assert taken(decision) == {"w1"}


def test_cost_serves_the_urgent_before_the_short():
    limits = replace(LIMITS, max_requests=1)
    wait = [waiting(1, "a", output=100, latency_limit=1.0), waiting(2, "a", output=5)]
    step = 0.006
    now = 1.0 - 100 * step
    decision = policy("cost").decide(view([], wait, now=now, limits=limits))
    assert taken(decision) == {"w1"}
    early = policy("cost").decide(view([], wait, now=0.0, limits=limits))
    assert taken(early) == {"w2"}


def test_cost_domain_limits_come_from_the_settings():
    limits = replace(LIMITS, max_requests=1)
    wait = [waiting(1, "a", output=100, domain="plates"), waiting(2, "a", output=5)]
    decision = policy("cost", latency_limits={"plates": 1.0}).decide(
        view([], wait, now=0.4, limits=limits)
    )
    assert taken(decision) == {"w1"}


def test_cost_collects_prompts_only_while_others_decode():
    """With many decoding and arrivals every 10 ms, one prompt waits for the next; alone not."""
    chooser = policy("cost")
    run = [running(i, "a", left=100) for i in range(60)]
    limits = replace(LIMITS, max_requests=100)
    for i in range(40):  # learns the rate
        chooser.decide(view(run, [waiting(i, "a", arrival=i * 0.01)], now=i * 0.01, limits=limits))
    late = waiting(99, "a", arrival=0.4)
    held = chooser.decide(view(run, [late], now=0.4, merged="a", limits=limits))
    assert "w99" not in taken(held) and len(held.batch) == 60 and held.until > 0.4
    freed = chooser.decide(view(run, [late], now=held.until + 1e-6, merged="a", limits=limits))
    assert "w99" in taken(freed)
    assert "w99" in taken(chooser.decide(view([], [late], now=0.4, merged="a")))


def test_cost_keeps_prompts_within_what_is_captured():
    """Four prompts of 256 fit into 1,024 rows, but not beside 60 that decode."""
    limits = replace(LIMITS, max_requests=100, max_tokens=8192, chunk=8192, free_pages=10**4)
    run = [running(i, "a", left=100) for i in range(60)]
    wait = [waiting(i, "b", arrival=0.1 * i, prompt=256, output=100) for i in range(4)]
    tokens = {}
    for most in (1024, 1280):
        costs = replace(H200_7B, captured_rows=(most,), uncaptured_seconds=0.08)
        decision = make_policy("cost", costs).decide(view(run, wait, limits=limits))
        tokens[most] = sum(count for _, count in decision.batch)
    assert tokens[1280] == 60 + 4 * 256
    assert 60 < tokens[1024] <= 1024


def test_cost_cuts_prompts_so_that_they_fill_a_graph():
    """128 prompt tokens beside 8 rows would be computed as 192 rows."""
    limits = replace(LIMITS, max_requests=100, max_tokens=8192, chunk=8192, free_pages=10**4)
    run = [running(i, "a", left=100) for i in range(8)]
    costs = replace(H200_7B, captured_rows=(64, 128, 192, 2048), uncaptured_seconds=0.06)
    late = [waiting(i, "b", prompt=300, output=100) for i in range(2)]
    step = make_policy("cost", costs).decide(view(run, late, now=5.0, limits=limits))
    assert sum(count for _, count in step.batch) in costs.captured_rows[:3]


def test_cost_never_lets_limited_requests_stand():
    chooser = policy("cost")
    own = [running(i, "a", left=100) for i in range(15)]
    for i in range(60):
        chooser.decide(view(own, [waiting(i, "a", arrival=i * 0.01)], now=i * 0.01, merged="a"))
    costly = make_policy("cost", COSTS.with_lora(4.0))
    costly.__dict__.update(chooser.__dict__, cost=COSTS.with_lora(4.0))
    free = running(90, "b", served=0.6)
    bound = running(91, "b", served=0.6, latency_limit=3.0)
    assert "r90" not in taken(costly.decide(view([*own, free], now=0.6, merged="a")))
    assert "r91" in taken(costly.decide(view([*own, bound], now=0.6, merged="a")))


def test_merge_only_turns_to_the_oldest():
    run = [running(0, "a", arrival=0.5), running(1, "b", arrival=0.2)]
    decision = policy("merge_only").decide(view(run, [waiting(1, "b", arrival=0.9)], merged="a"))
    assert (decision.mode, decision.merged, taken(decision)) == (Mode.MERGED, "b", {"r1", "w1"})


@pytest.mark.parametrize("name", POLICIES)
def test_what_runs_goes_on_while_pages_are_kept_for_a_starved_request(name):
    # A starved one waits for its adapter, and for more pages than are free, so that nobody is taken
    # in; the oldest of the others asks the bare model, and whoever runs does not.
    limits = replace(LIMITS, free_pages=10)
    wait = [waiting(1, "z", arrival=-1000.0), waiting(2, None, arrival=0.0)]
    run = [running(number, "a", arrival=0.5 + number / 10, served=0.9) for number in range(2)]
    decision = policy(name).decide(view(run, wait, limits=limits))
    assert taken(decision) >= {"r0", "r1"} - set(decision.preempt)
    assert decision.batch or decision.preempt


def test_dlora_stalls_the_rest_while_merged():
    run = [running(i, "a") for i in range(19)]
    chooser = policy("dlora")
    assert chooser.decide(view(run)).merged == "a"  # all are its: enters
    limits = replace(LIMITS, max_requests=32)
    run.append(running(50, "b"))
    decision = chooser.decide(view(run, merged="a", limits=limits))
    assert decision.mode is Mode.MERGED and "r50" not in taken(decision)
    run += [running(60 + i, "b") for i in range(15)]
    decision = chooser.decide(view(run, merged="a", limits=replace(limits, max_requests=64)))
    assert decision.mode is Mode.UNMERGED and len(decision.batch) == 35


def test_slora_is_strict_and_unmerge_only_passes_over():
    limits = replace(LIMITS, free_pages=20)
    wait = [waiting(1, None, prompt=30), waiting(2, None, prompt=2)]
    wait[0].pages, wait[1].pages = 40, 1
    assert taken(policy("slora").decide(view([], wait, limits=limits))) == set()
    assert taken(policy("unmerge_only").decide(view([], wait, limits=limits))) == {"w2"}


def test_clustering_prefers_adapters_that_are_in():
    limits = replace(LIMITS, max_requests=4)
    run = [running(0, "a"), running(1, "b")]
    wait = [
        waiting(1, "c", arrival=0.1),
        waiting(2, "a", arrival=0.2),
        waiting(3, "b", arrival=0.3),
    ]
    plain = policy("slora").decide(view(run, wait, limits=limits))
    assert taken(plain) == {"r0", "r1", "w1", "w2"}
    clustered = policy("slora", clusters=2).decide(view(run, wait, limits=limits))
    assert taken(clustered) == {"r0", "r1", "w2", "w3"}


def test_early_abort_gives_up_on_what_is_too_late_only():
    wait = [waiting(1, "a", arrival=0.0), waiting(2, "a", arrival=9.0)]
    decision = policy("slora", early_abort=True, slo=6.0).decide(view([], wait, now=10.0))
    assert [key for key, _ in decision.abort] == ["w1"]
    assert "6 s" in decision.abort[0][1]
    assert taken(decision) == {"w2"}


def test_early_abort_turns_to_the_newest_under_overload():
    limits = replace(LIMITS, max_requests=1)
    chooser = policy("slora", early_abort=True, slo=100.0)
    wait = []
    for second in range(5):  # ten come a second, none can be taken in
        wait += [waiting(100 * second + i, "a", arrival=second + i / 10) for i in range(10)]
        decision = chooser.decide(view([running(0, "a")], wait, now=second + 1.0, limits=limits))
    decision = chooser.decide(view([], wait, now=5.5, limits=limits))
    assert taken(decision) == {"w409"}


def test_more_adapters_running_than_a_step_takes_rotate():
    limits = replace(LIMITS, max_adapters=2)
    run = [running(i, "abcde"[i], arrival=0.0) for i in range(5)]
    chooser = policy("unmerge_only")
    seen = set()
    for step in range(3):
        decision = chooser.decide(view(run, now=1.0 + step, limits=limits))
        assert len(decision.batch) == 2 and decision.until == 0
        seen |= taken(decision)
    assert seen == {f"r{i}" for i in range(5)}


def test_out_of_pages_the_youngest_gives_way():
    limits = replace(LIMITS, free_pages=1)
    run = [running(i, "a", arrival=i / 10, pages=1, held=6) for i in range(3)]
    decision = policy("slora").decide(view(run, [waiting(1, "a", arrival=0.9)], limits=limits))
    assert decision.preempt == ("r2",) and taken(decision) == {"r0", "r1"}


def test_steady_batches_may_be_repeated_without_asking():
    """Skipped decisions do not make running requests look as if they had starved."""
    chooser = policy("valora", theta=0.05)
    run = [running(i, "a") for i in range(6)]
    decision = chooser.decide(view(run, now=1.0, merged="a"))
    assert decision.until > 1e6
    chooser.decide(view(run, now=3.0, merged="a"))
    assert all(r.served == 3.0 for r in run)


def test_missing_adapters_are_fetched_oldest_first_as_memory_allows():
    wait = [waiting(i, name, arrival=i / 10) for i, name in enumerate("axyz")]
    limits = replace(LIMITS, free_pages=3 + 16 + 2 * 16 + 1)
    decision = policy("slora").decide(view([], wait, resident="a", limits=limits))
    assert decision.prefetch == ("x", "y")


def test_a_starved_request_without_its_adapter_gets_room():
    """Younger requests whose adapter is there may not take the last pages for ever."""
    limits = replace(LIMITS, free_pages=30)
    late = [waiting(i, "a", arrival=50.0) for i in range(4)]
    for request in late:
        request.pages = 10
    starved = waiting(9, "x", arrival=0.0)
    decision = policy("unmerge_only", patience=10.0).decide(
        view([running(0, "a")], [starved, *late], now=50.1, resident="a", limits=limits)
    )
    assert decision.prefetch == ("x",)
    assert taken(decision) <= {"r0", "w0"}


def test_trace_is_one_readable_line_per_step():
    file = io.StringIO()
    writer = DecisionTrace(file)
    seen = view([running(0, "a"), running(1, "b")], [waiting(1, "a"), waiting(2, "x")], now=12.5)
    decision = policy("slora").decide(seen)
    writer.write(seen, decision)
    assert file.getvalue() == (
        "   12.500000 unmerged -                   2d+32p run 2 wait 2  +x always unmerged\n"
    )
