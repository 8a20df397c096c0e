"""Oracle tables: what they hold, their file, and what they refuse."""

import json
import math
from itertools import combinations

import pytest

from tests.support.oracle_tables import made_up_table
from valora_train.errors import SettingsError
from valora_train.fusion.oracle import Measured, OracleTable

NAMES = ("bicycle", "person", "vehicle")


def partial_table():
    table = OracleTable("detection", NAMES, [3, 5], {"train": {"steps": 7}}, {"person": 10.0})
    table.teacher["person"] = Measured(4.5, 4.25)
    table.put_head_only(3, "bicycle", Measured(0.25, 0.375))
    table.put(3, {"person": Measured(1.5, 2.5)})
    table.put(5, {"vehicle": Measured(0.75, math.nan), "bicycle": Measured(0.5, 0.625)})
    return table


def test_groups_are_all_subsets_small_ones_first():
    groups = list(partial_table().groups())
    assert groups == [g for size in (1, 2, 3) for g in combinations(NAMES, size)]


def test_missing_groups_and_completeness():
    table = partial_table()
    assert len(table.missing()) == 2 * 7 - 2
    assert table.missing()[0] == (3, ("bicycle",))
    assert (3, ("person",)) not in table.missing()
    with pytest.raises(
        SettingsError,
        match=r"x\.json is incomplete: 12 of 14 trainings are missing \(first: bicycle with seed 3",
    ):
        table.require_complete("x.json")
    whole = made_up_table(NAMES, lambda name, group: 1 / len(group))
    whole.require_complete()
    del whole.head_only(0)["person"]
    with pytest.raises(SettingsError, match="accuracy of person without LoRA is missing"):
        whole.require_complete()


def test_a_file_gives_back_the_same_table(tmp_path):
    table = partial_table()
    table.write(tmp_path / "table.json")
    again = OracleTable.read(tmp_path / "table.json")
    assert again.identity == table.identity
    assert (again.task, again.domains, again.seeds) == ("detection", NAMES, (3, 5))
    assert again.made_of == {"train": {"steps": 7}}
    assert again.largest == {"bicycle": 1.0, "person": 10.0, "vehicle": 1.0}
    assert again.teacher == table.teacher
    assert again.head_only(3) == {"bicycle": (0.25, 0.375)} and again.head_only(5) == {}
    assert again.reached(3, ["person"]) == {"person": (1.5, 2.5)}
    pair = again.reached(5, ["vehicle", "bicycle"])
    assert list(pair) == ["bicycle", "vehicle"] and pair["bicycle"] == (0.5, 0.625)
    assert pair["vehicle"].val == 0.75 and math.isnan(pair["vehicle"].test)
    assert again.missing() == table.missing()


def test_identity_depends_on_what_the_table_is_made_of_not_on_progress():
    table = partial_table()
    before = table.identity
    table.put(3, {"vehicle": Measured(0.1, 0.1)})
    assert table.identity == before
    other = OracleTable("detection", NAMES, [3, 5], {"train": {"steps": 8}})
    assert other.identity != before


def test_what_a_table_cannot_hold():
    table = partial_table()
    for reached in ({}, {"weather": Measured(0.5, 0.5)}):
        with pytest.raises(KeyError):
            table.put(3, reached)
    with pytest.raises(KeyError):
        table.put(4, {"person": Measured(0.5, 0.5)})
    with pytest.raises(KeyError):
        table.put_head_only(3, "weather", Measured(0.5, 0.5))
    with pytest.raises(SettingsError, match="11 domains takes 2047 trainings a seed"):
        OracleTable("t", [f"d{n}" for n in range(11)], [0], {})
    with pytest.raises(SettingsError, match="1 to 10 domains"):
        OracleTable("t", [], [0], {})
    with pytest.raises(SettingsError, match="at least one seed"):
        OracleTable("t", NAMES, [], {})


def change(**new):
    return lambda value: value | new


def change_group(pair):
    def apply(value):
        value["groups"]["3"]["person"]["person"] = pair
        return value

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda value: [], "is no oracle table"),
        (lambda value: {"domains": 1}, "is no oracle table"),
        (change(schema_version=2), "has version 2 of the oracle table's format"),
        (lambda value: {k: v for k, v in value.items() if k != "head_only"}, "head_only is miss"),
        (change(identity="0"), "its identity is not the hash"),
        (change(made_of={"train": {"steps": 70}}), "its identity is not the hash"),
        (change(seeds=["3"]), "'3' is no seed"),
        (change(domains=3), "is damaged"),
        (change(groups=[]), "is damaged"),
        (change_group([0.5]), "is no pair of accuracies of person"),
        (change_group([0.5, 11.0]), "11.0 is no accuracy of person"),
        (change_group([0.5, -0.1]), "-0.1 is no accuracy of person"),
        (change_group(["0.5", 0.5]), "'0.5' is no accuracy of person"),
        (change_group(None), "is damaged"),
    ],
)
def test_damaged_files_are_refused_in_one_sentence(tmp_path, spoil, message):
    file = tmp_path / "table.json"
    partial_table().write(file)
    file.write_text(json.dumps(spoil(json.loads(file.read_text()))))
    with pytest.raises(SettingsError, match=message) as caught:
        OracleTable.read(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_missing_and_cut_files_are_refused(tmp_path):
    file = tmp_path / "table.json"
    with pytest.raises(SettingsError, match=r"cannot read the oracle table .*No such file"):
        OracleTable.read(file)
    with pytest.raises(SettingsError, match="cannot read the oracle table"):
        OracleTable.read(tmp_path)
    partial_table().write(file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SettingsError, match="is no JSON, or was cut short"):
        OracleTable.read(file)
