"""A short run of `make fuzz ARGS=adapters`."""

import pytest

from tests.fuzz.adapters import fuzz


@pytest.mark.slow
def test_changed_adapters_and_bundles_are_refused_or_harmless():
    rows, failures, _ = fuzz(cases=40, seed=11)
    assert len(rows) == 40
    assert {outcome for _, outcome, _ in rows} == {"refused", "served"}
    assert not failures, "\n".join(failures)
