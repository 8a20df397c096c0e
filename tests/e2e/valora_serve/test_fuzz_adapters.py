"""A short run of `make fuzz ARGS=adapters`."""

import pytest

from tests.fuzz.driver import fuzz


@pytest.mark.slow
def test_changed_adapters_and_bundles_are_refused_or_harmless():
    report = fuzz("adapters", 40, seed=11)
    assert not report.failures, str(report)
    outcomes = [row.outcomes for row in report.rows.values()]
    assert sum(one.total() for one in outcomes) == 40
    assert set().union(*outcomes) == {"refused", "served"}
