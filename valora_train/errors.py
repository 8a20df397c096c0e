"""Errors of the factory. Each message is one sentence that names the cause and the remedy."""

from valora_data.errors import ValoraError


class SettingsError(ValoraError):
    """The configuration asks for something that does not exist or does not fit."""


class StrategyError(ValoraError):
    """A fusion strategy asks for something that a fusion cannot do."""


class StageError(ValoraError):
    """A stage cannot write its output, or another process is working on it."""


class UnreachableError(ValoraError):
    """A domain misses its requirement even in an adapter of its own."""


class GateError(ValoraError):
    """A bundle does not reproduce the answers or the accuracy measured in training."""
