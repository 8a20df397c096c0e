"""Files of users' data sets: which are data, which one a name stands for, and JSON in them."""

import codecs
import contextlib
import json
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from valora_data.errors import DataError
from valora_data.schema import Split

T = TypeVar("T")
IMAGES = frozenset({
    ".avif", ".bmp", ".dng", ".gif", ".heic", ".heif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg",
    ".jpg", ".jpx", ".mpo", ".pbm", ".pfm", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".tga", ".tif",
    ".tiff", ".webp",
})  # fmt: skip
"""Suffixes of image files, in lower case; those that Pillow cannot read become faults."""
AUXILIARY = frozenset({"__MACOSX", "@eaDir", "$RECYCLE.BIN", "lost+found"})
SPLIT_NAMES: Mapping[str, Split] = {
    "train": Split.TRAIN, "training": Split.TRAIN, "unlabelled": Split.UNLABELLED,
    "unlabeled": Split.UNLABELLED, "unsupervised": Split.UNLABELLED, "val": Split.VAL,
    "validation": Split.VAL, "valid": Split.VAL, "dev": Split.VAL, "test": Split.TEST,
    "testing": Split.TEST, "testA": Split.TEST, "testB": Split.TEST,
}  # fmt: skip
UPLOADED = re.compile(r"^[0-9a-f]{8}-")
"""What Label Studio puts before the name of a file that is uploaded."""


def is_data(name: str) -> bool:
    """Whether a file or folder of this name is data, neither hidden nor auxiliary."""
    return not name.startswith(".") and name not in AUXILIARY


