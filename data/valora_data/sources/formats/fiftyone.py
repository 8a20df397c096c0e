"""FiftyOne: exports of type `FiftyOneDataset`, a folder with `samples.json` and the media.

Boxes are in shares of the image: x, y of the upper left corner, width, height.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Box, Sample, Split, Task
from valora_data.sources.base import (
    Location,
    Source,
    SourceFormat,
    Splits,
    take_missing_from_train,
)
from valora_data.sources.formats.labelled import (
    ImageReader,
    Reading,
    checked_box,
    stray_label,
)
from valora_data.sources.formats.tables import load_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from PIL.Image import Image

SAMPLES = "samples.json"
FIELD = "ground_truth"
"""Name that FiftyOne gives the field of labels by default."""
KINDS = {"Detections": Task.DETECTION, "Classification": Task.CLASSIFICATION}
"""Class of a field's value, and the task that it answers."""
TAGS: Mapping[str, Split] = {
    "train": Split.TRAIN, "val": Split.VAL, "valid": Split.VAL, "validation": Split.VAL,
    "test": Split.TEST, "unlabelled": Split.UNLABELLED, "unlabeled": Split.UNLABELLED,
}  # fmt: skip
"""Tags of samples that name their split."""


class FiftyOneFormat(SourceFormat):
    """A folder with `samples.json`; `columns.objects` or `columns.label` names another field."""

    files = "FiftyOne's samples.json"

    def supports(self, task: Task) -> bool:
        """Object detection, and classification of images."""
        return task.spec.detects or (task.spec.answer == "label" and not task.spec.video)

    def recognises(self, location: Location) -> bool:
        """A file of `samples` that have a `filepath`, or its folder."""
        file = _samples_file(location.path)
        if file.name != SAMPLES or not file.is_file():
            return False
        content = load_json(file)
        samples = content.get("samples") if isinstance(content, dict) else None
        return isinstance(samples, list) and any(
            isinstance(sample, dict) and "filepath" in sample for sample in samples[:1]
        )

    def guess_task(self, path: str) -> Task:
        """The task of the first field of labels."""
        for sample in _samples(Path(path)):
            for value in sample.values():
                if isinstance(value, dict) and value.get("_cls") in KINDS:
                    return KINDS[value["_cls"]]
        return super().guess_task(path)

    def open(self, source: Source) -> Splits:
        """Splits that all samples are tagged with, or all samples as one piece."""
        samples = _samples(Path(source.location))
        found = [_split(sample) for sample in samples]
        if not samples or None in found:
            return {None: partial(_read, source, None)}
        places = take_missing_from_train({split: split for split in found if split is not None})
        return {key: partial(_read, source, split) for key, split in places.items()}

    def reads(self, source: Source) -> Iterator[Path]:
        """The file, and the images of its samples."""
        path = Path(source.location)
        yield _samples_file(path)
        for sample in _samples(path):
            if isinstance(sample.get("filepath"), str):
                yield _image(source, sample["filepath"])


def _read(source: Source, split: Split | None) -> Iterator[Sample]:
    """Read the samples of one split; None for all.

    Yields:
        One sample per image that decodes; its id is its path, as the export has it.

    Raises:
        DataError: If the file is corrupt or empty, or too many images have faults.
    """
    samples = _samples(Path(source.location))
    if split is not None:
        samples = [sample for sample in samples if _split(sample) is split]
    if not samples:
        raise DataError(f"{SAMPLES} of {source.location} lists no samples: export it again")
    with Reading(source.reader, SAMPLES, len(samples)) as reading:
        kept: list[tuple[dict[str, Any], str]] = []
        seen: set[str] = set()
        for position, sample in enumerate(samples):
            with reading.tolerate(f"{SAMPLES}, sample {position}"):
                place = sample.get("filepath")
                if not isinstance(place, str):
                    text = f"{SAMPLES}: sample {position} has no filepath"
                    raise FaultError(FaultKind.ROW_INCOMPLETE, text)
                if place in seen:
                    raise FaultError(FaultKind.IMAGE_TWICE, f"{SAMPLES}: {place} is listed twice")
                seen.add(place)
                kept.append((sample, place))
        paths = [_image(source, place) for _, place in kept]
        for (sample, place), picture in zip(kept, reading.open_all(paths), strict=True):
            if picture is not None:
                with reading.tolerate(Path(place).name):
                    yield Sample(place, picture, _answer(sample, picture, source, reading))


def _samples_file(path: Path) -> Path:
    return path / SAMPLES if path.is_dir() else path


def _samples(path: Path) -> list[dict[str, Any]]:
    content = load_json(_samples_file(path))
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(entry, dict) for entry in samples):
        raise DataError(
            f"{path} holds no list of samples: export it as fiftyone.types.FiftyOneDataset"
        )
    return samples


def _split(sample: Mapping[str, Any]) -> Split | None:
    """The split that a sample is tagged with."""
    tags = sample.get("tags")
    for tag in tags if isinstance(tags, list) else ():
        if isinstance(tag, str) and tag.lower() in TAGS:
            return TAGS[tag.lower()]
    return None


def _image(source: Source, place: str) -> Path:
    """The file of a sample: where the export says, or else by its name below the folder."""
    folder = Path(source.images) if source.images else _samples_file(Path(source.location)).parent
    path = folder / place  # an absolute path stays what it is
    if path.is_file():
        return path
    beside = (folder / name for name in (Path(place).name, f"data/{Path(place).name}"))
    return next((file for file in beside if file.is_file()), path)


def _answer(
    sample: Mapping[str, Any], picture: Image, source: Source, reading: ImageReader
) -> Answer:
    labels = source.labels or None
    where = f"{SAMPLES}, {sample['filepath']}"
    if source.task.spec.detects:
        value = _field(sample, source.columns.get("objects"), "Detections", where)
        return Answer(_boxes(value.get("detections") or [], picture, labels, where, reading))
    value = _field(sample, source.columns.get("label"), "Classification", where)
    label = str(value.get("label"))
    if labels is not None and label not in labels:
        raise stray_label(where, label, labels)
    return Answer(label=label)


def _field(
    sample: Mapping[str, Any], named: str | None, kind: str, where: str
) -> Mapping[str, Any]:
    """The field with the labels: the named one, `ground_truth`, or the only one of its class."""
    fitting = [
        name
        for name, value in sample.items()
        if isinstance(value, dict) and value.get("_cls") == kind
    ]
    name = named or (FIELD if FIELD in fitting or len(fitting) != 1 else fitting[0])
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


def _boxes(
    detections: Sequence[Any],
    picture: Image,
    labels: Sequence[str] | None,
    where: str,
    reading: ImageReader,
) -> tuple[Box, ...]:
    boxes: list[Box] = []
    for position, found in enumerate(detections, start=1):
        at = f"{where}, detection {position}"
        with reading.tolerate(where):
            label = found.get("label") if isinstance(found, dict) else None
            if not isinstance(label, str):
                raise FaultError(FaultKind.ROW_INCOMPLETE, f"{at} has no label")
            if labels is not None and label not in labels:
                continue
            try:
                x, y, width, height = (float(value) for value in found["bounding_box"])
            except (KeyError, TypeError, ValueError) as error:
                raise FaultError(
                    FaultKind.BOX_MALFORMED, f"{at}: bounding_box is no list of four numbers"
                ) from error
            across, down = picture.size
            edges = (x * across, y * down, (x + width) * across, (y + height) * down)
            boxes.append(checked_box(edges, label, picture.size, at))
    return tuple(boxes)
