"""Images a second: what is counted, and how often a model is asked."""

import time

import pytest
from PIL import Image

from valora_data.schema import Answer, Sample
from valora_train.metrics.speed import Pace, machine, measure_speed


def samples(count, frames=1):
    image = Image.new("RGB", (4, 4))
    return [
        Sample(str(number), image, Answer(), None, (image,) * (frames - 1))
        for number in range(count)
    ]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is told to."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_median_batch_counts(clock):
    took = iter([0.0625, 0.5, 0.25, 0.5, 1.0, 7.0])
    asked = []

    def answer(batch):
        asked.append(len(batch))
        clock[0] += next(took)

    found = measure_speed(answer, samples(50, frames=3))
    assert asked == [1] + [32] * 4  # after the fourth batch, two seconds are over
    assert found == {"images_per_second": 32 * 3 / 0.5, "machine": machine()}


@pytest.mark.parametrize(("each", "sizes"), [(0.25, [1, 8]), (1.5, [1, 1, 1]), (40.0, [1])])
def test_a_slow_model_is_asked_less(clock, each, sizes):
    asked = []

    def answer(batch):
        asked.append(len(batch))
        clock[0] += each * len(batch)

    assert measure_speed(answer, samples(50))["images_per_second"] == pytest.approx(1 / each)
    assert asked == sizes
    asked.clear()
    measure_speed(answer, samples(4), alone=False)  # others must ask as often
    assert asked == [4, 4]


def test_a_pace_leaves_out_the_batch_in_which_a_model_warms_up(clock):
    pace = Pace()
    assert pace.facts() == {}
    for split in (samples(20), samples(10, frames=2)):
        pace.start(split)
        for done in range(10, len(split) + 1, 10):
            clock[0] += 5.0 if clock[0] == 0.0 else 0.5
            pace.on_batch(done)
        pace.on_batch(len(split))  # the end is told twice
    # 10 images in 5 s to warm up; 10 in 0.5 s; 20 in 0.5 s.
    assert pace.facts()["images_per_second"] == pytest.approx(30)
    pace = Pace()  # a single batch counts
    pace.start(samples(6))
    clock[0] += 2.0
    pace.on_batch(6)
    assert pace.facts() == {"images_per_second": 3, "machine": machine()}
    assert "cores" in machine()
    assert len(machine()) > len("1 cores")
