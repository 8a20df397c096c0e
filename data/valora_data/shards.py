"""Samples of one domain and split on disk: a Hugging Face data set that any tool can open.

Columns: `id` (string), `image` (PNG), `objects` = {`bbox`: COCO's (x, y, width, height) in pixels,
`category`: class index, `score`: confidence}. The label names travel as the data set's features.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import datasets


def _features(labels: Sequence[str]) -> datasets.Features:
    from datasets import ClassLabel, Features, Image, List, Value

    return Features(
        {
            "id": Value("string"),
            "image": Image(),
            "objects": {
                "bbox": List(List(Value("float32"), length=4)),
                "category": List(ClassLabel(names=list(labels))),
                "score": List(Value("float32")),
            },
        }
    )


def _row(sample: Sample, index_of: dict[str, int]) -> dict[str, Any]:
    boxes = sample.answer.boxes
    return {
        "id": sample.id,
        "image": sample.image,
        "objects": {
            "bbox": [[b.x0, b.y0, b.x1 - b.x0, b.y1 - b.y0] for b in boxes],
            "category": [index_of[b.label] for b in boxes],
            "score": [b.confidence for b in boxes],
        },
    }


def write(samples: Iterable[Sample], labels: Sequence[str], folder: Path) -> int:
    """Write samples as a Hugging Face data set.

    Args:
        samples: What to write; consumed once.
        labels: Label set in the order of class indices.
        folder: A folder that does not exist yet.

    Returns:
        How many samples were written.

    Raises:
        DataError: If there is no sample, or a box bears a label outside `labels`.
    """
    from datasets import Dataset

    index_of = {label: index for index, label in enumerate(labels)}
    try:
        rows = [_row(sample, index_of) for sample in samples]
    except KeyError as error:
        raise DataError(f"label {error.args[0]!r} is not one of {', '.join(labels)}") from error
    if not rows:
        raise DataError(f"no samples to write to {folder.name}: the source is empty")
    Dataset.from_list(rows, features=_features(labels)).save_to_disk(folder)
    return len(rows)


def read(folder: Path) -> list[Sample]:
    """Read what `write` wrote.

    Raises:
        DataError: If the folder is missing or is not such a data set.
    """
    from datasets import load_from_disk

    try:
        dataset = load_from_disk(str(folder), keep_in_memory=True)
        names = dataset.features["objects"]["category"].feature.names
        return [_sample(row, names) for row in dataset]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder} is not a readable data set ({error}): make it again") from error


def _sample(row: dict[str, Any], names: Sequence[str]) -> Sample:
    objects = row["objects"]
    boxes = tuple(
        Box(x, y, x + w, y + h, names[category], score)
        for (x, y, w, h), category, score in zip(
            objects["bbox"], objects["category"], objects["score"], strict=True
        )
    )
    return Sample(row["id"], row["image"].convert("RGB"), Answer(boxes))
