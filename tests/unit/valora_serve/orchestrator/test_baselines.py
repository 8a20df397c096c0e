"""The baselines: their decisions in situations that can be worked out by hand."""

from dataclasses import replace

from tests.support.policy_views import LIMITS, policy, running, taken, view, waiting
from valora_serve.types import Mode


def test_merge_only_serves_the_adapter_of_the_oldest():
    run = [running(0, "a", arrival=0.5), running(1, "b", arrival=0.2)]
    decision = policy("merge_only").decide(view(run, [waiting(1, "b", arrival=0.9)], merged="a"))
    assert (decision.mode, decision.merged, taken(decision)) == (Mode.MERGED, "b", {"r1", "w1"})


def test_dlora_pauses_the_others_while_merged():
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


def test_slora_is_strict_and_unmerge_only_skips():
    limits = replace(LIMITS, free_pages=20)
    wait = [waiting(1, None, prompt=30), waiting(2, None, prompt=2)]
    wait[0].pages, wait[1].pages = 40, 1
    assert taken(policy("slora").decide(view([], wait, limits=limits))) == set()
    assert taken(policy("unmerge_only").decide(view([], wait, limits=limits))) == {"w2"}
