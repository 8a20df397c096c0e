"""A fusion strategy of another package decides in a real run of the factory."""

from dataclasses import replace

import pytest

from tests.e2e.test_architectures import settings_of
from tests.support.stores import run_quietly
from valora_data.contract.bundle import read_bundle
from valora_train.errors import SettingsError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "gate_here")]

OWN_ADAPTERS = """
from valora_train.fusion.strategies.base import Strategy


class OwnAdapters(Strategy):
    def candidates(self, domain, adapters, history, probes):
        assert 0 <= probes[domain].head_only <= 1
        assert [decision.attempt.new for decision in history] == [("plant_type",)][: len(adapters)]
        return []


extension = OwnAdapters
"""


def test_a_strategy_of_another_package_packs(base, tmp_path, installed):
    installed("valora.strategies", "own_adapters", OWN_ADAPTERS)
    settings = settings_of(base, tmp_path, ("plant_type", "people_count"))
    settings = replace(settings, fusion=replace(settings.fusion, strategy="own_adapters"))
    run_quietly(settings, tmp_path)
    bundle = read_bundle(tmp_path / "bundles" / "all")
    # The built-in strategies put both into one adapter, because nothing is required here.
    packed = {name: facts["domains"] for name, facts in bundle.adapters.items()}
    assert packed == {"adapter-1": ["plant_type"], "adapter-2": ["people_count"]}
    assert bundle.manifest["strategy"] == "own_adapters"


def test_an_unknown_strategy_is_refused_before_anything_is_done(tmp_path):
    settings = settings_of(tmp_path, tmp_path / "out", ("plant_type",))
    settings = replace(settings, fusion=replace(settings.fusion, strategy="best"))
    with pytest.raises(SettingsError, match="choose one of affinity, first_fit, joint"):
        run_quietly(settings, tmp_path)
    assert not (tmp_path / "out").exists()
