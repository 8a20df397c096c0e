"""Errors of the serving side; the HTTP API answers with their `status` and `code`."""

from __future__ import annotations

from typing import Any

from valora_data.errors import ValoraError


class ServeError(ValoraError):
    """Base class of all errors when serving.

    The message is one sentence that names the thing that is wrong and the remedy.

    Attributes:
        status: HTTP status code of the response.
        code: Name of the error for programs, in the ``code`` field of OpenAI's error format.
    """

    status = 500
    code = "internal_error"

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's own way calls the class with `args`, which lack what a subclass keeps for itself.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[ServeError], arguments: tuple[object, ...], state: dict[str, Any]
) -> ServeError:
    """Return an error that was pickled, e.g. for another process."""
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


class RequestError(ServeError):
    """The request itself is wrong."""

    status = 400
    code = "invalid_request"


class FieldError(RequestError):
    """A field of the request is wrong: `param`, e.g. messages.0.content; None for the body."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class ImageError(RequestError):
    """An image or a video cannot be decoded, or is too large."""

    code = "invalid_image"


class TooLongError(RequestError):
    """Prompt and answer exceed the context length, or the memory even without other requests."""

    code = "context_length_exceeded"

    @classmethod
    def told(cls, context_length: int, said: str) -> TooLongError:
        """Return the error in OpenAI's words, by which clients know it and ask a longer model."""
        words = f"This model's maximum context length is {context_length} tokens. However, {said}"
        return cls(words)


class UnknownModelError(ServeError):
    """No domain, adapter or bundle has this name, nor the base model."""

    status = 404
    code = "model_not_found"


class AdapterError(ServeError):
    """An adapter or bundle cannot be loaded: damaged, unsupported, or for another base model."""

    status = 400
    code = "invalid_adapter"


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


class QuarantinedError(ServeError):
    """The adapter was found to damage what it is merged into; only loading it again lifts that.

    The status is 422, as clients of OpenAI's API repeat requests that ended with 409 or 5xx.
    """

    status = 422
    code = "adapter_quarantined"


class NonFiniteError(ServeError):
    """The model computed NaN or infinity for this request, by its adapter or by the base model."""

    status = 422
    code = "non_finite_output"

    def __init__(self, message: str, *, blame_adapter: bool = True) -> None:
        super().__init__(message)
        if not blame_adapter:
            self.status = 500


class BusyError(ServeError):
    """Something cannot be unloaded or replaced, as it is in use."""

    status = 409
    code = "in_use"


class StorageError(ServeError):
    """A change cannot be recorded, e.g. because the disk is full; nothing has changed."""

    status = 507
    code = "storage_failed"


class OverloadedError(ServeError):
    """The queue is full, or the request would miss its deadline."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(ServeError):
    """The request's deadline passed before it was answered."""

    status = 504
    code = "deadline_exceeded"


class CancelledRequestError(ServeError):
    """The client cancelled the request or closed the connection."""

    status = 499
    code = "cancelled"


class StoppedError(ServeError):
    """The engine is shutting down or has failed."""

    status = 503
    code = "unavailable"


class SourceError(StoppedError):
    """A place that adapters are fetched from cannot be reached, or changed meanwhile."""

    code = "adapter_source_unavailable"
    retry_after = 5.0


class DrainingError(StoppedError):
    """The server has received a signal to stop and takes no new requests."""

    code = "draining"
    retry_after = 1.0


class SettingsError(ServeError):
    """A setting has an unknown name or an invalid value."""


class UnauthorizedError(ServeError):
    """The request has no API key, or an unknown one."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(ServeError):
    """The API key does not permit the call, or the server was started without this feature."""

    status = 403
    code = "forbidden"


class GoneError(ServeError):
    """The path was served by earlier releases."""

    status = 410
    code = "gone"


class SlowClientError(ServeError):
    """The client took too long to send its request."""

    status = 408
    code = "request_timeout"


class TooLargeError(ServeError):
    """The request's body is larger than the limit."""

    status = 413
    code = "request_too_large"


class ContentTypeError(ServeError):
    """The endpoint does not read the content type of the request's body."""

    status = 415
    code = "unsupported_media_type"


class RateLimitError(OverloadedError):
    """The API key has exceeded its rate limit."""

    code = "rate_limit_exceeded"
