"""KITTI: a text file for each image, `label_2/000000.txt` beside `image_2/000000.png`.

Rows are type, truncation, occlusion, angle, left, top, right, bottom (in pixels), and seven numbers
in metres. `DontCare` regions are left out, as they are no single objects. The original's `testing/`
has no labels: name it as `source.unlabelled`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Split, Task
from valora_data.sources.base import Location, Source
from valora_data.sources.formats.annotated import (
    AnnotatedFormat,
    Record,
    Shape,
    collected,
    four_numbers,
    label_files,
)
from valora_data.sources.formats.files import images_below
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.tables import read_text


class KittiFormat(AnnotatedFormat):
    """The folder that holds `image_2/` and `label_2/`, or one with such a `training/`."""

    answers = frozenset({"objects"})
    task = Task.DETECTION

    def recognises(self, location: Location) -> bool:
        """Folders with `label_2/`."""
        return (_root(location.path) / "label_2").is_dir()

    def parts(self, source: Source) -> Mapping[Split | None, Path]:
        """All images as one piece."""
        return {None: Path(source.images or _root(Path(source.location)) / "image_2")}

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        """Images in the order of paths; ids are their names."""
        images = images_below(part)
        reading.total += len(images)
        labels = _root(Path(source.location)) / "label_2"
        files = label_files(
            images, lambda image: labels / f"{image.stem}.txt", labels, labels.name, reading
        )
        for image, file in files.items():
            record = Record((image,), image.name, file=file)
            with reading.tolerate(record.item):
                if file.exists():
                    rows = [(file.name, line.split()) for line in read_text(file).splitlines()]
                    record.shapes = collected(rows, _shape, record.item, reading)
            yield record


def _root(folder: Path) -> Path:
    return folder / "training" if (folder / "training" / "label_2").is_dir() else folder


def _shape(row: tuple[str, list[str]], number: int) -> Shape | None:
    file, cells = row
    where = f"{file}, row {number}"
    if not cells or cells[0] == "DontCare":
        return None
    if len(cells) not in (15, 16):
        text = f"{where}: expected a type and 14 numbers, got {len(cells)} cells"
        raise FaultError(FaultKind.ROW_MALFORMED, text)
    return Shape(cells[0], four_numbers(cells[4:8], where), where)
