"""A short run of ``make fuzz ARGS=routes``, with a fixed seed."""

import pytest

from tests.fuzz import routes
from tests.fuzz.driver import fuzz

pytestmark = pytest.mark.slow


def test_no_route_fails_on_hostile_requests(monkeypatch):
    # The bound on /health is generous: the tests of the slow tier share the machine.
    monkeypatch.setattr(routes, "AT_ONCE", 1)
    monkeypatch.setattr(routes, "MIXED", 4)
    report = fuzz("routes", 50, health=5.0)  # each kind comes once
    assert not report.failures, str(report)
    assert {"unknown keys", "noise", "a mixture"} <= report.rows.keys()
