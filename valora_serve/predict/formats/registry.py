"""Formats of predictions by name. Another package adds one in the group ``valora.predictions``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from valora_data.registry import Registry
from valora_serve.errors import SettingsError
from valora_serve.predict.records import Results

Writer = Callable[[Results], Path]
"""Writes the answers of a run into its output folder, and returns the file or folder.

Raises a `SettingsError` if no answer fits the format.
"""

WRITERS: Registry[Writer] = Registry(
    "valora.predictions",
    "format",
    {
        "jsonl": "valora_serve.predict.formats.common:write_jsonl",
        "coco": "valora_serve.predict.formats.coco:write_coco",
        "yolo": "valora_serve.predict.formats.yolo:write_yolo",
        "labelstudio": "valora_serve.predict.formats.labelstudio:write_label_studio",
    },
    SettingsError,
)
