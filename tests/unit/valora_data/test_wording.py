"""The first words of errors."""

import pytest

from valora_data.wording import first_line


@pytest.mark.parametrize(
    ("said", "first"), [("one\ntwo", "one"), ("\n  late \nmore", "late"), ("", "ValueError")]
)
def test_the_first_line_of_an_error(said, first):
    assert first_line(ValueError(said)) == first
