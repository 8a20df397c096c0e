"""A short run of ``make fuzz ARGS="media"``."""

import pytest

from tests.fuzz import media

pytestmark = pytest.mark.slow


def test_mutated_images_and_videos_cost_little_and_crash_nothing():
    rows = {}
    _, failures = media.run(1, list(range(60)), rows)
    # This machine may be busy: the time limit is that of `make fuzz`.
    wrong = [failure for failure in failures if " took " not in failure]
    assert not wrong, "\n".join(wrong)
    assert sum(row.outcomes.total() for row in rows.values()) == 60
