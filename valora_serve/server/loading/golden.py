"""Replays the golden examples of a bundle: it must answer as it did when it was exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from valora_data.contract.bundle import GOLDEN, MANIFEST
from valora_data.contract.heads import CONFIDENCE_TOLERANCE, golden_text, text_matches
from valora_serve.errors import AdapterError
from valora_serve.types import Finish, Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from valora_data.contract.heads import HeadResult
    from valora_serve.types import EngineClient


async def replay(engine: EngineClient, folder: Path) -> int:
    """Send the golden examples of a served bundle to the engine and compare the answers.

    Args:
        engine: Serves the bundle.
        folder: Folder of the bundle.

    Returns:
        Number of examples.

    Raises:
        AdapterError: An answer differs, or the examples cannot be read.
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
    found = golden_text(text.strip()) if head is None else head.golden()
    same = (
        text_matches(text, expected) if head is None else head.matches(found, expected, threshold)
    )
    if not same:
        raise AdapterError(
            f"golden example {file.name} of {domain} came out differently here: expected "
            f"{expected}, got {found}; the bundle is not served (set golden to false to serve it "
            "all the same)"
        )


def _request(folder: Path, number: int, example: Mapping[str, Any], threshold: float) -> Request:
    """The request of an example: its images or frames, and its own question if it has one."""
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
        min_score=max(0.0, threshold - CONFIDENCE_TOLERANCE),
        sampling=sampling,
    )
