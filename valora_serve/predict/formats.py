"""Formats of predictions by name. Another package adds one in the group ``valora.predictions``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from valora_data.registry import Registry
from valora_serve.errors import SettingsError
from valora_serve.predict.records import PREDICTIONS, Prediction, Results, written

Writer = Callable[[Results], Path]
"""Writes the answers of a run into its output folder, and returns the file or folder."""
LOCAL = "/data/local-files/?d="
"""How Label Studio names a file below its document root (LOCAL_FILES_DOCUMENT_ROOT)."""


def class_indices(results: Results, kind: str) -> dict[tuple[str, str], tuple[int, str]]:
    """Return index and name (``domain/label`` if shared) of the class of each label of boxes."""
    pairs = [(m.name, label) for m in results.domains.values() if m.boxes for label in m.labels]
    if not pairs:
        raise SettingsError(f"format {kind} holds boxes, and no domain has any: use jsonl")
    shared = Counter(label for _, label in pairs)
    return {
        (domain, label): (number, label if shared[label] == 1 else f"{domain}/{label}")
        for number, (domain, label) in enumerate(pairs)
    }


def write_jsonl(results: Results) -> Path:
    """Return the file that the run itself has written."""
    return results.out / PREDICTIONS


def write_coco(results: Results) -> Path:
    """Write ``coco.json``: boxes as (x, y, width, height) in pixels, ids from 1."""
    indices = class_indices(results, "coco")
    images: dict[str, dict[str, Any]] = {}
    annotations: list[dict[str, Any]] = []
    for made in results.predictions():
        if not results.domains[made.domain].boxes:
            continue
        size = {"width": made.width, "height": made.height}
        fields = {"id": len(images) + 1, "file_name": made.file, **size}
        image = images.setdefault(made.file, fields)
        for found in made.detections:
            x0, y0, x1, y1 = found["box"]
            annotations.append({
                "id": len(annotations) + 1, "image_id": image["id"],
                "category_id": indices[made.domain, found["label"]][0] + 1,
                "bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0),
                "iscrowd": 0, "score": found["confidence"],
            })  # fmt: skip
    content = {
        "info": {"description": f"predictions of {results.model} (VaLoRA)"},
        "images": list(images.values()),
        "categories": [
            {"id": number + 1, "name": name, "supercategory": domain}
            for (domain, _), (number, name) in indices.items()
        ],
        "annotations": annotations,
    }
    return written(results.out / "coco.json", json.dumps(content, ensure_ascii=False) + "\n")


def write_yolo(results: Results) -> Path:
    """Write ``yolo/``, to train Ultralytics with; ``confidences/`` is as its `save_conf` writes."""
    indices = class_indices(results, "yolo")
    folder = results.out / "yolo"
    rows: dict[str, list[tuple[str, str]]] = {}
    for made in results.predictions():
        if not results.domains[made.domain].boxes:
            continue
        of_file = rows.setdefault(made.file, [])
        for found in made.detections:
            (x0, y0, x1, y1), width, height = found["box"], made.width, made.height
            values = ((x0 + x1) / 2 / width, (y0 + y1) / 2 / height,
                      (x1 - x0) / width, (y1 - y0) / height)  # fmt: skip
            number, _ = indices[made.domain, found["label"]]
            row = f"{number} " + " ".join(f"{value:.8f}" for value in values)
            of_file.append((f"{row}\n", f"{row} {found['confidence']:.6f}\n"))
    for file, of_file in rows.items():
        for at, part in enumerate(("labels", "confidences")):
            path = (folder / part / file).with_suffix(".txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            written(path, "".join(row[at] for row in of_file))
    if not os.path.lexists(folder / "images"):
        (folder / "images").symlink_to(results.source, target_is_directory=True)
    content = {"path": str(folder.resolve()), "train": "images", "val": "images",
               "names": dict(indices.values())}  # fmt: skip
    written(folder / "data.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return folder


def write_label_studio(results: Results) -> Path:
    """Write ``labelstudio.json``: a task per file, named below Label Studio's document root."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for made in results.predictions():
        tasks.setdefault(made.file, []).extend(_results(made))
    content = [
        {"data": {"image": LOCAL + file},
         "predictions": [{"model_version": results.model, "result": found}]}
        for file, found in tasks.items()
    ]  # fmt: skip
    text = json.dumps(content, ensure_ascii=False)
    return written(results.out / "labelstudio.json", text + "\n")


def _results(made: Prediction) -> list[dict[str, Any]]:
    def result(kind: str, tag: str, value: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"type": kind, "from_name": tag, "to_name": "image", "value": value,
                "meta": {"text": [made.domain]}, **more}  # fmt: skip

    if "detections" not in made.answer:
        if made.answer.get("label") is None:
            return [result("textarea", "text", {"text": [made.answer.get("text", "")]})]
        chosen = {"choices": [made.answer["label"]]}
        return [result("choices", "choice", chosen, score=made.answer.get("confidence"))]
    found = []
    for one in made.detections:
        (x0, y0, x1, y1), across, down = one["box"], 100 / made.width, 100 / made.height
        value = {"x": x0 * across, "y": y0 * down, "width": (x1 - x0) * across,
                 "height": (y1 - y0) * down, "rotation": 0,
                 "rectanglelabels": [one["label"]]}  # fmt: skip
        found.append(
            result("rectanglelabels", "label", value, original_width=made.width,
                   original_height=made.height, image_rotation=0, score=one["confidence"])
        )  # fmt: skip
    return found


WRITERS: Registry[Writer] = Registry(
    "valora.predictions",
    "format",
    {
        "jsonl": f"{__name__}:write_jsonl",
        "coco": f"{__name__}:write_coco",
        "yolo": f"{__name__}:write_yolo",
        "labelstudio": f"{__name__}:write_label_studio",
    },
    SettingsError,
)
