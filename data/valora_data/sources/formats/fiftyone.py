"""FiftyOne: exports of type `FiftyOneDataset`, a folder with `samples.json` and the media.

Boxes are in shares of the image: x, y of the upper left corner, width, height.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import Location, Source
from valora_data.sources.formats.annotated import (
    AnnotatedFormat,
    Record,
    Shape,
    collected,
    corner_edges,
    shares,
)
from valora_data.sources.formats.files import Finder, split_in, with_rest
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.tables import load_json

SAMPLES = "samples.json"
KINDS = {"Detections": Task.DETECTION, "Classification": Task.CLASSIFICATION}
"""Class of a field's value, and the task that it answers."""


class FiftyOneFormat(AnnotatedFormat):
    """A folder with `samples.json`; `columns.objects` or `columns.label` names another field."""

    files = "FiftyOne's samples.json"
    answers = frozenset({"objects", "label"})

    def recognises(self, location: Location) -> bool:
        """A file of `samples` that have a `filepath`, or its folder."""
        file = _file(location.path)
        if file.name != SAMPLES or not file.is_file():
            return False
        try:
            return any("filepath" in sample for sample in _samples(file)[:1])
        except DataError:
            return False

    def guess_task(self, path: str) -> Task:
        """The task of the first field of labels."""
        for sample in _samples(Path(path)):
            for value in sample.values():
                if isinstance(value, dict) and value.get("_cls") in KINDS:
                    return KINDS[value["_cls"]]
        return super().guess_task(path)

    def parts(self, source: Source) -> Mapping[Split | None, tuple[Path, Split | None]]:
        """Splits that all samples are tagged with, or all samples as one piece."""
        file = _file(Path(source.location))
        found = [_split(sample) for sample in _samples(file)]
        parts = {split: (file, split) for split in found if split is not None}
        return with_rest({} if None in found else parts, (file, None))

    def records(
        self, source: Source, part: tuple[Path, Split | None], reading: ImageReader
    ) -> Iterator[Record]:
        """Samples of a split; ids are their paths, as the export has them."""
        file, split = part
        samples = [one for one in _samples(file) if split in (None, _split(one))]
        if not samples:
            raise DataError(f"{file} lists no samples: export it again")
        reading.total += len(samples)
        finder = Finder(Path(source.images) if source.images else file.parent)
        for position, sample in enumerate(samples):
            place = sample.get("filepath")
            item = Path(place).name if isinstance(place, str) else f"{SAMPLES}, sample {position}"
            with reading.tolerate(item):
                if not isinstance(place, str):
                    raise FaultError(FaultKind.ROW_INCOMPLETE, f"{item} has no filepath")
                where = f"{SAMPLES}, {place}"
                record = Record((finder.find(place),), place)
                if source.task.spec.detects:
                    value = _field(sample, source.columns.get("objects"), "Detections", where)
                    found = [(one, where) for one in value.get("detections") or ()]
                    record.shapes = collected(found, _shape, record.item, reading)
                else:
                    value = _field(sample, source.columns.get("label"), "Classification", where)
                    record.answer = Answer(label=str(value.get("label")))
                yield record


def _file(path: Path) -> Path:
    return path / SAMPLES if path.is_dir() else path


def _samples(path: Path) -> list[dict[str, Any]]:
    content = load_json(_file(path))
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(entry, dict) for entry in samples):
        raise DataError(
            f"{path} holds no list of samples: export it as fiftyone.types.FiftyOneDataset"
        )
    return samples


def _split(sample: Mapping[str, Any]) -> Split | None:
    """The split that a sample is tagged with."""
    tags = sample.get("tags")
    return split_in(str(tag).lower() for tag in (tags if isinstance(tags, list) else ()))


def _shape(entry: tuple[Any, str], number: int) -> Shape:
    found, where = entry
    where = f"{where}, detection {number}"
    label = found.get("label") if isinstance(found, dict) else None
    if not isinstance(label, str):
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no label")
    return Shape(label, shares(*corner_edges(found.get("bounding_box"), where)), where)


def _field(
    sample: Mapping[str, Any], named: str | None, kind: str, where: str
) -> Mapping[str, Any]:
    """The field with the labels: the named one, `ground_truth`, or the only one of its class."""
    fitting = [
        name
        for name, value in sample.items()
        if isinstance(value, dict) and value.get("_cls") == kind
    ]
    name = named or (fitting[0] if len(fitting) == 1 else "ground_truth")
    if name in fitting:
        found: Mapping[str, Any] = sample[name]
        return found
    if kind == "Detections" and sample.get(name, {}) is None:
        return {}  # labelled as holding nothing
    column = "objects" if kind == "Detections" else "label"
    raise FaultError(
        FaultKind.ROW_INCOMPLETE if named or fitting else FaultKind.NOT_LABELLED,
        f"{where} has no {kind} in field {name!r}, only in {', '.join(fitting) or 'none'} "
        f"(source.columns.{column} names another)",
    )
