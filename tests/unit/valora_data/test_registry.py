"""Extensions by name: built-in ones, another package's, and names that nobody has."""

import math

import pytest

from valora_data.errors import DataError
from valora_data.registry import Registry


def test_names(installed):
    installed("valora.tests", "one", "extension = 'mine'")
    installed("valora.tests", "three", "extension = 3")
    installed("valora.tests", "bad", "raise RuntimeError('out of order')")
    things = Registry("valora.tests", "thing", {"one": "math:pi", "two": "no_module:x"}, DataError)
    assert things["one"] == math.pi  # a built-in name cannot be taken over
    assert things["three"] == 3
    for name, error, said in (
        ("two", ModuleNotFoundError, "no_module"),
        ("four", DataError, "unknown thing 'four': choose one of bad, one, three, two"),
        ("bad", DataError, r"thing 'bad' .* cannot be imported: out of order"),
    ):
        with pytest.raises(error, match=said):
            things[name]
