"""The base model of most tests: four query heads on two heads of keys and values."""

import pytest

from tests.support.engine_reference import Reference
from tests.support.lmm_checkpoints import save_llava
from tests.support.serve_helpers import EVERYTHING, LANGUAGE, MLP, PROJECTOR, VISION, make_adapters


def neighbours(base, folder, everything=6):
    """Adapters of which neighbours differ in rank, scaling and targets."""
    return make_adapters(
        folder, base, 0.25,
        attention=(1, 8, 16, LANGUAGE),
        mlp=(2, 3, 7, MLP, ("use_rslora", True)),
        patterns=(
            3, 4, 6, f"{LANGUAGE}|{MLP}",
            ("rank_pattern", {"q_proj": 7, r"layers\.1\.mlp\.up_proj": 2}),
            ("alpha_pattern", {"v_proj": 11}),
        ),
        tower=(4, 5, 9, VISION),
        projector=(5, 2, 5, PROJECTOR),
        everything=(6, everything, 13, EVERYTHING),
    )  # fmt: skip


@pytest.fixture(scope="package")
def base(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("llava"), seed=7))


@pytest.fixture(scope="package")
def adapters(base, tmp_path_factory):
    return neighbours(base, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def reference(base, adapters):
    """PEFT's models of a module's own adapters."""
    return Reference(base, adapters)
