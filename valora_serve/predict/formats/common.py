"""What formats share: one list of classes of several box domains, and files in one rename."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from valora_serve.errors import SettingsError
from valora_serve.predict.records import PREDICTIONS

if TYPE_CHECKING:
    from pathlib import Path

    from valora_serve.predict.records import Results


def class_indices(results: Results, kind: str) -> tuple[dict[tuple[str, str], int], list[str]]:
    """Number the classes of all domains whose answers are boxes.

    Args:
        results: The run.
        kind: The format, for the message.

    Returns:
        Index from 0 of each (domain, label), and the names by index: the label, or
        ``domain/label`` where several domains have it.

    Raises:
        SettingsError: No domain answers with boxes.
    """
    pairs = [
        (facts.name, label)
        for facts in results.domains.values()
        if facts.boxes
        for label in facts.labels
    ]
    if not pairs:
        raise SettingsError(f"format {kind} holds boxes, and no domain has any: use jsonl")
    shared = Counter(label for _, label in pairs)
    names = [label if shared[label] == 1 else f"{domain}/{label}" for domain, label in pairs]
    return {pair: number for number, pair in enumerate(pairs)}, names


def written(path: Path, text: str) -> Path:
    """Write a file in one rename, so that it is never half there.

    Returns:
        The file.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def write_jsonl(results: Results) -> Path:
    """Return the file that the run itself has written."""
    return results.out / PREDICTIONS
