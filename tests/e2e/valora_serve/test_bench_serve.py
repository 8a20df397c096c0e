"""The sections of `bench_serve` that follow the papers' figures, on a small shape without a GPU."""

import json

import pytest

from tests.bench.valora_serve.bench_serve import main
from tests.bench.valora_serve.harness import found
from tests.bench.valora_serve.sections import starving

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SMALL = [
    "--device", "cpu", "--layers", "1", "--width", "128", "--no-vision", "--window", "1",
    "--answer", "4", "--rate", "4", "--requests", "4", "--counts", "2", "5", "--overload", "4",
    "--picture-rates", "3", "--policies", "valora", "slora", "--most-streams", "2", "--frames", "2",
]  # fmt: skip


def tables(tmp_path, *arguments):
    found.clear()
    out = tmp_path / "figures.json"
    main([*arguments, *SMALL, "--costs", str(tmp_path), "--out", str(out)])
    return list(json.loads(out.read_text()).values())


def test_ablation(tmp_path):
    parts = ["none", "static", "memory"]
    (table,) = tables(tmp_path, "ablation", "--parts", *parts)
    assert sorted(row[0] for row in table["rows"]) == sorted(parts)
    assert all(row[1] > 0 for row in table["rows"])


def test_switching_and_starving(tmp_path, monkeypatch):
    monkeypatch.setattr(starving, "ROWS", 16)  # one of them is the smallest share
    switched, starved = tables(tmp_path, "switching", "starving")
    assert [row[1] for row in switched["rows"]] == ["swift", "by matrix"] * 3
    assert sum(row[2] for row in switched["rows"]) > 0
    assert len(starved["rows"]) == len(starving.SHARES)


def test_packed(tmp_path):
    with pytest.raises(SystemExit, match="costs: those that ship are an H200's"):
        tables(tmp_path, "costs")
    (table,) = tables(tmp_path, "packed")
    assert [row[0] for row in table["rows"]] == [5, 100]
    assert table["rows"][1][4] == "no memory"


def test_populations_and_slo(tmp_path):
    populated, attained, satisfied = tables(tmp_path, "populations", "slo")
    assert [row[0] for row in populated["rows"]] == ["valora", "slora"]
    assert len(populated["rows"][0]) == 4
    for table in (attained, satisfied):
        assert len(table["rows"]) == 3
        assert all(0 <= row[1] <= 1 for row in table["rows"])


def test_retrieval_and_video(tmp_path):
    retrieved, streams = tables(tmp_path, "retrieval", "video")
    assert [row[0] for row in retrieved["rows"]] == ["valora", "slora", "PEFT"]
    assert all(row[2] > 0 and row[5] > 0 for row in retrieved["rows"])
    assert [row[1] for row in streams["rows"]] == ["head", "LM head", "LM head"]
    assert all(0 <= row[2] <= 2 for row in streams["rows"])


def test_tower(tmp_path):
    (table,) = tables(tmp_path, "tower")
    assert [row[1:3] for row in table["rows"]] == [
        [1, 1], [4, 1], [16, 1], [1, 1], [4, 4], [16, 16],
    ]  # fmt: skip
    assert all(row[3] > 0 for row in table["rows"])
