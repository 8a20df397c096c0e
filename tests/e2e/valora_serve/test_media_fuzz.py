"""A short run of ``make fuzz ARGS="media"``."""

import pytest

from tests.fuzz.driver import fuzz

pytestmark = pytest.mark.slow


def test_mutated_images_and_videos_cost_little_and_crash_nothing():
    # This machine may be busy: the time limit is that of `make fuzz`.
    report = fuzz("media", 60, seed=1, seconds=60.0)
    assert not report.failures, str(report)
    assert len(report.rows) > 5
