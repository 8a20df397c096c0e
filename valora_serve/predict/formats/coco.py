"""COCO JSON: images, categories, and annotations with a `score`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from valora_serve.predict.formats.common import class_indices, written

if TYPE_CHECKING:
    from pathlib import Path

    from valora_serve.predict.records import Results


def write_coco(results: Results) -> Path:
    """Write ``coco.json``: boxes as (x, y, width, height) in pixels, ids from 1.

    A category's `supercategory` is its domain.
    """
    indices, names = class_indices(results, "coco")
    images: dict[str, dict[str, Any]] = {}
    annotations: list[dict[str, Any]] = []
    for made in results.predictions():
        if not results.domains[made.domain].boxes:
            continue
        size = {"width": made.width, "height": made.height}
        image = images.setdefault(
            made.file, {"id": len(images) + 1, "file_name": made.file, **size}
        )
        for found in made.detections:
            x0, y0, x1, y1 = found["box"]
            annotations.append({
                "id": len(annotations) + 1,
                "image_id": image["id"],
                "category_id": indices[made.domain, found["label"]] + 1,
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "area": (x1 - x0) * (y1 - y0),
                "iscrowd": 0,
                "score": found["confidence"],
            })  # fmt: skip
    content = {
        "info": {"description": f"predictions of {results.model} (VaLoRA)"},
        "images": list(images.values()),
        "categories": [
            {"id": number + 1, "name": names[number], "supercategory": domain}
            for (domain, _), number in indices.items()
        ],
        "annotations": annotations,
    }
    return written(results.out / "coco.json", json.dumps(content, ensure_ascii=False) + "\n")
