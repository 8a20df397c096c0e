"""A shard as one zip file, for machines without the library of data sets.

It holds `rows.json` (the label set, the rows of the shard, and its document) and each image as
lossless WebP, so that samples read from it have the same pixels, in about three quarters of the
space. Images of a built-in domain are left out: whoever reads the file draws them (`complete`),
and a hash of each says whether the pixels are the same.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from valora_data.duplicates import content_hash
from valora_data.errors import DataError
from valora_data.images import decode_image
from valora_data.schema import Document, Task
from valora_data.shards import Shard
from valora_data.sources.base import Source
from valora_data.sources.registry import open_source

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from PIL.Image import Image

    from valora_data.schema import Sample

ROWS = "rows.json"
DRAWN = "drawn"
DOCUMENT = "document"
SUFFIX = ".zip"


def pack(shard: Shard, file: Path, drawn: Source | None = None) -> None:
    """Write a shard as one file.

    Args:
        shard: The shard.
        file: The file; it appears when it is complete.
        drawn: The source of a built-in domain, whose images are left out; None to pack them.
    """
    rows, images = [], {}
    for number in range(len(shard)):
        row = shard.row(number)
        count = len(row["images"])
        if drawn is not None:
            row["pixels"] = content_hash(shard[number])
        else:
            for place, image in enumerate(row["images"]):
                images[f"{number}/{place}"] = image["bytes"]
        rows.append(row | {"images": count})
    content: dict[str, Any] = {"labels": shard.labels, "rows": rows}
    if drawn is not None:
        content[DRAWN] = asdict(drawn)
    if shard.document is not None:
        content[DOCUMENT] = {"text": shard.document.text, "images": len(shard.document.images)}
        for place, picture in enumerate(shard.document.images):
            images[f"{DOCUMENT}/{place}"] = picture
    _write(file, content, images)


def _write(file: Path, content: Mapping[str, Any], images: Mapping[str, bytes | Image]) -> None:
    temporary = file.with_name(f"{file.name}.tmp")
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(temporary, "w") as archive:  # what it holds is compressed already
        for name, found in images.items():
            image = decode_image(found) if isinstance(found, bytes) else found
            encoded = io.BytesIO()
            image.save(encoded, "WEBP", lossless=True, exact=True, quality=0)  # of the encoder
            archive.writestr(name, encoded.getvalue())
        text = json.dumps(content, ensure_ascii=False)
        archive.writestr(ROWS, text, zipfile.ZIP_DEFLATED)
    temporary.replace(file)


def is_drawn(file: Path) -> bool:
    """Whether a file leaves its images out, and `complete` draws them.

    Raises:
        DataError: If it is missing or damaged.
    """
    return DRAWN in _content(file)


def _content(file: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(file) as archive:
            found: dict[str, Any] = json.loads(archive.read(ROWS))
            return found
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise _unreadable(file, error) from error


def complete(file: Path) -> bool:
    """Draw the images that a file leaves out, and write them into it.

    Returns:
        Whether there were any.

    Raises:
        DataError: If the file is damaged, or this machine draws other pixels.
    """
    content = _content(file)
    drawn = content.pop(DRAWN, None)
    if drawn is None:
        return False
    source = Source(**drawn | {"task": Task(drawn["task"]), "labels": tuple(drawn["labels"])})
    places = {row["id"]: number for number, row in enumerate(content["rows"])}
    images: dict[str, bytes | Image] = {}
    found = 0
    wanted = {_prefix(name) for name in places}
    for draw in open_source(source).values():
        for sample in draw():
            if _prefix(sample.id) not in wanted:
                break  # another split
            number = places.get(sample.id)
            if number is None:
                continue
            row = content["rows"][number]
            if content_hash(sample) != row.pop("pixels"):
                raise DataError(
                    f"{file}: this machine draws other pixels of {sample.id} than the one that "
                    "packed it: install the versions of constraints.txt on both"
                )
            images |= {f"{number}/{place}": one for place, one in enumerate(sample.images)}
            found += 1
        if found == len(places):
            break
    if found < len(places):
        raise DataError(f"{file} has samples that {source.name} does not have: pack it again")
    _write(file, content, images)
    return True


def _prefix(name: str) -> str:
    """What the ids of a split of a built-in domain have in common."""
    return name.rpartition("/")[0]


def read(file: Path) -> list[Sample]:
    """Read all samples of a packed shard.

    Raises:
        DataError: If the file is missing or damaged, or its images are not drawn yet.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return list(_Packed(archive))
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(f"{file} is not a readable packed data set ({error}): pack it again")


class _Packed(Shard):
    """The samples of a packed shard.

    Args:
        archive: The file.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        content = json.loads(archive.read(ROWS))
        if DRAWN in content:
            raise ValueError("its images are not drawn yet")
        self._archive, self._rows = archive, content["rows"]
        self.labels = tuple(content["labels"])
        self.document = None
        if (document := content.get(DOCUMENT)) is not None:
            names = [f"{DOCUMENT}/{place}" for place in range(document["images"])]
            pictures = tuple(decode_image(archive.read(name)) for name in names)
            self.document = Document(document["text"], pictures)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """A row with its encoded images."""
        row: dict[str, Any] = self._rows[index]
        number = index % len(self)
        names = [f"{number}/{place}" for place in range(row["images"])]
        return row | {"images": [{"bytes": self._archive.read(name)} for name in names]}
