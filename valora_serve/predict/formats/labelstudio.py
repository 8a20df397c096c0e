"""Label Studio: tasks with `predictions`, which annotators see and correct."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from valora_serve.predict.formats.common import written

if TYPE_CHECKING:
    from pathlib import Path

    from valora_serve.predict.records import Prediction, Results

LOCAL = "/data/local-files/?d="
"""How Label Studio names a file below its document root (LOCAL_FILES_DOCUMENT_ROOT)."""


def write_label_studio(results: Results) -> Path:
    """Write ``labelstudio.json``: one task per file, with the answers of all domains.

    Images are named by their path below the folder that was read, which Label Studio's document
    root must be. The result of a domain has `from_name` ``label`` for boxes, ``choice`` for labels
    and ``text`` for texts, and `to_name` ``image``.
    """
    tasks: dict[str, dict[str, Any]] = {}
    for made in results.predictions():
        task = tasks.setdefault(
            made.file,
            {
                "data": {"image": LOCAL + made.file},
                "predictions": [{"model_version": results.model, "result": []}],
            },
        )
        task["predictions"][0]["result"] += _results(made)
    text = json.dumps(list(tasks.values()), ensure_ascii=False)
    return written(results.out / "labelstudio.json", text + "\n")


def _results(made: Prediction) -> list[dict[str, Any]]:
    if "detections" in made.answer:
        return [_rectangle(made, found) for found in made.detections]
    if made.answer.get("label") is not None:
        value: dict[str, Any] = {"choices": [made.answer["label"]]}
        score = {"score": made.answer.get("confidence")}
        return [_result("choices", "choice", value, made.domain) | score]
    return [_result("textarea", "text", {"text": [made.answer.get("text", "")]}, made.domain)]


def _rectangle(made: Prediction, found: dict[str, Any]) -> dict[str, Any]:
    x0, y0, x1, y1 = found["box"]
    across, down = 100 / made.width, 100 / made.height
    value = {
        "x": x0 * across, "y": y0 * down, "width": (x1 - x0) * across, "height": (y1 - y0) * down,
        "rotation": 0, "rectanglelabels": [found["label"]],
    }  # fmt: skip
    size = {"original_width": made.width, "original_height": made.height, "image_rotation": 0}
    made_of = _result("rectanglelabels", "label", value, made.domain)
    return made_of | size | {"score": found["confidence"]}


def _result(kind: str, tag: str, value: dict[str, Any], domain: str) -> dict[str, Any]:
    return {
        "type": kind, "from_name": tag, "to_name": "image", "value": value,
        "meta": {"text": [domain]},
    }  # fmt: skip
