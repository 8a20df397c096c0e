"""What the terminal and MLflow say of an oracle table."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.oracle_tables import conflict_table, interference_table, made_up_table
from tests.support.stores import new_store
from valora_train.fusion.exact import exact_packing
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.strategies.registry import STRATEGIES
from valora_train.reporting.oracle_report import (
    report_shares,
    report_strategies,
    report_table,
)
from valora_train.reporting.study import StudyRun
from valora_train.settings import FusionSettings

NAMES = ["a", "b", "c", "d", "e"]


@pytest.fixture
def run(tmp_path):
    uri = new_store(tmp_path)
    return StudyRun(uri, "valora/x", "oracle 1", "oracle · x", {"seeds": [0]})


def rows_of(run, name, tmp_path):
    path = run._client.download_artifacts(run.run_id, f"{name}.json", str(tmp_path))
    table = json.loads(Path(path).read_text(encoding="utf-8"))
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def test_strategies_are_compared_with_the_optimum(run, tmp_path):
    said = StringIO()
    table = interference_table(NAMES, 3)
    with run:
        report_strategies(table, 40, FusionSettings(), Console(file=said, width=200), run)
    rows = {row["strategy"]: row for row in rows_of(run, "strategies", tmp_path)}
    assert set(rows) == set(STRATEGIES)
    assert len({row["optimum"] for row in rows.values()}) == 1
    assert "Strategies on 40 random vectors of requirements" in said.getvalue()
    data = run._client.get_run(run.run_id)
    assert data.data.metrics["at_optimum/affinity"] >= 0.9
    assert data.info.status == "FINISHED"


def test_packings_at_shares_of_the_dedicated_adapters(run, tmp_path):
    # a and b lose a twentieth beside each other, and everything else costs nothing.
    table = made_up_table(
        "abc", lambda name, group: 0.76 if name in "ab" and {"a", "b"} <= set(group) else 0.8
    )
    said = StringIO()
    with run:
        report_shares(table, [0.9, 0.97], FusionSettings(), Console(file=said, width=200), run)
    rows = {row["packing"]: row for row in rows_of(run, "shares", tmp_path)}
    assert rows["dedicated adapters"]["at 97%"] == "3 (1.000)"
    assert rows["one joint adapter"]["at 97%"] == "1 (0.950)"
    assert rows["without LoRA"]["at 90%"] == "0 (0.000)"
    for name in ("fewest (exact)", "affinity", "first_fit"):
        assert (rows[name]["at 90%"], rows[name]["at 97%"]) == ("1 (0.950)", "2 (1.000)")
    assert set(STRATEGIES) < set(rows)
    assert "keep a share of it on validation" in said.getvalue()


def test_the_packing_of_every_seed_is_shown(run, tmp_path):
    table = conflict_table(NAMES, 5, 0.4)
    asked = {name: Requirement(0.8) for name in NAMES}
    best = exact_packing(table, asked, 0)
    said = StringIO()
    with run:
        report_table(table, {0: asked}, True, Console(file=said, width=200), run)
    (row,) = rows_of(run, "optimum", tmp_path)
    assert row["adapters"] == str(len(best.packing))
    assert row["packing"] == " | ".join(" + ".join(group) for group in best.packing)
    assert row["kept on test"] == "5 of 5"  # test is as validation, and everything fits somewhere
    assert len(rows_of(run, "groups", tmp_path)) == 1 + 31
    assert (
        f"{len(best.packing)} adapters"
        in run._client.get_run(run.run_id).data.tags["mlflow.note.content"]
    )


def test_a_run_is_continued_by_its_key_and_ended_by_an_error(tmp_path):
    uri = new_store(tmp_path)
    first = StudyRun(uri, "valora/x", "sweep 7", "one", {})
    with pytest.raises(KeyboardInterrupt), first:
        raise KeyboardInterrupt
    assert first._client.get_run(first.run_id).info.status == "KILLED"
    again = StudyRun(uri, "valora/x", "sweep 7", "two", {})
    other = StudyRun(uri, "valora/x", "sweep 8", "three", {}, parent=again.run_id)
    assert again.run_id == first.run_id != other.run_id
    assert again._client.get_run(again.run_id).info.run_name == "two"
    assert other._client.get_run(other.run_id).data.tags["mlflow.parentRunId"] == again.run_id
