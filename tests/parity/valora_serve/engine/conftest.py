"""The base model of most tests: four query heads on two heads of keys and values."""

import pytest

from tests.support.engine_reference import Reference
from tests.support.lmm_checkpoints import save_llava


@pytest.fixture(scope="package")
def base(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("llava"), seed=7))


@pytest.fixture(scope="module")
def reference(base, adapters):
    """PEFT's models of a module's own adapters."""
    return Reference(base, adapters)
