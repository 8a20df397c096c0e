"""Two GPUs train what one does."""

import pytest
import torch
from safetensors.torch import load_file

from tests.support.helpers import save_random_llava
from tests.support.team_learning import assert_two_learn_what_one_does, learn

too_few = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = [pytest.mark.gpu, too_few]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_random_llava(tmp_path_factory.mktemp("llava"), seed=1)


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    learn(str(base), False, folder, "cuda")
    return load_file(folder / "0.safetensors")


@pytest.mark.parametrize("shard", [False, True], ids=["copies", "parted"])
def test_two_gpus_learn_what_one_does(shard, base, alone, tmp_path):
    assert_two_learn_what_one_does(base, shard, alone, tmp_path, "cuda")
