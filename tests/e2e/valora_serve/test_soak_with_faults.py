"""`make soak`, shorter: every answer is right, whatever happens, and nothing is left."""

import pytest

from tests.fuzz.soak import soak

pytestmark = pytest.mark.slow


def test_soak_with_faults():
    report = soak(minutes=0.3, seed=1)
    assert not report.failures, str(report)
    assert report.rows["faults"].outcomes["SIGTERM under load"] == 1
    assert "diverged" in report.rows
