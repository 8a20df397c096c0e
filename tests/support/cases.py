"""Cases of tests that are tried one by one: some at once, the others with the slow tests."""

import pytest


def others_slow(fast, every):
    """All cases for `parametrize`, of which those that are not among `fast` are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in fast else pytest.mark.slow,
        )
        for case in every
    ]
