"""Predictions against sums worked out by hand."""

import os
from dataclasses import replace

import pytest

from valora_data.schema import Split, Task
from valora_train.estimate.calibration import (
    Calibration,
    DomainCosts,
    Line,
    MachineCosts,
    ModelCosts,
    TeacherCosts,
    TrackingCosts,
)
from valora_train.estimate.courses import Course, Courses
from valora_train.estimate.prediction import predict
from valora_train.fusion.decision import Attempt
from valora_train.fusion.loading import TAUGHT
from valora_train.settings import (
    AugmentSettings,
    DomainSettings,
    FusionSettings,
    ModelSettings,
    OracleSettings,
    Settings,
    TrainSettings,
)

COUNTS = {Split.TRAIN: 100, Split.UNLABELLED: 200, Split.VAL: 30, Split.TEST: 40, TAUGHT: 150}
ALONE = Attempt(1, "a", "adapter-1", (), False)
SHARED = Attempt(2, "b", "adapter-1", ("a",), True)
AGAIN = Attempt(3, "b", "adapter-2", (), False)
COURSES = Courses(
    Course((ALONE, SHARED), 1),
    (Course((ALONE, SHARED), 1), Course((ALONE, SHARED, AGAIN), 2)),
    Course((ALONE, SHARED, AGAIN), 2),
)
TRAIN = TrainSettings(
    steps=10, steps_per_held=4, rehearsal_share=0.4, probe_steps=6, validations=2,
    validation_samples=5, validation_share=0.5, checkpoint_seconds=1e9,
)  # fmt: skip


def costs(name: str, mirror: bool) -> DomainCosts:
    return DomainCosts(
        DomainSettings(name=name, task=Task.DETECTION, labels=[name], mirror=mirror),
        dict(COUNTS),
        data=7.0,
        teacher=TeacherCosts(start=1.0, epochs=3, epoch=0.01, load=2.0, answer=0.1, size=500),
        stored=10.0,
        decoded=1000.0,
        reading=0.001,
    )


def calibration() -> Calibration:
    line = Line(0.5, 0.02)
    return Calibration(
        domains={"a": costs("a", True), "b": costs("b", False)},
        model={
            "a": ModelCosts(0.03, 2000.0, True, 300.0, 0.04, 0.05, 1.0, line, 0.25),
            "b": ModelCosts(0.03, 4000.0, True, 300.0, 0.04, 0.05, 3.0, line, 0.25),
        },
        machine=MachineCosts(
            load=5.0, hashing=1.0, program=4.0, adapter=900, weights=300, snapshot=0.1,
            resting=10_000, training=7_000, passing=6_000, memory=50_000,
        ),
        tracking=TrackingCosts(start=2.0, attempt=1.5),
        memory={"data": 100, "teach": 200, "distill": 300},
        began=9.0,
        seconds=60.0,
    )  # fmt: skip


def rows(found) -> dict:
    return {row.stage: row for row in found.rows}


def test_time():
    found = predict(Settings(train=TRAIN), calibration(), COURSES)
    said = rows(found)
    assert said["start"].seconds == 9
    assert said["data"].seconds == 14
    assert said["teach"].seconds == pytest.approx(2 * (1 + 100 * (0.001 + 0.03)))
    answered = 270 * (0.001 + 0.1)
    assert said["distill"].seconds == pytest.approx(2 * (2 + answered + 150 * 0.001))
    evaluation = (0.5 + 0.02 * 30) + (0.5 + 0.02 * 40)
    alone = 5 + 1 + 2  # model, hashes, MLflow
    for learnt in (300, 150):  # mirrored, not mirrored
        alone += 220 * 0.001 + 0.03 * (learnt + 70) + 0.04 * learnt + 6 * 0.05
        alone += evaluation + 0.25
    assert said["fuse: without LoRA"].seconds == pytest.approx(alone)
    # The speed is measured on one sample and twice 32, which take 0.03 + 0.02 s each.
    pace = 0.05 + 2 * 32 * 0.05
    assert said["fuse: on test"].seconds == pytest.approx(2 * (evaluation + 0.25 + pace))
    export = 4 + 10 + 2 + 1.5 + 2 * (40 * 0.031 + 0.5 + 0.02 * 40)
    assert said["export"].seconds == pytest.approx(export)


