"""Generators against the distributions that they state; files there and back, and damaged ones."""

import json

import numpy as np
import pytest

from valora_serve.workloads import traces
from valora_serve.workloads.traces import TraceError

ALL = {
    "poisson": lambda seed: traces.poisson(20, 200, seed=seed),
    "retrieval": lambda seed: traces.retrieval(20, 200, seed=seed),
    "video": lambda seed: traces.video(8, 200, seed=seed),
    "slora": lambda seed: traces.slora(20, 200, adapters=50, alpha=0.5, seed=seed),
    "at_once": lambda seed: traces.at_once(3000, seed=seed),
}
assert set(ALL) == set(traces.GENERATORS)


@pytest.mark.parametrize("name", ALL)
def test_ordered_valid_and_seeded(name):
    workload = ALL[name](0)
    assert (np.diff(workload.arrival) >= 0).all() and workload.arrival[0] >= 0
    assert (workload.prompt >= 1).all() and (workload.output >= 0).all()
    assert workload.adapter.max() < len(workload.adapters) == len(workload.ranks)
    again, other = ALL[name](0), ALL[name](1)
    for field in ("arrival", "adapter", "prompt", "output", "images"):
        np.testing.assert_array_equal(getattr(workload, field), getattr(again, field))
    assert not np.array_equal(workload.adapter, other.adapter)


@pytest.mark.parametrize("skew", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("make", [traces.poisson, traces.retrieval, traces.video])
def test_skewness_is_the_stated_share_and_scattered(make, skew):
    workload = make(10, 500, skew=skew, seed=3)
    popular = workload.adapter == 0
    n = len(workload)
    margin = 4 * np.sqrt(skew * (1 - skew) / n)
    assert abs(popular.mean() - skew) < margin
    # Interleaved: every tenth of the trace has the share too, and neighbours are independent.
    for part in np.array_split(popular, 10):
        assert abs(part.mean() - skew) < margin * np.sqrt(10) * 1.2
    pairs = (popular[1:] & popular[:-1]).mean()
    assert abs(pairs - skew**2) < 5 / np.sqrt(n)
    others = np.bincount(workload.adapter[~popular], minlength=16)[1:] / (~popular).sum()
    assert np.abs(others - 1 / 15).max() < 0.03


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_have_the_stated_variation(cv):
    gaps = np.diff(traces.slora(50, 4000, cv=cv, seed=1).arrival)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_power_law_of_adapters(alpha):
    n, adapters = 200_000, 20
    workload = traces.slora(100, n / 100, adapters=adapters, alpha=alpha, seed=2)
    i = np.arange(adapters)
    expected = ((i + 1) / adapters) ** alpha - (i / adapters) ** alpha
    share = np.bincount(workload.adapter, minlength=adapters) / len(workload)
    np.testing.assert_allclose(share, expected, atol=5 / np.sqrt(n))


def test_video_sends_a_clip_and_a_frame_a_second_per_stream():
    workload = traces.video(3, 10, heads=True)
    assert len(workload) == 3 * 10 * 2
    assert sorted(set(workload.prompt)) == [256, 6 * 256]
    assert (workload.images * 256 == workload.prompt).all()
    assert (workload.output == 0).all()
    clips = workload.prompt == 6 * 256
    generated = traces.video(3, 10, heads=False).output
    assert generated[clips].min() >= 5 and generated[clips].max() <= 10
    assert generated[~clips].min() >= 20


@pytest.mark.parametrize(
    "make",
    [
        lambda: traces.poisson(0, 10), lambda: traces.poisson(5, 10, skew=1.5),
        lambda: traces.poisson(5, 10, adapters=1, skew=0.5), lambda: traces.slora(5, 10, alpha=0),
        lambda: traces.video(0, 10),
    ],
)  # fmt: skip
def test_senseless_workloads_are_refused(make):
    with pytest.raises(TraceError):
        make()


def test_lines_are_read_by_arrival(tmp_path):
    rows = [
        {"arrival": 2.5, "prompt": 5, "output": 0, "images": 2, "latency_limit": 1.5},
        {"arrival": 1, "adapter": "b", "rank": 8, "prompt": 7, "output": 3},
        {"arrival": 2, "adapter": "a", "prompt": 9, "output": 1},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = traces.read(tmp_path / "t.jsonl")
    assert (read.adapters, read.ranks) == (("b", "a"), (8, 64))
    for field, value in (("arrival", [1, 2, 2.5]), ("adapter", [0, 1, traces.BASE]),
                         ("prompt", [7, 9, 5]), ("output", [3, 1, 0]), ("images", [0, 0, 2]),
                         ("latency_limit", [np.nan, np.nan, 1.5])):  # fmt: skip
        np.testing.assert_array_equal(getattr(read, field), value)
    limited = traces.with_latency_limit(read, 3.0)
    np.testing.assert_array_equal(limited.latency_limit, [3.0] * 3)


GOOD = {"arrival": 1.0, "adapter": "a", "prompt": 5, "output": 2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((f"{json.dumps(GOOD)}\n\n{line}\n", f"line 3: {says}") for line, says in (
            ("{", "Invalid JSON"),
            (json.dumps({"arrival": 1.0, "prompt": 3}), "output: Field req"),
            (json.dumps({**GOOD, "arrival": -1}), "arrival: Input should be greater than or eq"),
            (json.dumps({**GOOD, "prompt": 0}), "prompt: Input should be greater than or equal"),
            (json.dumps({**GOOD, "arrival": 10**400}), "arrival: Input should be a finite number"),
            (json.dumps({**GOOD, "latency_limit": 0}), "latency_limit: Input should be greater"),
            (json.dumps({**GOOD, "rank": 8}), "a has rank 8, but 64 above"),
            (json.dumps({**GOOD, "colour": 1}), "colour: Extra inputs are not permitted"),
        )),
        ("TIMESTAMP,ContextTokens\n1,2\n", "output: Field required"), ("", "no requests"),
        ("time,input,output\n-3,5,5\n", "line 2: time: Input should be greater than or equal"),
        ("time,input,output\n1,5,5\n2,x,5\n", "line 3: input: Input should be a valid integer"),
        ("time,input,output\n1,5\n", "output: Input should be a valid integer"),
    ],
)  # fmt: skip
def test_damaged_lines_are_named(tmp_path, text, says):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        (traces.read if text.startswith("{") else traces.azure)(path)
    assert says in str(error.value) and str(path) in str(error.value)


def test_a_table_of_one_moment_is_taken_whole(tmp_path):
    path, times = tmp_path / "t.csv", ("2023-11-05 00:30", "2023-11-05T00:30:00.0000001Z")
    path.write_text("\ufefftime,input,output\n" + "".join(f"{one},5,2\n" for one in times))
    assert traces.azure(path, rate=10).arrival.tolist() == [0.0, 0.0]
