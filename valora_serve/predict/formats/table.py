"""CSV: one row per box, label or text; a file without boxes has one row without a label."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from valora_serve.predict.formats.files import written

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from valora_serve.predict.records import Prediction, Results

COLUMNS = ("file", "domain", "task", "label", "confidence", "x0", "y0", "x1", "y1", "text")
FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a text that spreadsheets would compute instead of showing it."""


def write_csv(results: Results) -> Path:
    """Write ``predictions.csv``: boxes in pixels, with their confidences."""
    buffer = io.StringIO()
    table = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    table.writeheader()
    for made in results.predictions():
        table.writerows(_rows(made))
    return written(results.out / "predictions.csv", buffer.getvalue())


def _rows(made: Prediction) -> Iterator[dict[str, Any]]:
    common = {"file": _shown(made.file), "domain": made.domain, "task": made.task}
    if "detections" not in made.answer:
        texts = {name: _shown(made.answer.get(name) or "") for name in ("label", "text")}
        yield common | texts | {"confidence": made.answer.get("confidence")}
        return
    for found in made.detections:
        edges = dict(zip(("x0", "y0", "x1", "y1"), found["box"], strict=True))
        label = _shown(found["label"])
        yield common | {"label": label, "confidence": found["confidence"], **edges}
    if not made.detections:
        yield common


def _shown(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULAS) else text
