"""Checkpoints of a training: after a kill it continues where it was, to the bit."""

from __future__ import annotations

import hashlib
import io
import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

SECONDS = 30.0
"""Seconds between checkpoints."""
COST = 0.01
"""Largest share of the time that writing checkpoints may take."""
DIGEST_BYTES = hashlib.sha256().digest_size


class Checkpoint:
    """The file that holds the state of an unfinished training.

    It begins with the sha256 of what follows, so that a truncated or damaged file is found and
    ignored. Writing fails without harm: the training goes on, and a kill costs more of it.

    Args:
        path: The file; its folder exists.
        every: Seconds between checkpoints; more where writing one takes long.

    Attributes:
        spent: Seconds of training before this process, as the loaded checkpoint says.
    """

    def __init__(self, path: Path, every: float | None = None) -> None:
        self._path = path
        self._every = SECONDS if every is None else every
        self._started = self._next = time.monotonic()
        self._next += self._every
        self._failed = False
        self.spent = 0.0

    def load(self, training: str) -> dict[str, Any] | None:
        """The state of a training; None if there is none, or it is of another one."""
        import torch

        self._started = time.monotonic()
        self._next = self._started + self._every
        self.spent = 0.0
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read (%s): the training starts anew", self._path, error)
            return None
        digest, body = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            log.warning("%s is damaged: the training starts anew", self._path)
            return None
        found = torch.load(io.BytesIO(body), weights_only=True)
        if found["training"] != training:
            return None
        self.spent = float(found["seconds"])
        state: dict[str, Any] = found["state"]
        return state

    def save(self, training: str, state: Callable[[], dict[str, Any]]) -> bool:
        """Write a checkpoint if it is time for one.

        Args:
            training: What is trained.
            state: Returns the state: tensors, numbers, strings, and containers of them.

        Returns:
            Whether one was written.
        """
        import torch

        start = time.monotonic()
        if start < self._next:
            return False
        found: dict[str, Any] = {"training": training, "state": state()}
        found["seconds"] = self.spent + time.monotonic() - self._started
        body = io.BytesIO()
        torch.save(found, body)
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(hashlib.sha256(body.getbuffer()).digest())
                file.write(body.getbuffer())
            temporary.replace(self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if not self._failed:
                log.warning(
                    "no checkpoint could be written to %s (%s): if this training is interrupted, "
                    "it starts anew",
                    self._path, error.strerror,
                )  # fmt: skip
            self._failed = True
        else:
            self._failed = False
        now = time.monotonic()
        self._next = now + max(self._every, (now - start) / COST if self._every else 0.0)
        return not self._failed

    def discard(self) -> None:
        """Delete the file: the training is finished."""
        self._path.unlink(missing_ok=True)
        self.spent = 0.0
