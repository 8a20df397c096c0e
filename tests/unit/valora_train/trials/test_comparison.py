"""Ways to serve the domains, from results that are worked out by hand."""

import pytest

from valora_train.reporting.comparison import COLUMNS, comparison_rows, pareto_picture
from valora_train.settings import CompareSettings, FusionSettings
from valora_train.trials.comparison import contenders, first_trials, fusion_trials, pareto

SETTINGS = CompareSettings(
    seeds=[4], strategies=["paper", "rehearsal"], shares=[0.9, 0.99], ewc=[3.0]
)
NAMES = ["b", "a"]


def result(trial, reached, seconds=60.0, adapters=None, **more):
    accuracy = {
        name: {"val": value, "test": value and value - 0.1}
        for name, value in zip(trial.domains, reached, strict=True)
    }
    return {
        "method": trial.method, "domains": list(trial.domains), "seed": trial.seed,
        "options": dict(trial.options), "accuracy": accuracy, "seconds": seconds,
        "adapters": adapters or {"adapter-1": trial.domains}, "attempts": 1, **more,
    }  # fmt: skip


def results():
    reached = {
        ("joint", ("a",)): [0.9], ("joint", ("b",)): [0.6], ("head_only", ("a",)): [0.5],
        ("head_only", ("b",)): [0.35], ("joint", ("a", "b")): [0.82, 0.6],
        ("merge", ("b", "a")): [0.6, 0.9], ("ewc", ("b", "a")): [None, 0.9],
    }  # fmt: skip
    for trial in first_trials(NAMES, SETTINGS):
        more = {}
        if trial.method == "merge":
            one = {"b": {"val": 0.3, "test": 0.2}, "a": {"val": 0.9, "test": 0.88}}
            more = {"variants": {"ties": {"accuracy": one, "seconds": 30.0}}}
        yield result(trial, reached[trial.method, trial.domains], **more)


def test_every_way_has_its_share_of_the_dedicated_adapters():
    found = {one.name: one for one in contenders(list(results()))}
    assert set(found) == {
        "dedicated adapters", "without LoRA", "one joint adapter", "merged: ties",
        "EWC, strength 3",
    }  # fmt: skip
    alone = found["dedicated adapters"]
    assert (alone.adapters, alone.worst, alone.mean, alone.minutes) == (2, 1.0, 1.0, 2.0)
    joint = found["one joint adapter"]
    assert joint.worst == pytest.approx(0.72 / 0.8)
    assert joint.mean == pytest.approx((0.9 + 1) / 2)
    assert found["merged: ties"].worst == pytest.approx(0.4)
    assert found["merged: ties"].mean == pytest.approx((0.4 + 1.1) / 2)
    assert found["merged: ties"].minutes == 0.5
    assert found["without LoRA"].adapters == 0
    assert found["without LoRA"].worst == pytest.approx(0.4 / 0.8)
    assert found["EWC, strength 3"].worst == 0  # diverged


def test_fusions_ask_for_shares_of_the_dedicated_adapters():
    first = list(results())
    largest = {"a": 1.0, "b": 10.0}
    trials = fusion_trials(NAMES, first, SETTINGS, FusionSettings(order="probe"), largest)
    assert len(trials) == 4
    paper, plain, *_ = trials
    assert paper.options["fusion"] == {"strategy": "paper", "order": "random", "head_only": False}
    assert plain.options["fusion"] == {"strategy": "rehearsal", "order": "probe", "head_only": True}
    assert plain.options["required"]["a"] == (pytest.approx(0.81), 0.0, 1.0)
    assert plain.options["required"]["b"] == (pytest.approx(0.54), 0.0, 10.0)
    assert plain.options["dedicated"]
    packed = result(plain, [0.55, 0.9], adapters={"x": ["b"], "y": ["a"]})
    found = contenders([*first, packed])[-1]
    assert (found.name, found.adapters, found.kept) == ("rehearsal at 90%", 2, 2)
    assert contenders([*first, result(trials[2], [0.55, 0.9])])[-1].kept == 1


def test_table_and_picture():
    found = contenders(list(results()))
    rows = comparison_rows(found)
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert rows[0][:3] == ["dedicated adapters", "2", "1.000 (1.000–1.000)"]
    figure = pareto_picture(found, "x")
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "one joint adapter, 1.0 min" in texts


def test_minutes_of_several_devices_name_them():
    rows = [row | {"device": "cuda" if len(row["domains"]) == 1 else "cpu"} for row in results()]
    told = {row[0]: row[-1] for row in comparison_rows(contenders(rows))}
    assert told["dedicated adapters"] == "2.0 (cuda)"
    assert told["merged: ties"] == "0.5 (cpu)"
    same = contenders([row | {"device": "cpu"} for row in results()])
    assert comparison_rows(same)[0][-1] == "2.0"


def test_the_front_has_no_row_that_another_beats():
    assert pareto([(2, 1.0), (1, 0.8), (3, 1.0), (1, 0.9), (0, 0.1), (2, 0.85)]) == [4, 3, 0]
    assert pareto([]) == []
