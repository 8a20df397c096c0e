"""The shipped oracle tables: of the default settings, complete, and what is claimed of them."""

from functools import partial
from itertools import product

import pytest
from hydra import compose, initialize_config_dir

from valora_train.cli import config_folder
from valora_train.errors import SettingsError
from valora_train.fusion import shipped
from valora_train.fusion.exact import exact_packing
from valora_train.fusion.oracle import OracleTable
from valora_train.fusion.replay import (
    asked_of,
    compare,
    random_requirements,
    replay,
    served,
    share_requirements,
)
from valora_train.fusion.requirement import contract_of
from valora_train.fusion.shipped import FOLDER, finished_table, shipped_tasks
from valora_train.fusion.strategies.registry import make_strategy
from valora_train.settings import from_config

TASKS = shipped_tasks()
ADAPTERS = {"classification": 2, "detection": 1, "video": 1}
"""How many each task needs at its default contract."""
tasks = pytest.mark.parametrize("task", TASKS)


def settings_of(*overrides):
    with initialize_config_dir(str(config_folder()), version_base=None):
        return from_config(compose("config", ["oracle.table=shipped", *overrides]))


@tasks
def test_a_shipped_table_is_of_the_default_settings_and_of_the_shipped_base_model(task):
    settings = settings_of(f"task={task}")
    table = finished_table(settings)
    assert table.task == task
    assert list(table.domains) == [domain.name for domain in settings.chosen()]
    assert table.measured


@tasks
def test_the_default_strategy_finds_the_fewest_adapters(task):
    settings = settings_of(f"task={task}")
    table = finished_table(settings)
    fusion = settings.fusion
    names = (fusion.strategy, "first_fit", "paper")
    found = compare(
        table,
        {name: partial(make_strategy, name, table) for name in names},
        list(random_requirements(table, 120, 0)),
        head_only=fusion.head_only,
        order=fusion.order,
    )
    best = found[fusion.strategy]
    assert best.at_optimum >= 0.9 and best.most_above <= 1
    assert best.at_optimum >= found["first_fit"].at_optimum >= found["paper"].at_optimum


@tasks
def test_the_default_contract_is_kept_by_the_fewest_adapters(task):
    settings = settings_of(f"task={task}")
    table = finished_table(settings)
    contracts = {
        domain.name: contract_of(domain).requirement(
            domain.name, settings.fusion.margin, *table.teacher.get(domain.name, (None, None))
        )
        for domain in settings.chosen()
    }
    for seed, asked in asked_of(table, contracts, settings.fusion).items():
        found = replay(make_strategy(settings.fusion.strategy), table, asked, seed)
        assert (found.adapters, found.unreachable) == (ADAPTERS[task], ())
        assert found.adapters == len(exact_packing(table, asked, seed).packing)
        assert found.attempts <= (1 if found.adapters == 1 else 3)
        assert len(found.head_only) <= len(table.domains) / 2, "LoRA is needed"
        reached = served(table, found.packing.values(), seed)
        assert all(reached[name].test >= asked[name].promise for name in asked)


@tasks
def test_every_domain_keeps_its_share_wherever_it_is_packed(task):
    settings = settings_of(f"task={task}")
    table = finished_table(settings)
    for share, seed in product(settings.oracle.shares, table.seeds):
        asked = share_requirements(table, share, seed)
        played = replay(make_strategy(settings.fusion.strategy, table), table, asked, seed)
        for group in played.packing.values():
            for name, reached in table.reached(seed, group).items():
                assert reached.val >= share * table.reached(seed, [name])[name].val


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.steps=7"], "was made with other settings (train.steps): leave them as they are"),
        (["domains.person.prompt=find people"], "(domain person.prompt)"),
        (["task.only=[person]"], "and is replayed with all of its domains: choose them, too"),
        (["task=shelf"], "no oracle table of task shelf is shipped, only of "),
    ],
)
def test_other_settings_are_refused(overrides, message):
    with pytest.raises(SettingsError) as error:
        finished_table(settings_of("task=detection", *overrides))
    assert message in str(error.value)


def test_a_table_of_another_base_model_is_refused(tmp_path, monkeypatch):
    table = OracleTable.read(FOLDER / "detection.json")
    table.made_of["base"] = "0" * 64
    table.write(tmp_path / "detection.json")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with pytest.raises(SettingsError, match=r"was made with other settings \(base\)"):
        finished_table(settings_of("task=detection"))
