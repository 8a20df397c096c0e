"""Two processes train what one does, whole copies (DDP) or parted layers (FSDP) on each."""

import pytest
from safetensors.torch import load_file

from tests.e2e.valora_train.test_factory import fusion, overrides, valora_train
from tests.support.forked import finish
from tests.support.helpers import save_random_llava
from tests.support.stores import new_store
from tests.support.team_learning import assert_two_learn_what_one_does, learn, processes

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
    data = overrides(tmp_path_factory.mktemp("data"), base)
    program = ["-m", "valora_train.cli", *data]
    new_store(tmp_path)
    said = finish(processes(2, program, "accelerate", cwd=tmp_path))
    assert said.count("fuse 01 ") == 1  # one speaks for both
    result = fusion(tmp_path)
    assert sorted(name for names in result["packing"].values() for name in names) == [
        "apple", "sky",
    ]  # fmt: skip
    assert (tmp_path / "bundles/own/bundle.json").is_file()
    assert not list((tmp_path / ".valora").glob("*.partial"))
    # One process finds all of it done.
    assert "up to date" in finish(valora_train(tmp_path, data))
