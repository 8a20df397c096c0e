"""URLs of images and videos, which may hold whole files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class MediaUrl:
    """URL of an image or video, or the file itself: taken once, and its text freed then."""

    __slots__ = ("_length", "_text")

    def __init__(self, text: str | bytes) -> None:
        self._text: str | bytes | None = text
        self._length = len(text)

    def __len__(self) -> int:
        """Length of the URL or file, also after it was taken."""
        return self._length

    def take(self) -> str | bytes:
        """Return the URL, which this object no longer holds then; it can be taken once."""
        text, self._text = self._text, None
        assert text is not None, "the URL has been taken already"
        return text

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate a text, or take what is a URL already."""

        def made(value: Any, text: Callable[[Any], str]) -> MediaUrl:
            return value if isinstance(value, cls) else cls(text(value))

        return core_schema.no_info_wrap_validator_function(made, handler(str))
