"""Extensions by name: built-in ones, another package's, and names that nobody has."""

import pytest

from valora_data.errors import DataError, UnknownNameError
from valora_data.registry import Registry


def registry(**names):
    return Registry("valora.tests", "thing", names or {"one": "math:pi", "two": "math:tau"})


def test_builtin_extensions_are_imported_when_looked_up():
    things = Registry("valora.tests", "thing", {"here": "math:pi", "broken": "no_such_module:x"})
    assert things["here"] == pytest.approx(3.14159, abs=1e-5)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        things["broken"]


def test_a_builtin_name_cannot_be_taken_over(installed):
    installed("valora.tests", "one", "extension = 'mine'")
    assert registry()["one"] == pytest.approx(3.14159, abs=1e-5)


def test_an_unknown_name_lists_what_there_is(installed):
    installed("valora.tests", "three", "extension = 3")
    with pytest.raises(
        UnknownNameError, match="unknown thing 'four': choose one of one, three, two"
    ):
        registry()["four"]


def test_a_broken_extension_is_named(installed):
    installed("valora.tests", "bad", "raise RuntimeError('out of order')")
    things = Registry("valora.tests", "thing", {}, error=DataError)
    with pytest.raises(DataError, match=r"thing 'bad' .* cannot be imported: out of order"):
        things["bad"]
