"""Counts of a batch by hand, fits against the coefficients that made the points."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from valora_serve.orchestrator.cost_model import (
    H200_7B,
    CostModel,
    CostModelError,
    StepShape,
    cache_path,
    load_or_estimate,
    step_shape,
)
from valora_serve.orchestrator.decision import RequestView
from valora_serve.types import Mode

BEYOND = {"captured_rows": H200_7B.captured_rows, "uncaptured_seconds": H200_7B.uncaptured_seconds}


def row(i, adapter, rank, prompt_left=0, kv_tokens=10, images=0):
    return RequestView(str(i), adapter, rank, 0.0, prompt_left, kv_tokens=kv_tokens, images=images)


BATCH = [
    (row(0, "a", 8, kv_tokens=10), 1),
    (row(1, "b", 64, kv_tokens=20), 1),
    (row(2, None, 0, kv_tokens=30), 1),
    (row(3, "b", 64, prompt_left=50, kv_tokens=4, images=2), 7),
    (row(4, "a", 8, prompt_left=5, kv_tokens=0), 5),
]
RANKS = {"a": 8, "b": 64, "c": 16}


@pytest.mark.parametrize(
    ("mode", "merged", "batch", "terms", "work", "ranks"),
    [
        (Mode.UNMERGED, None, BATCH, 1 + 1 + 7 + 5, 8 + 64 + 7 * 64 + 5 * 8, 72),
        # Foreign rows have two terms, those of the base model one, and the merged adapter's none.
        (Mode.MIXTURE, "a", BATCH, 2 + 1 + 2 * 7, (64 + 8) + 8 + 7 * (64 + 8), 72),
        (Mode.MIXTURE, "c", BATCH[:2], 4, 8 + 64 + 2 * 16, 8 + 64 + 16),
        (Mode.MERGED, "a", [BATCH[0], BATCH[4]], 0, 0, 0),
    ],
)
def test_terms_of_a_batch(mode, merged, batch, terms, work, ranks):
    shape = step_shape(mode, merged, batch, RANKS)
    assert (shape.terms, shape.work, shape.ranks) == (terms, work, ranks)
    shape = step_shape(mode, merged, BATCH, RANKS)
    assert (shape.decode, shape.prefill, shape.images) == (3, 12, 2)
    assert shape.kv_tokens == 11 + 21 + 31
    assert shape.pairs == 7 * (4 + 4) + 5 * (0 + 3)


def points(model, rng, n=150):
    """Steps as a profile would have them."""
    shapes = []
    for i in range(n):
        decode = int(np.exp(rng.uniform(0, 6))) - i % 2
        prefill = int(np.exp(rng.uniform(0, 8.3))) if i % 2 else 0
        lora = bool(rng.integers(0, 2))
        terms = int(rng.integers(1, decode + prefill + 1)) if lora else 0
        ranks = 32 * int(rng.integers(1, 16)) if lora else 0
        mode = Mode.MIXTURE if rng.integers(0, 2) else Mode.UNMERGED
        images = int(rng.integers(0, 5)) if prefill else 0
        kv_tokens, pairs = decode * int(rng.integers(1, 900)), prefill * int(rng.integers(1, 900))
        work = terms * int(rng.choice([8, 64])) if lora else 0
        shapes.append(
            StepShape(mode, decode, prefill, images, kv_tokens, pairs, terms, work, ranks)
        )
    return [(s, model.step(s)) for s in shapes]


def test_a_fit_finds_the_coefficients_again():
    rng = np.random.default_rng(0)
    parts = {"decode_seconds": 9, "prefill_seconds": 12}
    times = {n: getattr(H200_7B, n) * rng.uniform(0.3, 3, count) for n, count in parts.items()}
    truth = replace(H200_7B, **{name: tuple(found) for name, found in times.items()})
    fitted = H200_7B.fit(points(truth, rng), machine="m", model="n", **BEYOND)
    for name in parts:
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=1e-5, abs=1e-12)
    assert fitted.measured and fitted.error < 1e-8


def test_a_noisy_fit_predicts_well_and_never_falls():
    rng = np.random.default_rng(1)
    noisy = [(s, t * rng.uniform(0.95, 1.05)) for s, t in points(H200_7B, rng)]
    fitted = H200_7B.fit(noisy, machine="m", model="n", **BEYOND)
    for shape, time in points(H200_7B, rng, 60):
        assert fitted.step(shape) == pytest.approx(time, rel=0.08)
    assert min(fitted.decode_seconds) >= 0 and min(fitted.prefill_seconds) >= 0
    bare = StepShape(decode=8, kv_tokens=800)
    assert fitted.step(replace(bare, decode=9)) >= fitted.step(bare)
    assert fitted.step(replace(bare, terms=8, work=64, ranks=8)) >= fitted.step(bare)


def test_a_step_without_a_graph_takes_at_least_what_the_host_needs():
    costs = replace(H200_7B, captured_rows=(256, 512), uncaptured_seconds=0.05)
    captured = StepShape(decode=112, prefill=400)
    beyond = replace(captured, prefill=401)
    assert costs.step(captured) == H200_7B.step(captured) < 0.05
    assert costs.step(beyond) == 0.05
    long = StepShape(prefill=8000, pairs=8000 * 4000)
    assert costs.step(long) == H200_7B.step(long) > 0.05
    assert costs.step(StepShape(decode=600)) < 0.05


def test_the_fit_knows_that_graphs_are_filled_up():
    """Times of full steps, asked for with fewer rows: the slope is that of the full ones."""
    true = replace(H200_7B, captured_rows=(), uncaptured_seconds=0.0)
    sizes = (64, 192, 384, 768)
    seen = [(StepShape(prefill=n - 30), true.step(StepShape(prefill=n))) for n in sizes]
    fitted = true.fit(seen, machine="m", model="n", captured_rows=sizes)
    for (shape, time), size in zip(seen, sizes, strict=True):
        assert fitted.step(shape) == pytest.approx(time, rel=1e-3)
        assert fitted.step(StepShape(prefill=size)) == pytest.approx(time, rel=1e-3)


def test_switches_and_loads():
    merges, unmerges = [(16, 0.003), (64, 0.006)], [0.002, 0.004, 0.0021]
    seen = {"merges": merges, "unmerges": unmerges, "loads": [(64, 0.01)]}
    fitted = H200_7B.fit([], machine="m", model="n", **seen)
    assert fitted.switch(None, "a", 64) == pytest.approx(0.006)
    assert fitted.switch("b", "a", 16) == pytest.approx(0.003)
    assert fitted.switch("a", None) == pytest.approx(0.0021)
    assert fitted.switch("a", "a", 64) == fitted.switch(None, None) == 0
    assert fitted.load(64) == pytest.approx(0.01)
    assert 0 < fitted.load(8) < 0.01


def test_saved_and_read_again(tmp_path):
    fitted = H200_7B.fit(points(H200_7B, np.random.default_rng(3)), machine="GPU 1", model="x/y 7B",
                         captured_rows=(64, 512), uncaptured_seconds=0.05)  # fmt: skip
    path = fitted.save(tmp_path)
    assert path == cache_path(tmp_path, "GPU 1", "x/y 7B")
    assert CostModel.read(path) == fitted
    assert load_or_estimate(tmp_path, "GPU 1", "x/y 7B") == fitted
    assert load_or_estimate(tmp_path, "GPU 2", "x/y 7B" * 60) is H200_7B  # no such name can be
    assert not H200_7B.measured


def test_damaged_files_and_those_of_other_versions_are_measured_anew(tmp_path, caplog):
    path = H200_7B.save(tmp_path)
    good = json.loads(path.read_text())
    changes = (
        {"version": 99}, {"unmerge_seconds": -1}, {"decode_seconds": {}}, {"merge_seconds": [1.0]},
        {"load_seconds": 10**400}, {"captured_rows": ["x"]}, {"uncaptured_seconds": math.nan},
        {"load_seconds": [0, 0]}, {"decode_seconds": dict.fromkeys(good["decode_seconds"], 0)},
    )  # fmt: skip
    for damage in ("{", "[" * 9999, "[]", *(json.dumps(good | change) for change in changes)):
        path.write_text(damage)
        with pytest.raises(CostModelError, match=r"costs\.json.*delete it"):
            CostModel.read(path)
        assert load_or_estimate(tmp_path, H200_7B.machine, H200_7B.model) is H200_7B
        assert str(path) in caplog.text
    with pytest.raises(CostModelError):
        CostModel.read(tmp_path / "none.json")
