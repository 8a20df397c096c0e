"""The root of every error that a user is meant to read."""

from __future__ import annotations

from typing import Any


class ValoraError(Exception):
    """A sentence that names the thing and the remedy; commands print it without a traceback."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's own way calls the class with `args`, of which a subclass may have made others.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[ValoraError], arguments: tuple[object, ...], state: dict[str, Any]
) -> ValoraError:
    """Return an error that was pickled, e.g. for another process."""
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


class DataError(ValoraError):
    """A data set is missing, empty, corrupt or does not say what it should."""


class BundleError(ValoraError):
    """A bundle or base model is missing, damaged or does not fit."""


class UnknownNameError(ValoraError):
    """A name in a configuration or a request that nothing is registered under."""
