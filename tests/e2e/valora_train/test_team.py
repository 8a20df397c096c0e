"""Two processes train what one does, whole copies (DDP) or parted layers (FSDP) on each."""

import pytest
from safetensors.torch import load_file

from tests.e2e.valora_train.test_factory import fusion, overrides, valora_train
from tests.support.forked import finish
from tests.support.helpers import save_random_llava
from tests.support.stores import new_store
from tests.support.team_learning import assert_two_learn_what_one_does, forked_team, learn

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_random_llava(tmp_path_factory.mktemp("llava"), seed=1)


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    learn(str(base), False, folder)
    return load_file(folder / "0.safetensors")


@pytest.mark.parametrize("shard", [False, True], ids=["copies", "parted"])
def test_two_processes_learn_what_one_does(shard, base, alone, tmp_path):
    assert_two_learn_what_one_does(base, shard, alone, tmp_path)


def test_the_factory_with_two_processes(base, tmp_path, tmp_path_factory):
    few = ["train.steps=6", "train.probe_steps=4"]
    few += [f"domains.{name}.required=0.05" for name in ("apple", "sky")]
    data = [*overrides(tmp_path_factory.mktemp("data"), base), *few]
    new_store(tmp_path)
    said = "".join(map(finish, forked_team("valora_train.cli", data, tmp_path)))
    assert said.count("fuse 01 ") == 1  # one speaks for both
    packed = [name for names in fusion(tmp_path)["packing"].values() for name in names]
    assert sorted(packed) == ["apple", "sky"]
    assert (tmp_path / "bundles/own/bundle.json").is_file()
    assert not list((tmp_path / ".valora").glob("*.partial"))
    # One process finds all of it done.
    assert "up to date" in finish(valora_train(tmp_path, data))
