"""A short run of ``make fuzz ARGS=routes``, with a fixed seed."""

import pytest

from tests.fuzz import routes
from tests.fuzz.driver import fuzz

pytestmark = pytest.mark.slow


def test_no_route_fails_on_hostile_requests(monkeypatch):
    # The bound on /health is generous: the tests of the slow tier share the machine.
    # Each kind comes once; operations are asked more in `test_api_fuzz.py`.
    monkeypatch.setattr(routes, "AT_ONCE", 3)
    monkeypatch.setattr(routes, "BATCH", 3)
    report = fuzz("routes", 90, health=5.0)
    assert not report.failures, str(report)
    assert {"unknown keys", "a mixture", "POST /v1/embeddings (negative)"} <= report.rows.keys()
