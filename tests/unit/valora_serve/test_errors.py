"""Errors of the serving side."""

import pickle

import pytest

from valora_serve import errors

MADE = [
    errors.FieldError("too long", "messages.0"),
    errors.OverloadedError("full", 7.5),
    errors.NonFiniteError("NaN", blame_adapter=False),
    errors.DeadlineError("late"),
    errors.MissingAdapterError("gone", "cats"),
    *(
        kind("so it is")
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.ServeError)
        and kind not in (errors.FieldError, errors.MissingAdapterError)
    ),
]


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_errors_reach_other_processes_as_they_are(error):
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)
    assert (there.status, there.code) == (error.status, error.code)
