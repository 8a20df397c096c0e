"""JSON Lines: one object per file and domain, as `Prediction` describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_serve.predict.records import PREDICTIONS

if TYPE_CHECKING:
    from pathlib import Path

    from valora_serve.predict.records import Results


def write_jsonl(results: Results) -> Path:
    """Return the file that the run itself has written."""
    return results.out / PREDICTIONS
