"""Replays the golden examples of a bundle: it must answer as it did when it was exported."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from valora_data.contract.bundle import GOLDEN, MANIFEST
from valora_data.contract.files import UnreadableError, read_bytes, read_json, shown
from valora_data.contract.manifest import PROMPT_LENGTH
from valora_data.contract.results import CONFIDENCE_TOLERANCE, HeadResult, text_matches
from valora_serve.errors import AdapterError, ImageError
from valora_serve.server.media.decode import Limits
from valora_serve.server.media.pool import Job, shared_pool
from valora_serve.types import EngineClient, Finish, Request, SamplingParams

MOST_EXAMPLES = 1000
"""Most golden examples of a bundle."""
MOST_IMAGES = 256
"""Most images or frames of a golden example."""
IMAGE_BYTES = 64 << 20
"""Most bytes of the file of a golden image."""
LIMITS = Limits(
    pixels=40_000_000,
    video_pixels=0,
    side=65_535,
    ratio=200.0,
    memory=2**30,
    seconds=30.0,
    video_seconds=0.0,
    frames=1,
)
"""Limits of a golden image."""
MOST_BOXES = 1000
"""Most boxes of a teacher on a golden image."""
MOST_PIXELS = 160_000_000
"""Most pixels of the images of one golden example."""


async def replay(engine: EngineClient, folder: Path) -> int:
    """Send the golden examples of a served bundle to the engine and compare the answers."""
    try:
        examples = await asyncio.to_thread(read_examples, folder)
        for number, example in enumerate(examples):
            await _check(engine, folder, number, example)
    except UnreadableError as error:
        raise AdapterError(
            f"the golden examples of {folder.name} are damaged, as a file {error.reason}: export "
            "the bundle again"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImageError) as error:
        reason = error if isinstance(error, ImageError) else repr(error)[:200]
        raise AdapterError(
            f"the golden examples of {folder.name} are damaged ({reason}): export the bundle again"
        ) from error
    return len(examples)


@dataclass(frozen=True)
class Example:
    """A golden example, as docs/reference/bundle.md describes it."""

    domain: str
    threshold: float
    dtype: str  # that the base model computed in
    files: tuple[Path, ...]
    video: bool
    question: str | None
    max_tokens: int | None
    expected: Any
    teacher: dict[str, Any] | None = None


def read_examples(folder: Path) -> list[Example]:
    """Read the golden examples of a bundle; none if it has no file of them."""
    if not os.path.lexists(folder / GOLDEN):
        return []
    stored = read_json(folder / GOLDEN)
    manifest = read_json(folder / MANIFEST)
    domains = manifest["domains"]
    if not isinstance(stored, list) or len(stored) > MOST_EXAMPLES:
        raise ValueError(f"expected a list of at most {MOST_EXAMPLES} examples")
    examples = []
    for entry in stored:
        # Questions about contexts and texts have no image; those of earlier bundles are prompts.
        asked = "question" if "image" in entry or "question" in entry else "prompt"
        names = [entry["image"], *(entry.get("rest") or ())] if "image" in entry else []
        question, tokens = entry.get(asked), entry.get("max_tokens")
        if not names and not question:
            raise ValueError("expected an image or a prompt")
        if len(names) > MOST_IMAGES or not all(isinstance(name, str) for name in names):
            raise ValueError(f"expected at most {MOST_IMAGES} names of images")
        if not isinstance(question, str | None) or len(question or "") > PROMPT_LENGTH:
            raise ValueError(f"expected a question of at most {PROMPT_LENGTH} characters")
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise ValueError("expected max_tokens of at least 1")
        for name in names:
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                raise ValueError("an image lies outside of the bundle")
        examples.append(
            Example(
                domain=entry["domain"],
                threshold=float(domains[entry["domain"]].get("threshold") or 0.0),
                dtype=manifest["base"]["dtype"],
                files=tuple(folder / name for name in names),
                video=entry.get("media") == "video",
                question=question,
                max_tokens=tokens,
                expected=entry["expected"],
                teacher=_teacher(entry.get("teacher")),
            )
        )
    return examples


def _teacher(found: Any) -> dict[str, Any] | None:
    """Check a teacher's answer, which is sent to clients as it is."""
    if found is None:
        return None
    if isinstance(found, list) and len(found) <= MOST_BOXES:
        return {"detections": [_box(entry) for entry in found]}
    if isinstance(found, dict):
        texts = {name: found[name] for name in ("label", "text") if name in found}
        if texts and all(isinstance(text, str) for text in texts.values()):
            sure = found.get("confidence")
            return texts if sure is None else texts | {"confidence": _number(sure)}
    raise ValueError(f"expected a teacher's answer, got {shown(found)}")


def _box(entry: dict[str, Any]) -> dict[str, Any]:
    label, box = entry["label"], entry["box"]
    if not isinstance(label, str) or not isinstance(box, list) or len(box) != 4:
        raise ValueError(f"expected a teacher's box, got {shown(entry)}")
    sure = _number(entry["confidence"])
    return {"label": label, "confidence": sure, "box": [_number(value) for value in box]}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a number, got {shown(value)}")
    return float(value)


async def _check(engine: EngineClient, folder: Path, number: int, example: Example) -> None:
    domain, threshold = example.domain, example.threshold
    named = example.files[0].name if example.files else shown(example.question)
    pictures = await _pictures(example)
    request = _request(f"golden-{folder.name}-{number}", example, pictures)
    head: HeadResult | None = None
    text = ""
    async for output in engine.generate(request):
        text += output.text
        if output.finish in (Finish.ERROR, Finish.CANCELLED):
            raise AdapterError(
                f"golden example {named} of {domain} is not answered ({output.error}): the "
                "bundle is not served"
            )
        head = output.head or head
    expected = example.expected
    found = {"text": text.strip()} if head is None else head.golden()
    same = (
        text_matches(text, expected)
        if head is None
        else head.matches(found, expected, threshold, example.dtype)
    )
    if not same:
        raise AdapterError(
            f"golden example {named} of {domain} came out differently here: expected "
            f"{shown(expected)}, got {shown(found)}; the bundle is not served (set golden to false "
            "to serve it all the same)"
        )


async def _pictures(example: Example) -> list[Image.Image]:
    """Decode an example's images."""
    pixels = 0

    def take(count: int) -> None:
        nonlocal pixels
        pixels += count
        if pixels > MOST_PIXELS:
            raise ImageError(f"an example has more than {MOST_PIXELS} pixels")

    found = []
    for file in example.files:
        content = await asyncio.to_thread(read_bytes, file, IMAGE_BYTES)
        job = Job("image", content, LIMITS, take)
        found += await shared_pool().decode(job, wait=LIMITS.seconds)
    return found


def _request(name: str, example: Example, pictures: list[Image.Image]) -> Request:
    """The request of an example: its images or frames, and its own question if it has one."""
    messages = None
    if example.question is not None:
        shown_as = [{"type": "video"}] if example.video else [{"type": "image"}] * len(pictures)
        content = [{"type": "text", "text": example.question}, *shown_as]
        messages = [{"role": "user", "content": content}]
    sampling = SamplingParams()
    if example.max_tokens is not None:
        sampling = replace(sampling, max_tokens=example.max_tokens)
    return Request(
        id=name,
        model=example.domain,
        messages=messages,
        images=() if example.video else pictures,
        videos=[pictures] if example.video else (),
        min_score=max(0.0, example.threshold - CONFIDENCE_TOLERANCE),
        sampling=sampling,
    )
