"""A base model, adapters and a bundle for the tests of the engine."""

import pytest

from tests.support.engine_reference import Reference
from tests.support.lmm_checkpoints import save_llava
from tests.support.serve_helpers import LANGUAGE, MLP, DomainSpec, make_adapters, make_bundle


@pytest.fixture(scope="package")
def base(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("llava"), seed=2))


@pytest.fixture(scope="package")
def adapters(base, tmp_path_factory):
    kinds = {
        name: (seed, 2 + seed, 5 + seed, LANGUAGE if seed % 2 else MLP)
        for seed, name in enumerate("abcdef")
    }
    return make_adapters(tmp_path_factory.mktemp("adapters"), base, 0.3, **kinds)


@pytest.fixture(scope="package")
def reference(base, adapters):
    return Reference(base, adapters)


@pytest.fixture(scope="package")
def scene(base, tmp_path_factory):
    spec = {"scene": DomainSpec("adapter-1", "classification", ["x", "y", "z"])}
    folder = tmp_path_factory.mktemp("bundle") / "scene"
    return make_bundle(folder, base, domains=spec, adapters={"adapter-1": {}})
