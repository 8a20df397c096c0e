"""Writes the files of formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def written(path: Path, text: str) -> Path:
    """Write a file in one rename, so that it is never half there.

    Returns:
        The file.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path
