"""The root of every error that a user is meant to read."""


class ValoraError(Exception):
    """A sentence that names the thing and the remedy; commands print it without a traceback."""


class DataError(ValoraError):
    """A data set is missing, empty, corrupt or does not say what it should."""


class BundleError(ValoraError):
    """A bundle or base model is missing, damaged or does not fit."""


class UnknownNameError(ValoraError):
    """A name in a configuration or a request that nothing is registered under."""
