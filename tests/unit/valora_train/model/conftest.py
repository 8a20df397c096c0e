"""Checkpoints of every family, and a few images."""

import pytest

from tests.support.helpers import coloured_squares
from tests.support.lmm_checkpoints import CHECKPOINTS


@pytest.fixture(scope="module")
def images():
    return [sample.image for sample in coloured_squares(3, seed=7, label="a")]


@pytest.fixture(scope="module", params=list(CHECKPOINTS))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory):
    return CHECKPOINTS[family](tmp_path_factory.mktemp(family), seed=5)
