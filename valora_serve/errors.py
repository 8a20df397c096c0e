"""Errors of the serving side; the HTTP API answers with their `status` and `code`."""

import errno
from typing import Self

from valora_data.errors import ValoraError


class ServeError(ValoraError):
    """Base class of all errors when serving: a sentence that names what is wrong and the remedy."""

    status = 500  # of the HTTP response
    code = "internal_error"  # for programs, as in OpenAI's error format

    def __init_subclass__(cls, status: int | None = None, code: str | None = None) -> None:
        cls.status, cls.code = status or cls.status, code or cls.code


class RequestError(ServeError, status=400, code="invalid_request"):
    """The request itself is wrong."""


class FieldError(RequestError):
    """A field of the request is wrong: `param`, e.g. messages.0.content; None for the body."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class ImageError(RequestError, code="invalid_image"):
    """An image or a video cannot be decoded, or is too large."""


class TooLongError(RequestError, code="context_length_exceeded"):
    """Prompt and answer exceed the context length, or the memory even without other requests."""

    @classmethod
    def told(cls, context_length: int, said: str) -> Self:
        """Return the error in OpenAI's words, by which clients know it and ask a longer model."""
        words = f"This model's maximum context length is {context_length} tokens. However, {said}"
        return cls(words)


class UnknownModelError(ServeError, status=404, code="model_not_found"):
    """No domain, adapter or bundle has this name, nor the base model."""


class AdapterError(ServeError, status=400, code="invalid_adapter"):
    """An adapter or bundle cannot be loaded: damaged, unsupported, or for another base model."""


def pickle_error(adapter: object, file: str) -> AdapterError:
    """Return the error of an adapter that has a pickle in place of its weights."""
    return AdapterError(
        f"Adapter {adapter} has no adapter_model.safetensors but {file}, a pickle, which can run "
        "code: where you trust it, load it with PEFT's PeftModel.from_pretrained, and serve what "
        "its save_pretrained writes"
    )


class MissingAdapterError(AdapterError):
    """A context cannot be served without an adapter that is not served, named `adapter`."""

    def __init__(self, message: str, adapter: str) -> None:
        super().__init__(message)
        self.adapter = adapter


class QuarantinedError(ServeError, status=422, code="adapter_quarantined"):
    """The adapter was found to damage what it is merged into; only loading it again lifts that.

    The status is 422, as clients of OpenAI's API repeat requests that ended with 409 or 5xx.
    """


class NonFiniteError(ServeError, status=422, code="non_finite_output"):
    """The model computed NaN or infinity for this request, by its adapter or by the base model."""

    def __init__(self, message: str, *, blame_adapter: bool = True) -> None:
        super().__init__(message)
        if not blame_adapter:
            self.status = 500


class BusyError(ServeError, status=409, code="in_use"):
    """Something cannot be unloaded or replaced, as it is in use."""


class StorageError(ServeError, status=507, code="storage_failed"):
    """A change cannot be recorded, e.g. because the disk is full; nothing has changed."""


def disk_remedy(error: OSError) -> str:
    """Return what to do about a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space on that disk"
    denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return "let the server write there" if denied else "check that disk"


class OverloadedError(ServeError, status=429, code="overloaded"):
    """The queue is full, or the request would miss its deadline."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(ServeError, status=504, code="deadline_exceeded"):
    """The request's deadline passed before it was answered."""


class CancelledRequestError(ServeError, status=499, code="cancelled"):
    """The client cancelled the request or closed the connection."""


class StoppedError(ServeError, status=503, code="unavailable"):
    """The engine is shutting down or has failed."""


class SourceError(StoppedError, code="adapter_source_unavailable"):
    """A place that adapters are fetched from cannot be reached, or changed meanwhile."""

    retry_after = 5.0


class DrainingError(StoppedError, code="draining"):
    """The server has received a signal to stop and takes no new requests."""

    retry_after = 1.0


class SettingsError(ServeError):
    """A setting has an unknown name or an invalid value."""


class UnauthorizedError(ServeError, status=401, code="invalid_api_key"):
    """The request has no API key, or an unknown one."""


class ForbiddenError(ServeError, status=403, code="forbidden"):
    """The API key does not permit the call, or the server was started without this feature."""


class SlowClientError(ServeError, status=408, code="request_timeout"):
    """The client took too long to send its request."""


class TooLargeError(ServeError, status=413, code="request_too_large"):
    """The request's body is larger than the limit."""


class ContentTypeError(ServeError, status=415, code="unsupported_media_type"):
    """The endpoint does not read the content type of the request's body."""


class RateLimitError(OverloadedError, code="rate_limit_exceeded"):
    """The API key has exceeded its rate limit."""
