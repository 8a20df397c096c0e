"""Checkpoints of every family, and a few images."""

import pytest

from tests.support.cases import others_slow
from tests.support.helpers import coloured_squares
from tests.support.lmm_checkpoints import CHECKPOINTS, TEXT_CHECKPOINTS


@pytest.fixture(scope="module")
def images():
    return [sample.image for sample in coloured_squares(3, seed=7, label="a")]


FAMILIES = CHECKPOINTS | TEXT_CHECKPOINTS
FAST = ("llava", "qwen3_vl", "idefics3", "llama")


@pytest.fixture(scope="module", params=others_slow(FAST, FAMILIES))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory):
    return FAMILIES[family](tmp_path_factory.mktemp(family), seed=5)
