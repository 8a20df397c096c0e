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
from valora_data.sources.formats import annotated
from valora_data.sources.formats.annotated import AnnotatedFormat, Record
from valora_data.sources.formats.files import images_below
from valora_data.sources.formats.labelled import ImageReader


class KittiFormat(AnnotatedFormat):
    """The folder that holds `image_2/` and `label_2/`, or one with such a `training/`."""

    answers = frozenset({"objects"})
    task = Task.DETECTION

    def recognises(self, location: Location) -> bool:
        return (_root(location.path) / "label_2").is_dir()

    def parts(self, source: Source) -> Mapping[Split | None, Path]:
        return {None: Path(source.images or _root(Path(source.location)) / "image_2")}

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        """Images in the order of paths; ids are their names."""
        images, folder = images_below(part), _root(Path(source.location)) / "label_2"
        reading.total += len(images)
        files = annotated.label_files(
            images, lambda image: folder / f"{image.stem}.txt", reading, folder
        )
        for image, file in files.items():
            yield Record((image,), image.name, annotated.rows_of(file), _shape, file=file)


def _root(folder: Path) -> Path:
    return folder / "training" if (folder / "training" / "label_2").is_dir() else folder


def _shape(row: str) -> annotated.Shape | None:
    cells = row.split()
    if not cells or cells[0] == "DontCare":
        return None
    if len(cells) not in (15, 16):
        text = f"expected a type and 14 numbers, got {len(cells)} cells"
        raise FaultError(FaultKind.ROW_MALFORMED, text)
    return cells[0], annotated.four_numbers(cells[4:8])
