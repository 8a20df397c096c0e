"""API keys, stored as hashes."""

import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from valora_serve.errors import ForbiddenError, SettingsError, UnauthorizedError
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry import logs

ROLES = ("user", "admin")
PREFIX = "sk-valora-"
LOOK_SECONDS = 1.0  # seconds between two looks at the keys file


@dataclass(frozen=True, slots=True)
class Key:
    """A stored API key, of 256 random bits: a plain hash of it is enough."""

    name: str
    role: str
    sha256: str
    models: tuple[str, ...] = ()

    def sees(self, model: str, bundle: str | None = None) -> bool:
        """Return whether the key may see and ask a model."""
        return not self.models or any(
            fnmatchcase(model, one) or ("@" in one and fnmatchcase(bundle or "", one))
            for one in self.models
        )


def hashed(secret: str) -> str:
    """SHA-256 of a key, in hexadecimal."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def new_key(name: str, role: str, models: Sequence[str] = ()) -> tuple[str, str]:
    """Make an API key; see `Key` for its name, its role and its models."""
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, " ".join([name, role, hashed(secret), *models])


def read_keys(path: Path) -> list[Key]:
    """Read lines of ``name role sha256 [model…]``; errors quote none, which may be a key."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise SettingsError(f"keys file {path} cannot be read: {error}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        known = len(words) > 2 and words[1] in ROLES and re.fullmatch("[0-9a-f]{64}", words[2])
        if not known or (words[1] == "admin" and words[3:]):  # an admin may load all models
            raise SettingsError(
                f"line {number} of keys file {path} is neither `name user sha256 [model…]` nor "
                "`name admin sha256`: make one with `valora-serve key NAME`"
            )
        name, role, sha256, *models = words
        keys.append(Key(name, role, sha256, tuple(models)))
    return keys


class KeyRing:
    """API keys that the server accepts; without any, everybody has access.

    The file of `keys_file` may change while the server runs. One that cannot be read, or holds no
    key, changes nothing: a server with keys never becomes one without, and a half-written file
    locks nobody out.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._path = None if settings.keys_file is None else Path(settings.keys_file)
        own = settings.api_key
        self._fixed = [Key("api_key", "admin", hashed(own))] if own else []
        self._looked, self._version = time.monotonic(), self._version_now()
        self._keys = self._read()

    @property
    def names(self) -> set[str]:
        """Names of the keys."""
        return {key.name for key in self._keys}

    @property
    def limited(self) -> bool:
        """Whether a key may not see all models."""
        self.update()
        return any(key.models for key in self._keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def update(self) -> None:
        """Read the file again if it has changed; looked at once in `LOOK_SECONDS`."""
        now, known = time.monotonic(), self._version
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked, self._version = now, self._version_now()
        if self._version == known:
            return
        try:
            keys = self._read()
        except SettingsError as error:
            logs.LOG.error("API keys stay as they were: %s", error)
            return
        changed = ", ".join(sorted({key.name for key in {*keys} ^ {*self._keys}})) or "none"
        logs.LOG.info("API keys read again: %d (changed: %s)", len(keys), changed)
        self._keys = keys

    def _read(self) -> list[Key]:
        if self._path is None:
            return self._fixed
        keys = [*read_keys(self._path), *self._fixed]
        if not keys:
            raise SettingsError(
                f"keys file {self._path} holds no key: make one with `valora-serve key NAME`"
            )
        return keys

    def _version_now(self) -> tuple[int, int, int] | None:
        """What changes with the file's content; None if it cannot be looked at."""
        with contextlib.suppress(OSError):
            facts = self._path.stat() if self._path else None
            return facts and (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        return None

    def check(self, authorization: str | None, *, admin: bool = False) -> Key | None:
        """Find the key of an Authorization header; all are compared, each in constant time."""
        self.update()
        if not self._keys:
            return None
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise UnauthorizedError(
                "This server requires an API key: send it as `Authorization: Bearer KEY`"
            )
        sent = hashed(secret.strip())
        same = [key for key in self._keys if hmac.compare_digest(key.sha256, sent)]
        if not same:
            raise UnauthorizedError("This API key is not known: ask the operator for a new one")
        if admin and same[-1].role != "admin":
            raise ForbiddenError(f"Key {same[-1].name} may not do this: it takes an admin key")
        return same[-1]
