"""Ultralytics' format: a text file of normalised boxes for each image, and a YAML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from valora_serve.predict.formats.common import class_indices, written

if TYPE_CHECKING:
    from valora_serve.predict.records import Results


def write_yolo(results: Results) -> Path:
    """Write ``yolo/`` with ``data.yaml``, ``labels/`` and ``confidences/``.

    `labels/` holds one row "class x y width height" per box, which Ultralytics can be trained with;
    `images` is a link to the images that were read. The same rows with the confidence behind, as
    Ultralytics' own `save_conf` writes them, are in `confidences/`.
    """
    indices, names = class_indices(results, "yolo")
    folder = results.out / "yolo"
    rows: dict[str, list[tuple[str, float]]] = {}
    for made in results.predictions():
        if not results.domains[made.domain].boxes:
            continue
        of_file = rows.setdefault(made.file, [])
        for found in made.detections:
            number = indices[made.domain, found["label"]]
            of_file.append(
                (_row(number, found["box"], made.width, made.height), found["confidence"])
            )
    for file, found_rows in rows.items():
        plain = "".join(f"{row}\n" for row, _ in found_rows)
        sure = "".join(f"{row} {confidence:.6f}\n" for row, confidence in found_rows)
        for part, text in (("labels", plain), ("confidences", sure)):
            path = (folder / part / file).with_suffix(".txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            written(path, text)
    link = folder / "images"
    if not os.path.lexists(link):
        link.symlink_to(results.source, target_is_directory=True)
    content = {
        "path": str(folder.resolve()), "train": "images", "val": "images",
        "names": dict(enumerate(names)),
    }  # fmt: skip
    written(folder / "data.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return folder


def _row(number: int, box: list[float], width: int, height: int) -> str:
    x0, y0, x1, y1 = box
    values = ((x0 + x1) / 2 / width, (y0 + y1) / 2 / height, (x1 - x0) / width, (y1 - y0) / height)
    return f"{number} " + " ".join(f"{value:.8f}" for value in values)
