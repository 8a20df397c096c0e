"""Text files of users' data sets, JSON and JSON Lines: entries with ids and keys."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind

if TYPE_CHECKING:
    from valora_data.sources.formats.labelled import ImageReader

Entries = list[dict[str, Any]]


def read_text(path: Path) -> str:
    """Content of a text file in UTF-8, or in UTF-16 with a mark of it, as Windows writes it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}): check the path") from error
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name} is no text in UTF-8: export it again in UTF-8") from error


def load_json(path: Path) -> Any:
    """Content of a JSON file."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path.name} is not valid JSON ({error}): export it again") from error


def read_lines(path: Path) -> list[tuple[int, Any]]:
    """Rows of a JSON Lines file with their numbers, which begin at 1; None if one is no JSON.

    Not by pyarrow or `datasets`, which stop at the first bad row and want one type a column.
    """
    lines = read_text(path).split("\n")  # `splitlines` would split at other marks, within texts
    return [(number, _parsed(line)) for number, line in enumerate(lines, start=1) if line.strip()]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def load_rows(path: Path, what: str) -> list[Any]:
    """Entries of a JSON list or of JSON Lines; rows that are no JSON are None."""
    lines = path.suffix == ".jsonl"
    rows = [entry for _, entry in read_lines(path)] if lines else load_json(path)
    if not isinstance(rows, list):
        raise DataError(f"{path.name} is no list of {what}: export it as a list, or as JSON Lines")
    if not rows:
        raise DataError(f"{path.name} lists no {what}: the data set is empty")
    return rows


def load_tables(path: Path, required: Sequence[str], what: str) -> dict[str, list[Any]]:
    """Required tables of a JSON file in the style of COCO, the first of which is not empty."""
    content = load_json(path)
    for table in required:
        if not isinstance(content, dict) or not isinstance(content.get(table), list):
            raise DataError(
                f"{path.name} has no list {table!r}: expected {what} with {', '.join(required)}"
            )
    if not content[required[0]]:
        raise DataError(f"{path.name} lists no {required[0]}: the data set is empty")
    return dict(content)


def sound_entries(
    reader: ImageReader, file: str, table: str, rows: Sequence[Any], *keys: str, unique: str = ""
) -> Entries:
    """Rows of a file's table that have some keys; the others are collected as faults.

    File names must be texts, ids numbers or texts; whole ones in any form are alike. No value of
    the unique keys, with spaces between, may occur twice.
    """
    found: Entries = []
    seen: set[tuple[str, Any]] = set()
    for position, entry in enumerate(rows):
        where = f"{file}: entry {position} of {table!r}"
        with reader.tolerate(where):
            if not isinstance(entry, dict):
                raise FaultError(FaultKind.ROW_MALFORMED, f"{where} is not a valid JSON object")
            if missing := [key for key in keys if key not in entry]:
                raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no {', '.join(missing)}")
            sound = {key: whole(v) if key.endswith("id") else v for key, v in entry.items()}
            for key in keys:
                kind = "text" if key == "file_name" else "number or text"
                named = key == "file_name" or key.endswith("id")
                if named and not isinstance(sound[key], str if kind == "text" else int | str):
                    text = f"{where} has the {key} {entry[key]!r}, which is no {kind}"
                    raise FaultError(FaultKind.ROW_MALFORMED, text)
            for key in unique.split():
                if (key, sound[key]) in seen:
                    what = f"{table.removesuffix('s')} {'id' if key.endswith('id') else key}"
                    text = f"{file}: {what} {sound[key]} occurs more than once"
                    raise FaultError(FaultKind.ID_TWICE, text)
            seen |= {(key, sound[key]) for key in unique.split()}
            found.append(sound)
    return found


def whole(value: Any) -> Any:
    """An id as a whole number, if it is one in another form; any other as it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    digits = isinstance(value, str) and re.fullmatch(r"0|[1-9]\d{0,17}", value)
    return int(value) if digits else value
