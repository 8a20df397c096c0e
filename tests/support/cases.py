"""Cases of tests that are tried one by one: some at once, the others with the slow tests."""

from itertools import cycle, islice, product

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


def crossed(*axes):
    """All combinations; each value comes in one that is fast, beside values of the others in turn.

    Given as `others_slow` gives them.
    """
    axes = [[*axis] for axis in axes]
    turns = [islice(cycle(axis), max(map(len, axes))) for axis in axes]
    return others_slow([*zip(*turns, strict=True)], product(*axes))