def readable(name: str) -> str:
    """A file name that can be printed, also where it is no UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def exists(path: Path) -> bool:
    """Whether there is such a path; no name, however odd, is an error."""
    return os.path.exists(path)  # noqa: PTH110 - `Path.exists` fails for a name that is too long


def is_file(path: Path) -> bool:
    """Whether a path is a file; no name, however odd, is an error."""
    return os.path.isfile(path)  # noqa: PTH113


def files_below(folder: Path, suffixes: frozenset[str] | None = None) -> list[Path]:
    """Files of some suffixes below a folder, in order, but hidden and auxiliary ones."""
    found: list[Path] = []
    visited: set[str] = set()
    for current, folders, names in os.walk(folder, followlinks=True):
        visited.add(os.path.realpath(current))
        folders[:] = [
            name
            for name in sorted(filter(is_data, folders))
            if os.path.realpath(Path(current, name)) not in visited
        ]
        for path in (Path(current, name) for name in names if is_data(name)):
            if (suffixes is None or path.suffix.lower() in suffixes) and is_file(path):
                found.append(path)
    return sorted(found)


def images_below(
    folder: Path, suffixes: frozenset[str] = IMAGES, what: str = "images"
) -> list[Path]:
    """Images in a folder and below it, at least one, in the order of paths."""
    _check_folder(folder)
    if not (found := files_below(folder, suffixes)):
        raise DataError(f"{folder} holds no {what}: the data set is empty")
    return found


def folder_splits(folder: Path) -> dict[Split, Path]:
    """Folders of the splits, if any are named so."""
    _check_folder(folder)
    found: dict[Split, Path] = {}
    for item in sorted(filter(Path.is_dir, folder.iterdir())):
        split = SPLIT_NAMES.get(item.name)
        if split is not None and found.setdefault(split, item) is not item:
            text = f"{folder.name} has folders {found[split].name} and {item.name} for the split"
            raise DataError(f"{text} {split}: keep one")
    return found


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist: check the path")


def split_in(words: Iterable[str]) -> Split | None:
    """The split that the first word which names one stands for."""
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def with_rest(splits: Mapping[Split, T], whole: T) -> dict[Split | None, T]:
    """Parts by key of `Splits`; None: the whole, or the training split that others come from."""
    rest = None if len(splits) < len(Split) else Split.TRAIN
    named = ((rest if split is Split.TRAIN else split, part) for split, part in splits.items())
    return dict(named) or {None: whole}


def spelling(name: str) -> str:
    """A file name in one spelling: decoded, composed, in lower case."""
    return unicodedata.normalize("NFC", unquote(name)).casefold()


class Finder:
    """Finds the files that a data set names, also where it has moved or spells them differently."""

    def __init__(self, folder: Path, suffixes: frozenset[str] = IMAGES) -> None:
        self._folder, self._suffixes = folder, suffixes
        self._found: set[Path] = set()

    def find(self, name: str) -> Path:
        """The file of a path by its longest end that exists, or by its name; else as named."""
        named = self._folder / name
        parts = [part for part in re.split(r"[/\\]", name) if part not in ("", ".", "..")]
        ends = (self._folder.joinpath(*parts[start:]) for start in range(len(parts)))
        found = next(filter(is_file, (named, *ends)), None) or self._by_name(named, parts)
        with contextlib.suppress(ValueError):  # of a name that no file can have
            self._found.add(found.resolve())
        return found

    def _by_name(self, named: Path, parts: list[str]) -> Path:
        last = parts[-1] if parts else ""
        for key in (last, UPLOADED.sub("", last)):
            found = self._index.get(spelling(key), [])
            if named.parent in self._folders:  # then no file of another folder is meant
                found = [path for path in found if path.parent == named.parent]
            if len(found) == 1:
                return found[0]
        return named

    def of_stem(self, stem: str, near: Path) -> Path | None:
        """The file with this name without suffix; of several the one that lies nearest."""
        best = defaultdict[int, list[Path]](list)
        for path in self._index.get(spelling(stem), []):
            shared = os.path.commonpath([near.absolute().parent, path.absolute().parent])
            best[len(shared)].append(path)
        nearest = best[max(best, default=0)]
        return nearest[0] if len(nearest) == 1 else None

    def not_found(self) -> list[Path]:
        """Files, as paths below the folder, that were not found by any name."""
        missed = [path for path in self.files if path.resolve() not in self._found]
        return [path.relative_to(self._folder) for path in missed]

    @cached_property
    def files(self) -> list[Path]:
        return files_below(self._folder, self._suffixes)

    @cached_property
    def _folders(self) -> frozenset[Path]:
        return frozenset(path.parent for path in self.files)

    @cached_property
    def _index(self) -> Mapping[str, list[Path]]:
        """Files by their names, with and without suffix."""
        found: defaultdict[str, list[Path]] = defaultdict(list)
        for path in self.files:
            found[spelling(path.name)].append(path)
            found[spelling(path.stem)].append(path)
        return found


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
        return _parsed(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path.name} is not valid JSON ({error}): export it again") from error


def _parsed(text: str) -> Any:
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:  # escapes can make what is no Unicode, a `ValueError` here
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_lines(path: Path) -> list[tuple[int, dict[str, Any] | None]]:
    """Numbered rows of JSON Lines, None for what is no object; libraries stop at the first."""
    found: list[tuple[int, dict[str, Any] | None]] = []
    # `splitlines` would split at other marks, within texts.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        row = None
        with contextlib.suppress(ValueError, RecursionError):
            row = _parsed(line)
        if line.strip():
            found.append((number, row if isinstance(row, dict) else None))
    return found


def load_rows(path: Path, what: str) -> list[Any]:
    """Entries of a JSON list or of JSON Lines, at least one."""
    lines = path.suffix == ".jsonl"
    rows = [entry for _, entry in read_lines(path)] if lines else load_json(path)
    if not isinstance(rows, list):
        raise DataError(f"{path.name} is no list of {what}: export it as a list, or as JSON Lines")
    if not rows:
        raise DataError(f"{path.name} lists no {what}: the data set is empty")
    return rows


def as_object(row: Any) -> dict[str, Any]:
    """A row as what it has to be, or a `TypeError`."""
    if not isinstance(row, dict):
        raise TypeError("is not a valid JSON object")
    return row


def whole(value: Any) -> Any:
    """An id as a whole number, if it is one in another form; any other as it is."""
    digits = isinstance(value, str) and re.fullmatch(r"0|[1-9]\d{0,17}", value)
    return int(value) if digits or (isinstance(value, float) and value.is_integer()) else value
