"""Errors of the factory; each message is one sentence that names the thing and the remedy."""

from valora_data.errors import ValoraError


class SettingsError(ValoraError):
    """The configuration asks for something that does not exist or does not fit."""


class StageError(ValoraError):
    """A stage cannot write, or another process holds it."""


class UnreachableError(ValoraError):
    """A domain misses its requirement even in an adapter of its own."""


class GateError(ValoraError):
    """A bundle does not reproduce what was measured."""
