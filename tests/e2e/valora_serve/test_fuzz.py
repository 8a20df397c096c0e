"""Short runs of `make fuzz` and `make soak`, with fixed seeds."""

import pytest

from tests.fuzz import routes
from tests.fuzz.driver import fuzz

pytestmark = pytest.mark.slow

# Cases, seed, limits (generous: the tests share the machine), and what must come of it.
RUNS = {
    "adapters": (40, 11, {}, {"refused", "served"}),
    "media": (60, 1, {"seconds": 60.0}, {"answered"}),
    "routes": (38, 0, {"health": 5.0}, {"400", "hung up"}),  # each kind comes once
    "soak": (12, 1, {}, {"whole answered", "stream answered", "diverged refused", "change 507"}),
}


@pytest.mark.parametrize("part", RUNS)
def test_nothing_hostile_does_harm(part, monkeypatch):
    monkeypatch.setattr(routes, "AT_ONCE", 1)
    monkeypatch.setattr(routes, "MIXED", 4)
    cases, seed, limits, wanted = RUNS[part]
    report = fuzz(part, cases, seed, **limits)
    assert not report.failures, str(report)
    assert wanted <= set().union(*report.outcomes.values())
    assert len(report.outcomes) > 2
