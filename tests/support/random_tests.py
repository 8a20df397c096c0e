"""How many examples random tests try, and whether they are the same in every run.

By default they are: a test fails for everybody or for nobody. With ``VALORA_EXAMPLES=N`` in the
environment each test that is marked with `examples` tries N times as many, new ones, drawn from the
seed that pytest's ``--hypothesis-seed`` gives. A failing one belongs into the test as `@example`.
"""

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("VALORA_EXAMPLES", "0"))

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, print_blob=True, database=None
)
settings.register_profile(
    "many", deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)


def load_profile():
    """Choose the profile of this run; before any random test is imported."""
    settings.load_profile("many" if TIMES else "repeatable")


def examples(count, **more):
    """Return the settings of a random test.

    Args:
        count: Number of examples that it tries by default.
        more: Further settings of Hypothesis.
    """
    return settings(max_examples=(TIMES or 1) * count, **more)
