"""Formats of predictions by name. Another package adds one in the group ``valora.predictions``."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from valora_data.registry import Registry
from valora_serve.errors import SettingsError
from valora_serve.predict.run import PREDICTIONS, Prediction, Results, written

Writer = Callable[[Results], Path]
"""Writes the answers of a run into its output folder, and returns the file or folder."""
Rows = list[tuple[Prediction, list[tuple[int, list[float], float]]]]
"""Answers with the class, edges and confidence of each box."""
LOCAL = "/data/local-files/?d="
"""How Label Studio names a file below its document root (LOCAL_FILES_DOCUMENT_ROOT)."""


def boxes(results: Results, kind: str) -> tuple[list[tuple[str, str]], list[str], Rows]:
    """Return (domain, label) and name of each class, and each answer with its boxes.

    The name is the label, or ``domain/label`` where several domains have it. `kind` is the format.
    """
    models = [model for model in results.domains.values() if model.boxes]
    classes = [(model.name, label) for model in models for label in model.labels]
    if not classes:
        raise SettingsError(f"format {kind} holds boxes, and no domain has any: use jsonl")
    shared = Counter(label for _, label in classes)
    names = [label if shared[label] == 1 else f"{domain}/{label}" for domain, label in classes]
    rows = []
    for made in results.predictions():
        if results.domains[made.domain].boxes:
            found = [
                (classes.index((made.domain, one["label"])), one["box"], one["confidence"])
                for one in made.detections
            ]
            rows.append((made, found))
    return classes, names, rows


def write_jsonl(results: Results) -> Path:
    """Return the file that the run itself has written."""
    return results.out / PREDICTIONS


def write_coco(results: Results) -> Path:
    """Write ``coco.json``: boxes as (x, y, width, height) in pixels, ids from 1."""
    classes, names, rows = boxes(results, "coco")
    images: dict[str, dict[str, Any]] = {}
    annotations: list[dict[str, Any]] = []
    for made, found in rows:
        image = images.setdefault(made.file, {
            "id": len(images) + 1, "file_name": made.file, "width": made.width,
            "height": made.height,
        })  # fmt: skip
        for number, (x0, y0, x1, y1), score in found:
            annotations.append({
                "id": len(annotations) + 1, "image_id": image["id"], "category_id": number + 1,
                "bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0), "iscrowd": 0,
                "score": score,
            })  # fmt: skip
    content = {
        "info": {"description": f"predictions of {results.model} (VaLoRA)"},
        "images": list(images.values()),
        "categories": [
            {"id": number, "name": name, "supercategory": domain}
            for number, (name, (domain, _)) in enumerate(zip(names, classes, strict=True), 1)
        ],
        "annotations": annotations,
    }
    return written(results.out / "coco.json", json.dumps(content, ensure_ascii=False) + "\n")


def write_yolo(results: Results) -> Path:
    """Write ``yolo/``, to train Ultralytics with; ``confidences/`` is as its `save_conf` writes."""
    (_, names, rows), folder = boxes(results, "yolo"), results.out / "yolo"
    files: dict[Path, tuple[str, list[tuple[str, str]]]] = {}
    for made, found in rows:
        if not (results.source / made.file).exists():  # not any more
            continue
        # Ultralytics finds labels by the last folder `images`, and resolves links to folders.
        name = Path(*(part for part in Path(made.file).parts if part != "images"))
        file, lines = files.setdefault(name.with_suffix(".txt"), (made.file, []))
        if file != made.file:
            said = f"format yolo has one label file for {file} and {made.file}: rename one of them"
            raise SettingsError(said)
        width, height = made.width, made.height
        for number, (x0, y0, x1, y1), score in found:
            values = ((x0 + x1) / 2 / width, (y0 + y1) / 2 / height,
                      (x1 - x0) / width, (y1 - y0) / height)  # fmt: skip
            row = f"{number} " + " ".join(f"{value:.8f}" for value in values)
            lines.append((f"{row}\n", f"{row} {score:.6f}\n"))
    if (folder / "images").is_symlink():  # to the folder of the images, by earlier versions
        (folder / "images").unlink()
    for name, (file, lines) in files.items():
        plain, sure, link = (folder / part / name for part in ("labels", "confidences", "images"))
        for path in (plain, sure, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        written(plain, "".join(row for row, _ in lines))
        written(sure, "".join(row for _, row in lines))
        if not os.path.lexists(link := link.with_suffix(Path(file).suffix)):
            link.symlink_to(results.source / file)
    content = {"path": str(folder.resolve()), "train": "images", "val": "images",
               "names": dict(enumerate(names))}  # fmt: skip
    written(folder / "data.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return folder


def write_label_studio(results: Results) -> Path:
    """Write ``labelstudio.json``: a task per file, named below Label Studio's document root."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for made in results.predictions():
        tasks.setdefault(made.file, []).extend(_results(made))
    content = [
        {"data": {"image": LOCAL + quote(file)},
         "predictions": [{"model_version": results.model, "result": found}]}
        for file, found in tasks.items()
    ]  # fmt: skip
    return written(results.out / "labelstudio.json", json.dumps(content, ensure_ascii=False) + "\n")


def _results(made: Prediction) -> list[dict[str, Any]]:
    def result(kind: str, tag: str, value: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"type": kind, "from_name": tag, "to_name": "image", "value": value,
                "meta": {"text": [made.domain]}, **more}  # fmt: skip

    answer = made.answer
    if answer.get("label") is not None:
        chosen = {"choices": [answer["label"]]}
        return [result("choices", "choice", chosen, score=answer.get("confidence"))]
    if "detections" not in answer:
        return [result("textarea", "text", {"text": [answer.get("text", "")]})]
    found, across, down = [], 100 / made.width, 100 / made.height
    for one in made.detections:
        x0, y0, x1, y1 = one["box"]
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
