"""Logs: one line per event with the request's id, without API keys or content of requests."""

import contextvars
import json
import logging
import re
import secrets
import sys
import time
from typing import Any, TextIO

LOG = logging.getLogger("valora_serve")
ACCESS = logging.getLogger("valora_serve.access")
request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
SOUND_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def new_id() -> str:
    """A new unique id."""
    return secrets.token_hex(12)


class _Formatter(logging.Formatter):
    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._json = as_json

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = {"request_id": request_id.get()}
        facts |= getattr(record, "facts", {})
        facts = {name: value for name, value in facts.items() if value is not None}
        error = record.exc_text  # of the engine's process
        if record.exc_info:
            error = self.formatException(record.exc_info)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        stamp += f".{int(record.msecs):03d}Z"
        if self._json:
            line = {"time": stamp, "level": record.levelname.lower(), "event": record.getMessage()}
            return json.dumps(line | facts | ({"error": error} if error else {}), default=str)
        said = " ".join(f"{name}={_one_line(value)}" for name, value in facts.items())
        text = f"{stamp} {record.levelname:<7} {_one_line(record.getMessage())} {said}".rstrip()
        return f"{text}\n{error}" if error else text


def _one_line(value: Any) -> str:
    """The value without line breaks, which would allow log injection."""
    return str(value).encode("unicode_escape").decode("ascii")


class _Stderr(logging.StreamHandler[TextIO]):
    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def set_up(level: str, form: str) -> None:
    """Send the logs of valora_serve, uvicorn and the parser of forms to stderr."""
    handler = _Stderr()
    handler.setFormatter(_Formatter(form == "json"))
    for name in ("valora_serve", "uvicorn.error", "python_multipart"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