def test_domains_side_by_side_are_ready_when_the_last_one_is():
    one = calibration()
    one.domains["c"] = replace(costs("c", False), data=50.0, teacher=None)
    one.model["c"] = one.model["b"]
    two = replace(one, processes=2)
    alone, beside = (rows(predict(Settings(train=TRAIN), found, COURSES)) for found in (one, two))
    stages = ("data", "teach", "distill")
    first = 7 + 1 + 100 * 0.031 + 2 + 270 * 0.101 + 150 * 0.001  # of a, and of b as well
    third = 50 + 150 * 0.001
    assert sum(alone[stage].seconds for stage in stages) == pytest.approx(2 * first + third)
    # The third one follows the first; the second one ends with the first. Imports take 9 s.
    assert sum(beside[stage].seconds for stage in stages) == pytest.approx(first + third + 9)
    assert beside["teach"].memory == 2 * alone["teach"].memory
    assert "2 domains side by side" in beside["data"].note


def test_dedicated_adapters_are_trained_before_a_share_of_them_is_asked(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    share = FusionSettings(of_dedicated=0.9)
    one = Settings(train=TRAIN, fusion=share, oracle=OracleSettings(processes=1))
    plain, said = predict(Settings(train=TRAIN), calibration(), COURSES), calibration()
    found = predict(one, said, COURSES)
    evaluation = (0.5 + 0.02 * 30) + (0.5 + 0.02 * 40)
    jobs = [
        # A trial has one core, and a step of two takes twice as long there.
        220 * 0.001 + 0.03 * (learnt + 70) + 10 * 2 * step + evaluation
        for learnt, step in ((300, 1.0), (150, 3.0))
    ]
    assert rows(found)["dedicated"].seconds == pytest.approx(5 + sum(jobs))
    assert found.seconds == pytest.approx(plain.seconds + 5 + sum(jobs))
    two = predict(replace(one, oracle=OracleSettings(processes=2)), said, COURSES)
    assert rows(two)["dedicated"].seconds == pytest.approx(5 + 4 + max(jobs))
    assert "2 adapters, 2 side by side" in rows(two)["dedicated"].note
    assert "dedicated" not in rows(predict(one, replace(said, fused=True), COURSES))


def test_attempts():
    found = predict(Settings(train=TRAIN), calibration(), COURSES)
    judged = 0.3 + (0.5 + 0.02 * 30) + 0.25 + 1.5
    first = 10 * 1.0 + 0.02 * 10 + judged
    # 60 % of a batch is of the new domain; there are two domains to look at and to judge.
    step = 0.6 * 3.0 + 0.4 * 1.0
    second = 14 * step + 2 * 0.02 * 10 + judged + (0.5 + 0.02 * 30) + 0.25
    third = 10 * 3.0 + 0.02 * 10 + judged
    assert found.attempt[0] == pytest.approx(first)
    best, expected, worst = found.cases
    rest = best.seconds - first - second
    assert worst.seconds == pytest.approx(rest + first + second + third)
    assert expected.seconds == pytest.approx((best.seconds + worst.seconds) / 2)
    assert (best.attempts, expected.attempts, worst.attempts) == (2, 2.5, 3)
    assert sum(row.seconds for row in found.rows) == pytest.approx(found.seconds)
    # Looks at the validation split are bounded by their share of the training.
    bounded = replace(TRAIN, validation_share=0.001)
    found = predict(Settings(train=bounded), calibration(), COURSES)
    assert found.attempt[0] == pytest.approx(10 * 1.0 + 0.01 + judged)


def test_memory():
    cpu = predict(Settings(train=TRAIN), calibration(), COURSES)
    # The encoded samples of both domains, the images of val and test, and what a head reads.
    encoded = 2000 * (300 + 70) + 4000 * (150 + 70)
    assert cpu.memory == 50_000 + 2 * 1000 * 70 + encoded + 2 * 300 * 300
    assert cpu.gpu == 0
    gpu = predict(
        Settings(train=TRAIN, model=ModelSettings(device="cuda:1")), calibration(), COURSES
    )
    assert gpu.memory == 50_000 + 2 * 1000 * 70 + 150 * 1000 + 2 * 900
    said = rows(gpu)
    assert said["attempts"].gpu == 10_000 + encoded + 0.5 * 900 + 7_000
    assert said["fuse: without LoRA"].gpu == 10_000 + 6_000 + encoded + 2 * 300 * 150
    assert said["export"].gpu == 16_000


def test_what_would_fill_the_gpu_lies_on_the_host():
    large = calibration()
    large.machine.head_inputs = 300 * 200  # only what the head of `b` reads fits
    for one in large.model.values():
        one.on_device = False
    gpu = Settings(train=TRAIN, model=ModelSettings(device="cuda"))
    found = predict(gpu, large, COURSES)
    encoded = 2000 * (300 + 70) + 4000 * (150 + 70)
    read = 2 * 300 * 300
    assert found.memory == 50_000 + 2 * 1000 * 70 + encoded + read + 2 * 900
    assert rows(found)["fuse: without LoRA"].gpu == 10_000 + 6_000 + 2 * 300 * 150
    assert rows(found)["attempts"].gpu == 10_000 + 0.5 * 900 + 7_000


def test_views_are_samples():
    views = replace(TRAIN, augment=AugmentSettings(views=2, color=0.1))
    plain = rows(predict(Settings(train=TRAIN), calibration(), COURSES))
    more = rows(predict(Settings(train=views), calibration(), COURSES))
    added = more["fuse: without LoRA"].seconds - plain["fuse: without LoRA"].seconds
    assert added == pytest.approx(2 * 300 * (0.03 + 0.04))


def test_a_head_alone_reads_at_most_some_samples():
    plain = predict(Settings(train=TRAIN), calibration(), COURSES)
    fewer = predict(Settings(train=replace(TRAIN, probe_samples=120)), calibration(), COURSES)
    spared = rows(plain)["fuse: without LoRA"].seconds - rows(fewer)["fuse: without LoRA"].seconds
    assert spared == pytest.approx((300 - 120 + 150 - 120) * 0.04)
    # What it reads is then less than a decoded data set.
    assert plain.memory - fewer.memory == 2 * 300 * 300 - 1000 * 150


def test_stages_that_are_up_to_date_take_nothing(tmp_path):
    done = calibration()
    for one in done.domains.values():
        one.data, one.distilled, one.teacher = None, tmp_path, None
    found = predict(Settings(train=TRAIN), done, COURSES)
    assert [row.stage for row in found.rows][:3] == ["start", "data", "fuse: without LoRA"]
    assert rows(found)["data"].seconds == 0
    assert rows(found)["data"].note == "up to date"


def test_a_fusion_that_is_up_to_date_takes_nothing():
    done = calibration()
    done.fused = True
    found = predict(Settings(train=TRAIN), done, COURSES)
    for stage in ("fuse: without LoRA", "attempts", "fuse: on test"):
        assert (rows(found)[stage].seconds, rows(found)[stage].note) == (0, "up to date")
    assert rows(found)["export"].seconds > 0
    assert {case.seconds for case in found.cases} == {found.seconds}


def test_comparing_steps_takes_time():
    plain = predict(Settings(train=TRAIN), calibration(), COURSES)
    compared = replace(TRAIN, best_of=3)  # the last step and two before it
    found = predict(Settings(train=compared), calibration(), COURSES)
    more = 3 * (0.5 + 0.02 * 30 + 0.1)
    assert found.attempt[0] == pytest.approx(plain.attempt[0] + more)


def test_lines_never_fall():
    line = Line.through((8, 1.4), (64, 7.0))
    assert (line.fixed, line.each) == (pytest.approx(0.6), pytest.approx(0.1))
    assert Line.through((8, 9.0), (64, 7.0)) == Line(7.0, 0.0)
    assert Line.through((8, 0.1), (64, 6.4)).at(0) == 0.0
    assert Line.through((5, 1.0), (5, 1.0)).at(5) == 1.0
