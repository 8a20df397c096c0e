"""Everything that can go wrong when serving, as one tree; the API turns `status` into HTTP's."""

from __future__ import annotations

from valora_data.errors import ValoraError


class ServeError(ValoraError):
    """Base of all of them: one sentence that names the thing and the remedy.

    Attributes:
        status: HTTP status code.
        code: Short name for programs, in the ``code`` field of an OpenAI error.
    """

    status = 500
    code = "internal_error"


class RequestError(ServeError):
    """The request itself is wrong."""

    status = 400
    code = "invalid_request"


class ImageError(RequestError):
    """What was sent as an image or a video is none, or is too large."""

    code = "invalid_image"


class TooLongError(RequestError):
    """Prompt and answer do not fit into the context, or never into the memory."""

    code = "context_length_exceeded"


class UnknownModelError(ServeError):
    """No domain, adapter or base model of this name."""

    status = 404
    code = "model_not_found"


class AdapterError(ServeError):
    """An adapter or bundle cannot be loaded: damaged, for another base model, or not acting."""

    status = 400
    code = "invalid_adapter"


class BusyError(ServeError):
    """Something is in use, e.g. an adapter that shall be unloaded or replaced."""

    status = 409
    code = "in_use"


class OverloadedError(ServeError):
    """The queue is full, or the request would miss its deadline.

    Attributes:
        retry_after: Seconds after which it is worth trying again.
    """

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
    """The client went away or cancelled."""

    status = 499
    code = "cancelled"


class StoppedError(ServeError):
    """The engine is shutting down or has failed."""

    status = 503
    code = "unavailable"


class SettingsError(ServeError):
    """A setting is unknown or cannot have this value."""


class UnauthorizedError(ServeError):
    """No API key, or one that is not known."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(ServeError):
    """The key may not do this, or the server was started without it."""

    status = 403
    code = "forbidden"


class SlowClientError(ServeError):
    """The client took too long to send its request."""

    status = 408
    code = "request_timeout"


class TooLargeError(ServeError):
    """The request's body is larger than is let in."""

    status = 413
    code = "request_too_large"


class ContentTypeError(ServeError):
    """The body's content type is none that the endpoint reads."""

    status = 415
    code = "unsupported_media_type"


class RateLimitError(OverloadedError):
    """The key makes requests faster than it may."""

    code = "rate_limit_exceeded"
