"""Text files of users' data sets, and JSON files: entries with ids and keys that must be there."""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from valora_data.sources.formats.labelled import ImageReader

Entries = list[dict[str, Any]]
NAMES = frozenset({"file_name"})
"""Keys whose values are texts."""


def read_text(path: Path) -> str:
    """Content of a text file in UTF-8, or in UTF-16 with a mark of it, as Windows writes it.

    Raises:
        DataError: If it is missing or in another encoding.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}): check the path") from error
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name} is no text in UTF-8: export it again in UTF-8") from error


def load_json(json_path: Path) -> Any:
    """Content of a JSON file.

    Raises:
        DataError: If it is missing or no JSON.
    """
    text = read_text(json_path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{json_path.name} is not valid JSON ({error}): export it again") from error
    return content


def load_tables(json_path: Path, required: Sequence[str], what: str) -> dict[str, list[Any]]:
    """Tables of a JSON file in the style of COCO; their entries are not checked.

    Args:
        json_path: The file.
        required: Names of the tables, the first of which must not be empty.
        what: Name of the format, for messages.

    Raises:
        DataError: If the file is missing or no JSON, lacks a table, or has no images.
    """
    source = json_path.name
    content = load_json(json_path)
    for table in required:
        entries = content.get(table) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            *others, last = required
            raise DataError(
                f"{source} has no list {table!r}: expected {what} with {', '.join(others)} "
                f"and {last}"
            )
    if not content[required[0]]:
        raise DataError(f"{source} lists no {required[0]}: the data set is empty")
    return dict(content)


def sound_entries(
    reader: ImageReader, source: str, table: str, entries: Sequence[Any], keys: Sequence[str]
) -> Entries:
    """Entries of a table that have some keys; the others are collected as faults.

    Ids and file names must be numbers or texts.

    Raises:
        DataError: If too many images have faults.
    """
    found = []
    for position, entry in enumerate(entries):
        where = f"entry {position} of {table!r}"
        with reader.tolerate(f"{source}, {where}"):
            if not isinstance(entry, dict):
                raise FaultError(
                    FaultKind.ROW_MALFORMED, f"{source}: {where} is not a valid JSON object"
                )
            missing = [key for key in keys if key not in entry]
            if missing:
                raise FaultError(
                    FaultKind.ROW_INCOMPLETE, f"{source}: {where} has no {', '.join(missing)}"
                )
            entry = {  # noqa: PLW2901 - ids may be whole numbers or texts of one
                key: _whole(value) if key.endswith("id") else value for key, value in entry.items()
            }
            for key in keys:
                allowed = str if key in NAMES else (int, str)
                if (key in NAMES or key.endswith("id")) and not isinstance(entry[key], allowed):
                    raise FaultError(
                        FaultKind.ROW_MALFORMED,
                        f"{source}: {where} has the {key} {entry[key]!r}, which is no "
                        f"{'text' if key in NAMES else 'number or text'}",
                    )
            found.append(entry)
    return found


def _whole(value: Any) -> Any:
    """An id as a whole number, if it is one in another form."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    whole = isinstance(value, str) and re.fullmatch(r"0|[1-9]\d{0,17}", value)
    return int(value) if whole else value


def unique_entries(
    reader: ImageReader, source: str, kind: str, key: str, entries: Entries
) -> Entries:
    """Entries without those that repeat the value of a key, which are collected as faults.

    Raises:
        DataError: If too many images have faults.
    """
    found: dict[Any, dict[str, Any]] = {}
    for entry in entries:
        value = entry[key]
        if value in found:
            reader.add(
                FaultKind.ID_TWICE,
                f"{kind} {value}",
                f"{source}: {kind} {'id' if key.endswith('id') else key} {value} occurs more than "
                "once",
            )
        else:
            found[value] = entry
    return list(found.values())


def check_unique(source: str, kind: str, ids: list[Any]) -> None:
    """Check that no id occurs twice.

    Raises:
        DataError: If one does.
    """
    double = [key for key, count in Counter(ids).items() if count > 1]
    if double:
        raise DataError(f"{source}: {kind} id {double[0]} occurs more than once: number them anew")


def read_lines(path: Path) -> list[tuple[int, Any]]:
    """Rows of a JSON Lines file with their numbers, which begin at 1; None if one is no JSON.

    Raises:
        DataError: If the file is missing or no text.
    """
    lines = read_text(path).split("\n")  # `splitlines` would split at other marks, within texts
    return [(number, _parsed(line)) for number, line in enumerate(lines, start=1) if line.strip()]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
