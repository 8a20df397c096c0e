"""Golden examples: a bundle must say here what it said where it was made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from valora_data.contract.bundle import MANIFEST
from valora_serve.errors import AdapterError
from valora_serve.types import Finish, Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_serve.types import EngineClient, HeadResult

GOLDEN = "golden/golden.json"
PIXELS = 0.5  # by how far an edge of a golden box may differ
CONFIDENCE = 0.01


async def replay(engine: EngineClient, folder: Path) -> int:
    """Ask a served bundle's golden examples again.

    Args:
        engine: Serves the bundle.
        folder: The bundle.

    Returns:
        How many there were.

    Raises:
        AdapterError: One came out differently.
    """
    if not (folder / GOLDEN).is_file():
        return 0
    try:
        examples = json.loads((folder / GOLDEN).read_text(encoding="utf-8"))
        domains = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["domains"]
        for number, example in enumerate(examples):
            threshold = float(domains[example["domain"]].get("threshold") or 0.0)
            await _check(engine, folder, number, example, threshold)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(
            f"the golden examples of {folder} are damaged ({error!r}): export the bundle again"
        ) from error
    return len(examples)


async def _check(
    engine: EngineClient, folder: Path, number: int, example: Mapping[str, Any], threshold: float
) -> None:
    domain, file = example["domain"], folder / str(example["image"])
    request = _request(folder, number, example, threshold)
    head: HeadResult | None = None
    text = ""
    async for output in engine.generate(request):
        text += output.text
        if output.finish in (Finish.ERROR, Finish.CANCELLED):
            raise AdapterError(
                f"golden example {file.name} of {domain} is not answered ({output.error}): the "
                "bundle is not served"
            )
        head = output.head or head
    expected = example["expected"]
    if not _same(head, text, expected, threshold):
        raise AdapterError(
            f"golden example {file.name} of {domain} came out differently here: expected "
            f"{expected}, got {_said(head, text)}; the bundle is not served (set golden to "
            "false to serve it all the same)"
        )


def _request(folder: Path, number: int, example: Mapping[str, Any], threshold: float) -> Request:
    """The question of an example: images or frames, and words of its own if it has any."""
    pictures = []
    for name in (example["image"], *example.get("rest", ())):
        with Image.open(folder / str(name)) as image:
            pictures.append(image.convert("RGB"))
    video = example.get("media") == "video"
    messages = None
    if example.get("question") is not None:
        shown = [{"type": "video"}] if video else [{"type": "image"}] * len(pictures)
        content = [{"type": "text", "text": str(example["question"])}, *shown]
        messages = [{"role": "user", "content": content}]
    sampling = SamplingParams()
    if example.get("max_tokens") is not None:
        sampling = replace(sampling, max_tokens=int(example["max_tokens"]))
    return Request(
        id=f"golden-{folder.name}-{number}",
        model=example["domain"],
        messages=messages,
        images=() if video else pictures,
        videos=[pictures] if video else (),
        min_score=max(0.0, threshold - CONFIDENCE),
        sampling=sampling,
    )


def _same(head: HeadResult | None, text: str, expected: Any, threshold: float) -> bool:
    if head is None:
        return bool(text.strip() == _text(expected))
    if head.kind == "detection":
        return _same_boxes(_rows(head), expected, threshold)
    if isinstance(expected, dict):
        told = expected.get("confidence")
        sure = head.confidences.get(head.label or "", 0.0)
        close = told is None or abs(sure - float(told)) <= CONFIDENCE
        return bool(head.label == expected.get("label") and close)
    return bool(head.label == expected)


def _same_boxes(
    rows: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], threshold: float
) -> bool:
    """Whether every box is there and no other; those about the threshold may come or go."""
    left = list(rows)
    for wanted in expected:
        found = next((row for row in left if _close(row, wanted)), None)
        if found is not None:
            left.remove(found)
        elif wanted["confidence"] > threshold + CONFIDENCE:
            return False
    return all(row["confidence"] <= threshold + CONFIDENCE for row in left)


def _close(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return bool(
        row["label"] == wanted["label"]
        and abs(row["confidence"] - wanted["confidence"]) <= CONFIDENCE
        and all(abs(a - b) <= PIXELS for a, b in zip(row["box"], wanted["box"], strict=True))
    )


def _text(expected: Any) -> Any:
    return expected.get("text") if isinstance(expected, dict) else expected


def _rows(head: HeadResult) -> list[dict[str, Any]]:
    return [
        {"label": item.label, "box": list(item.box), "confidence": item.confidence}
        for item in head.detections[0]
    ]


def _said(head: HeadResult | None, text: str) -> Any:
    if head is None:
        return text.strip()
    if head.kind == "detection":
        return _rows(head)
    return {"label": head.label, "confidence": head.confidences.get(head.label or "")}
