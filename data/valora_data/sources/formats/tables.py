"""JSON files of users' data sets: lists of entries with ids and keys that must be there."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Entries = list[dict[str, Any]]


def load_json(json_path: Path) -> Any:
    """Content of a JSON file.

    Raises:
        DataError: If it is missing or no JSON.
    """
    try:
        content = json.loads(json_path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {json_path} ({error.strerror}): check the path") from error
    except ValueError as error:
        raise DataError(f"{json_path.name} is not valid JSON ({error}): export it again") from error
    return content


def load_tables(
    json_path: Path, required: Mapping[str, tuple[str, ...]], what: str
) -> dict[str, Entries]:
    """Tables of a JSON file in the style of COCO.

    Args:
        json_path: The file.
        required: Names of the tables, and the keys that each entry must have.
        what: Name of the format, for messages.

    Raises:
        DataError: If the file is missing or no JSON, lacks a table or a key, or has no images.
    """
    source = json_path.name
    content = load_json(json_path)
    for table, keys in required.items():
        entries = content.get(table) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            *others, last = required
            raise DataError(
                f"{source} has no list {table!r}: expected {what} with {', '.join(others)} "
                f"and {last}"
            )
        check_keys(source, table, entries, keys)
    first = next(table for table in required)
    if not content[first]:
        raise DataError(f"{source} lists no {first}: the data set is empty")
    return dict(content)


def check_unique(source: str, kind: str, ids: list[Any]) -> None:
    """Check that no id occurs twice.

    Raises:
        DataError: If one does.
    """
    double = [key for key, count in Counter(ids).items() if count > 1]
    if double:
        raise DataError(f"{source}: {kind} id {double[0]} occurs more than once: number them anew")


def check_keys(source: str, table: str, entries: Any, keys: tuple[str, ...]) -> None:
    """Check that every entry of a table has some keys.

    Raises:
        DataError: If one lacks a key or is no object.
    """
    for position, entry in enumerate(entries):
        missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
        if missing:
            raise DataError(
                f"{source}: entry {position} of {table!r} has no {', '.join(missing)}: "
                "export the file again"
            )
