"""A shard as one zip file, for machines without the library of data sets.

It holds `rows.json` (the label set and the rows of the shard) and each image as lossless WebP, so
that samples read from it have the same pixels, in about three quarters of the space.
"""

from __future__ import annotations

import io
import json
import zipfile
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.images import decode_image
from valora_data.schema import Document
from valora_data.shards import Shard

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

    from valora_data.schema import Sample

ROWS = "rows.json"
SUFFIX = ".zip"


def pack(shard: Shard, file: Path) -> None:
    """Write a shard as one file.

    Args:
        shard: The shard.
        file: The file; it appears when it is complete.
    """
    rows = []
    temporary = file.with_name(f"{file.name}.tmp")
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(temporary, "w") as archive:  # what it holds is compressed already
        for number in range(len(shard)):
            row = shard.row(number)
            for place, image in enumerate(row["images"]):
                archive.writestr(f"{number}/{place}", _lossless(decode_image(image["bytes"])))
            rows.append(row | {"images": len(row["images"])})
        content: dict[str, Any] = {"labels": shard.labels, "rows": rows}
        if (document := shard.document) is not None:
            content["document"] = {"text": document.text, "images": len(document.images)}
            for place, image in enumerate(document.images):
                archive.writestr(f"document/{place}", _lossless(image))
        text = json.dumps(content, ensure_ascii=False)
        archive.writestr(ROWS, text, zipfile.ZIP_DEFLATED)
    temporary.replace(file)


def _lossless(image: Image) -> bytes:
    """An image as a file that keeps every pixel."""
    content = io.BytesIO()
    image.save(content, "WEBP", lossless=True, exact=True)
    return content.getvalue()


def read(file: Path) -> list[Sample]:
    """Read all samples of a packed shard.

    Raises:
        DataError: If the file is missing or damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return list(_Packed(archive))
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} is not a readable packed data set ({error}): pack it again") from (
            error
        )


class _Packed(Shard):
    """The samples of a packed shard.

    Args:
        archive: The file.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        content = json.loads(archive.read(ROWS))
        self._archive, self._rows = archive, content["rows"]
        self.labels = tuple(content["labels"])
        self.document = None
        if (facts := content.get("document")) is not None:
            images = [
                decode_image(archive.read(f"document/{place}")) for place in range(facts["images"])
            ]
            self.document = Document(facts["text"], tuple(images))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """A row with its encoded images."""
        row: dict[str, Any] = self._rows[index]
        number = index % len(self)
        names = [f"{number}/{place}" for place in range(row["images"])]
        return row | {"images": [{"bytes": self._archive.read(name)} for name in names]}
