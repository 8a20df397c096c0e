"""The stage `oracle`: the table of all groups, what its identity is, and the bound of some."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.oracle_tables import made_up_table
from tests.support.stores import new_store
from tests.support.trial_inputs import trial_inputs as made_inputs
from tests.unit.valora_train.test_cli import LABELLED, write_coco
from valora_train import cli
from valora_train.errors import SettingsError, StageError
from valora_train.fusion.oracle import Measured, OracleTable
from valora_train.fusion.requirement import Requirement
from valora_train.settings import FusionSettings, ModelSettings, OracleSettings, TrainSettings
from valora_train.stage import write_json
from valora_train.stages import oracle
from valora_train.trials.inputs import read_inputs
from valora_train.trials.oracle import check_groups
from valora_train.trials.store import TrialStore


@pytest.fixture
def inputs(tmp_path, random_llava):
    return read_inputs(made_inputs(tmp_path / "in", random_llava))


def results(accuracy):
    """Results of groups, given as accuracies by names; a 0 before the name is without LoRA."""
    for group, reached in accuracy.items():
        alone = group[0] == 0
        names = group[1:] if alone else group
        yield {
            "seed": 3, "method": "head_only" if alone else "joint",
            "accuracy": {n: {"val": v, "test": v} for n, v in zip(names, reached, strict=True)},
        }  # fmt: skip


PAIRS = {
    (0, "sky"): [0.5], (0, "apple"): [0.2], (0, "leaf"): [0.3],
    ("sky",): [0.9], ("apple",): [0.7], ("leaf",): [0.8],
    ("apple", "sky"): [0.69, 0.9], ("leaf", "sky"): [0.8, 0.85], ("apple", "leaf"): [0.7, None],
}  # fmt: skip


@pytest.mark.parametrize(
    ("required", "adapters"),
    [
        ({"sky": 0.8, "apple": 0.6, "leaf": 0.7}, 2),  # apple and leaf diverge together
        ({"sky": 0.88, "apple": 0.695, "leaf": 0.7}, 3),
        ({"sky": 0.4, "apple": 0.6, "leaf": 0.2}, 1),  # only apple needs LoRA
        ({"sky": 0.95, "apple": 0.99, "leaf": 0.99}, 2),  # out of reach: keeps what it has alone
    ],
)
def test_pairs_prove_a_lower_bound(tmp_path, inputs, required, adapters):
    asked = {name: Requirement(value) for name, value in required.items()}
    write_json(tmp_path / oracle.GROUPS, oracle._groups(inputs, [3], results(PAIRS)))
    if adapters == 2 and required["sky"] == 0.95:
        # sky keeps 0.9 with apple, and apple 0.69 of its 0.7: below it without a margin
        asked = {name: Requirement(one.required, 0.02) for name, one in asked.items()}
    found = oracle.bounds(tmp_path, asked, FusionSettings(), {})
    assert {seed: bound.adapters for seed, bound in found.items()} == {3: adapters}


def test_domains_that_keep_their_bars_beside_one_that_does_not_can_share(tmp_path, inputs):
    asked = {"sky": Requirement(0.88), "apple": Requirement(0.695), "leaf": Requirement(0.7)}
    # Apple and sky fail alone together, and keep their bars beside leaf, which diverges.
    triple = {("apple", "leaf", "sky"): [0.7, None, 0.89]}
    write_json(tmp_path / oracle.GROUPS, oracle._groups(inputs, [3], results(PAIRS | triple)))
    (found,) = oracle.bounds(tmp_path, asked, FusionSettings(), {}).values()
    assert found.adapters == 2


@pytest.mark.parametrize(("seed", "val", "adapters"), [(3, 0.69, 3), (3, 0.695, 2), (4, 0.695, 3)])
def test_what_a_fusion_packed_can_share(tmp_path, inputs, seed, val, adapters):
    asked = {"sky": Requirement(0.88), "apple": Requirement(0.695), "leaf": Requirement(0.7)}
    write_json(tmp_path / oracle.GROUPS, oracle._groups(inputs, [3], results(PAIRS)))
    promised = {
        "sky": {"adapter": "a", "bar": 0.88, "accuracy": {"val": 0.9}},
        "apple": {"adapter": "a", "bar": 0.695, "accuracy": {"val": val}},
        "leaf": {"adapter": "b", "bar": 0.7, "accuracy": {"val": 0.8}},
        "rock": {"adapter": None, "bar": 0.7, "accuracy": {"val": 0.8}},
    }
    assert oracle.packing(tmp_path / "fuse") == []
    (tmp_path / "fuse").mkdir()
    write_json(tmp_path / "fuse" / "fusion.json", {"domains": promised})
    packed = oracle.packing(tmp_path / "fuse")
    assert packed[-1] == ["leaf"]
    (found,) = oracle.bounds(tmp_path, asked, FusionSettings(), {seed: packed}).values()
    assert found.adapters == adapters


@pytest.mark.parametrize(("share", "adapters"), [(0.99, 3), (0.98, 2), (0.2, 0)])
def test_bounds_are_of_shares_of_dedicated_adapters_where_those_are_asked(
    tmp_path, inputs, share, adapters
):
    # sky keeps 0.85 of its 0.90 beside leaf, apple 0.69 of its 0.70 beside sky.
    contracts = {name: Requirement(0.99, 0.02) for name in ("sky", "apple", "leaf")}
    write_json(tmp_path / oracle.GROUPS, oracle._groups(inputs, [3], results(PAIRS)))
    (bound,) = oracle.bounds(
        tmp_path, contracts, FusionSettings(of_dedicated=share, margin=0.0), {}
    ).values()
    assert bound.adapters == adapters


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row.pop("accuracy"),
        lambda row: row.update(accuracy={"cat": {"val": "high", "test": 0.5}}),
        lambda row: row.update(accuracy={"cat": {"val": float("nan"), "test": 0.5}}),
        lambda row: row.update(accuracy={"cat": 0.5}),
        lambda row: row.update(seed=None),
        lambda row: row.update(trial=["a"]),
    ],
)
def test_lines_that_are_no_results_are_left_out(tmp_path, damage):
    whole = {"trial": "b", "method": "joint", "domains": ["cat"], "seed": 0, "seconds": 1.5,
             "accuracy": {"cat": {"val": None, "test": 0.5}}}  # fmt: skip
    damaged = json.loads(json.dumps(whole | {"trial": "a"}))
    damage(damaged)
    file = tmp_path / "theirs.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in (damaged, whole)) + '\n{"trial": "c"')
    store = TrialStore(tmp_path / "ours")
    assert store.take_over(file) == {"b"}
    assert store.results() == {"b": whole}
    assert store.take_over(file) == {"b"}  # what is known is offered, too


def test_dedicated_adapters_come_with_the_results_of_another_machine(tmp_path):
    theirs, ours = TrialStore(tmp_path / "theirs"), TrialStore(tmp_path / "ours")
    reached = {"cat": {"val": 0.5, "test": 0.4}}
    for key in ("kept", "lost"):
        theirs.add(key, {"method": "joint", "domains": ["cat"], "seed": 0, "seconds": 1.5,
                         "accuracy": reached})  # fmt: skip
    theirs.write_snapshot("kept", {"head/cat/x": torch.tensor([3.0])})
    ours.take_over(theirs.folder / "trials.jsonl")
    assert ours.results() == theirs.results()
    adapter = ours.dedicated("kept")
    assert (adapter.key, adapter.read()) == ("kept", {"head/cat/x": torch.tensor([3.0])})
    assert ours.dedicated("lost") is None

    file = ours.folder / "snapshots/kept.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StageError, match=rf"the adapter {file} is damaged: delete it and run"):
        adapter.read()


def test_only_training_and_data_are_the_identity(tmp_path, inputs):
    settings = inputs.settings

    def key(**more):
        return oracle.oracle_stage(replace(settings, **more), inputs).key

    assert key() == key(model=replace(settings.model, device="cuda"))
    assert key() == key(oracle=OracleSettings(processes=7, requirements=5, pack="x"))
    assert key() != key(oracle=OracleSettings(seeds=[0, 1]))
    assert key() != key(oracle=OracleSettings(largest=2))


@pytest.fixture
def prepared(tmp_path, monkeypatch, capfd):
    """Runs `valora-train` on two domains that take their labels instead of a teacher."""
    monkeypatch.chdir(tmp_path)
    new_store(tmp_path)
    first = write_coco(tmp_path / "cats")
    write_coco(tmp_path / "dogs", colour="blue", name="dog")
    more = [
        "+domain@domains.dog=coco", "domains.dog.name=dog", "domains.dog.labels=[dog]",
        f"domains.dog.source.path={tmp_path}/dogs/cats.json", "domains.cat.teacher=labels",
        "domains.dog.teacher=labels", "train.steps=2", "train.probe_steps=2", "train.batch_size=4",
        "processes=1",
    ]  # fmt: skip
    assert set(LABELLED) <= set(first)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["valora-train", *first, *more, *arguments])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code
        out, err = capfd.readouterr()
        return status, out, err

    return run


def table_of(folder: Path) -> OracleTable:
    (file,) = folder.glob(".valora/oracle-own-*[0-9a-f]/oracle.json")
    return OracleTable.read(file)


@pytest.mark.slow
def test_the_command_makes_a_complete_table(prepared, tmp_path, one_thread):
    asked = ["command=oracle", "oracle.seeds=[2]", "oracle.processes=1", "oracle.requirements=40"]
    status, out, err = prepared(*asked)
    assert status == 0, err
    assert "5 of 5 trainings" in out
    assert "The fewest adapters of own" in out
    table = table_of(tmp_path)
    table.require_complete()
    assert (table.domains, table.seeds) == (("cat", "dog"), (2,))
    known = TrialStore(tmp_path / ".valora" / "trials").results()
    both = next(row for row in known.values() if row["domains"] == ["cat", "dog"])
    found = both["accuracy"]["dog"]
    assert table.reached(2, ["dog", "cat"])["dog"] == Measured(found["val"], found["test"])
    # A finished table is replayed without data and without training.
    (file,) = tmp_path.glob(".valora/oracle-own-*[0-9a-f]/oracle.json")
    status, again, err = prepared(*asked, f"oracle.table={file}", "oracle.shares=[0.8]")
    assert status == 0, err
    assert "up to date" not in again
    for shown in ("The fewest adapters of own", "Strategies on 40 random", "at 80%"):
        assert shown in again
    # Other requirements train nothing, and neither does a folder of stages that was deleted.
    status, out, _ = prepared(*asked, "domains.dog.required=0.31")
    assert status == 0
    unchanged = [line.split()[0] for line in out.splitlines() if line.endswith("up to date")]
    assert "oracle" in unchanged
    assert "trainings after" not in out
    # What was trained on another machine is taken over.
    file = tmp_path / ".valora" / "trials" / "trials.jsonl"
    file.rename(tmp_path / "theirs.jsonl")
    status, out, err = prepared(*asked, "oracle.largest=1", "oracle.results=theirs.jsonl")
    assert status == 0, err
    assert "trainings after" not in out
    assert "Lower bound on adapters" in out
    assert "4 of 4 trainings are in theirs.jsonl" in out
    # Those of other data or settings are not.
    status, _, err = prepared(*asked, "train.steps=3", "oracle.results=theirs.jsonl")
    assert status == 1
    assert "holds 5 results, but none of the 5 trainings that this oracle needs" in err
    assert len(TrialStore(tmp_path / ".valora" / "trials").results()) == len(known)


@pytest.mark.slow
def test_bounds_know_what_the_fusion_of_the_same_settings_packed(
    prepared, tmp_path, one_thread, monkeypatch
):
    asked = ["fusion.of_dedicated=0.5", "fusion.unreachable=keep", "oracle.processes=1"]
    status, _, err = prepared("command=fuse", *asked)
    assert status == 0, err
    (fused,) = (one for one in tmp_path.glob(".valora/fuse-own-*") if one.is_dir())
    seen = []
    real = oracle.packing
    monkeypatch.setattr(oracle, "packing", lambda folder: seen.append(folder.name) or real(folder))
    of_groups = ["command=oracle", "oracle.largest=1", *asked]
    status, out, err = prepared(*of_groups, "oracle.seeds=[0]")
    assert status == 0, err
    assert "Lower bound on adapters" in out
    assert seen == [fused.name]
    status, _, err = prepared(*of_groups, "oracle.seeds=[5]")  # has other dedicated adapters
    assert status == 0, err
    assert len(seen) == 1


def test_packing_writes_all_that_another_machine_needs(prepared, tmp_path):
    status, out, err = prepared(
        "command=oracle", "oracle.pack=packed", "oracle.seeds=[4,7]", "model.dtype=bfloat16"
    )
    assert status == 0, err
    assert "python -m valora_train.trials FOLDER --seeds 4 7`" in " ".join(out.split())
    inputs = read_inputs(tmp_path / "packed")
    assert inputs.settings.model == ModelSettings(dtype="bfloat16")
    assert inputs.settings.train == TrainSettings(steps=2, probe_steps=2, batch_size=4)
    assert len(inputs.read("cat", "val")) > 1
    assert not list(tmp_path.glob(".valora/oracle-*"))


def test_a_comparison_is_packed_too_and_not_trained_here(prepared, tmp_path):
    status, out, err = prepared("command=compare", "oracle.pack=packed", "compare.seeds=[3]")
    assert status == 0, err
    assert "python -m valora_train.trials FOLDER --compare`" in " ".join(out.split())
    assert read_inputs(tmp_path / "packed").settings.compare.seeds == [3]
    assert not list(tmp_path.glob(".valora/compare-*"))
    assert not list(tmp_path.glob(".valora/trials/trials.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["command=fuse", "oracle.pack=packed"], "is for command=oracle or compare, and command"),
        (["command=compare", "oracle.table=x"], "oracle.table=x is for command=oracle, and "),
        (
            ["command=export", "oracle.results=x"],
            "oracle.results=x is for command=oracle or compare",
        ),
        (["command=teach", "oracle.pack=x"], "command=teach would ignore it: set oracle.pack=null"),
    ],
)
def test_settings_that_a_command_would_ignore_are_refused(prepared, arguments, message):
    status, _, err = prepared(*arguments)
    assert status == 1
    assert message in err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["oracle.seeds=[]"], "oracle.seeds=[] must name at least one seed"),
        (["oracle.seeds=[1,1]"], "none of them twice"),
        (["oracle.largest=-1"], "oracle.largest must be at least 0"),
        (["oracle.results=nowhere"], "oracle.results=nowhere is no file"),
        (["oracle.results=damaged"], "damaged holds no results of trials"),
        (["oracle.table=nowhere.json"], "cannot read the oracle table nowhere.json"),
        (["oracle.table=damaged"], "damaged is no JSON"),
        (["oracle.table=birds.json"], "knows no domain cat, dog, only owl"),
        (["oracle.table=three.json"], "also holds owl, and is replayed with all of its domains"),
        (["oracle.table=x", "oracle.pack=y"], "is replayed and nothing is trained"),
        (["oracle.pack=damaged"], "is a file, choose another folder"),
        (["fusion.parent=bundles/x"], "command=oracle extends no bundle"),
        (["model.shard=true"], "set model.shard=false"),
        (["task=mixed", "oracle.seeds=[0.5]"], "oracle.seeds"),
    ],
)
def test_mistakes_are_one_sentence(prepared, tmp_path, arguments, message):
    (tmp_path / "damaged").write_text("{\n[]\n")
    for name, domains in (("birds", ["owl"]), ("three", ["cat", "dog", "owl"])):
        made_up_table(domains, lambda *_: 0.9).write(tmp_path / f"{name}.json")
    status, _, err = prepared("command=oracle", *arguments)
    assert status == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_too_many_domains_are_refused(inputs, monkeypatch):
    domains = {f"d{n}": replace(inputs.domain("sky"), name=f"d{n}") for n in range(11)}
    from valora_train.checks import _check_oracle

    many = replace(inputs.settings, domains=domains)
    with pytest.raises(SettingsError, match="oracle of 11 domains takes 2,047 trainings a seed"):
        _check_oracle(many)
    _check_oracle(replace(many, oracle=OracleSettings(largest=2)))


def test_groups_of_a_shelf_are_counted_before_they_are_listed():
    for largest in (1, 2, 3, 4):
        check_groups(37, largest, "task.only", "oracle.largest=2")
    check_groups(10, 0, "task.only", "oracle.largest=2")
    with pytest.raises(SettingsError, match=r"takes 510,415 trainings a seed: .*oracle.largest=2"):
        check_groups(37, 5, "task.only", "oracle.largest=2")
    with pytest.raises(SettingsError, match="takes 4,095 trainings a seed"):
        check_groups(12, 40, "--only", "--largest 2")


def test_nothing_of_a_diverged_training_is_known():
    assert all(map(math.isnan, oracle._measured({"val": None, "test": None})))
    assert json.dumps(oracle._measured({"val": 0.5, "test": 0.25})) == "[0.5, 0.25]"


@pytest.mark.slow
def test_the_command_compares_ways_to_serve(prepared, tmp_path, one_thread):
    asked = ["command=compare", "compare.seeds=[2]", "compare.strategies=[first_fit]",
             "compare.ewc=[10]", "oracle.processes=1", "train.steps_per_held=1"]  # fmt: skip
    status, out, err = prepared(*asked)
    assert status == 0, err
    assert "Ways to serve own" in out
    (folder,) = tmp_path.glob(".valora/compare-own-*[0-9a-f]")
    text = (folder / "comparison.md").read_text()
    for name in ("dedicated adapters", "without LoRA", "one joint adapter", "merged: dare_ties",
                 "EWC, strength 10", "first_fit at 95%"):  # fmt: skip
        assert f"| {name} |" in text
    assert (folder / "pareto.png").stat().st_size > 1000
    status, out, err = prepared(*asked, "compare.strategies=[]")
    assert (status, "trainings after" in out) == (0, False)  # all of that is known


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare.strategies=[best]"], "unknown fusion strategy 'best'"),
        (["compare.shares=[]"], "compare.shares is empty"),
        (["compare.shares=[1.2]"], "compare.shares.0 must be at most 1"),
        (["compare.seeds=[]"], "compare.seeds=[] must name at least one seed"),
        (["fusion.parent=x"], "command=compare extends no bundle"),
    ],
)
def test_mistakes_in_comparisons_are_one_sentence(prepared, arguments, message):
    status, _, err = prepared("command=compare", *arguments)
    assert status == 1
    assert message in err.strip().splitlines()[-1]
