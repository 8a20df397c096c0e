"""Checkpoints of a training: after a kill it continues where it was, to the bit."""

import hashlib
import io
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SECONDS = 30.0  # seconds between checkpoints
COST = 0.01  # largest share of the time that writing checkpoints may take
DIGEST_BYTES = hashlib.sha256().digest_size


class Checkpoint:
    """The state of an unfinished training; a damaged file is ignored, a failing write warned of."""

    def __init__(self, path: Path, every: float | None = None) -> None:
        self._path, self._every = path, SECONDS if every is None else every
        self._failed = False
        self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        self._next = self._started + self._every
        self.spent = 0.0  # seconds of training before this process, as the loaded checkpoint says

    def load(self, training: str) -> dict[str, Any] | None:
        """The state of a training; None if there is none, or it is of another one."""
        import torch

        self._start()
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError:
            content = b""  # counts as damaged
        digest, body = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            log.warning("%s is damaged: the training starts anew", self._path)
            return None
        found: dict[str, Any] = torch.load(io.BytesIO(body), weights_only=True)
        if found["training"] != training:
            return None
        self.spent = float(found["seconds"])
        return dict(found["state"])

    def save(self, training: str, state: Callable[[], dict[str, Any]]) -> bool:
        """Write tensors, numbers, strings and their containers, if it is time; whether it was."""
        import torch

        start = time.monotonic()
        if start < self._next:
            return False
        found: dict[str, Any] = {"training": training, "state": state()}
        found["seconds"] = self.spent + time.monotonic() - self._started
        body = io.BytesIO()
        torch.save(found, body)
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        failed_before, self._failed = self._failed, False
        try:
            with temporary.open("wb") as file:
                file.write(hashlib.sha256(body.getbuffer()).digest())
                file.write(body.getbuffer())
            temporary.replace(self._path)
        except OSError as error:
            self._failed = True
            temporary.unlink(missing_ok=True)
            if not failed_before:
                text = "no checkpoint could be written to %s (%s): after a kill it starts anew"
                log.warning(text, self._path, error.strerror)
        now = time.monotonic()
        self._next = now + max(self._every, (now - start) / COST if self._every else 0.0)
        return not self._failed

    def discard(self) -> None:
        """Delete the file: the training is finished."""
        self._path.unlink(missing_ok=True)
        self.spent = 0.0
