"""Replays the golden examples of a bundle: it must answer as it did when it was exported."""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, model_validator

from valora_data.contract.bundle import GOLDEN, MANIFEST
from valora_data.contract.files import UnreadableError, read_bytes, read_json, shown
from valora_data.contract.manifest import PROMPT_LENGTH
from valora_data.contract.results import CONFIDENCE_TOLERANCE, computed_in, text_matches
from valora_serve.errors import AdapterError, ImageError
from valora_serve.server.media.fetch import MediaUrl
from valora_serve.server.media.reader import MediaReader
from valora_serve.server.settings import ServerSettings
from valora_serve.types import EngineClient, Finish, Request, SamplingParams

MAX_EXAMPLES = 1000  # most golden examples of a bundle
MAX_IMAGES = 256  # most images or frames of a golden example
IMAGE_BYTES = 64 << 20  # most bytes of the file of a golden image
LIMITS = ServerSettings(
    max_image_bytes=IMAGE_BYTES, max_image_pixels=40_000_000, max_image_side=65_535,
    max_image_ratio=200.0, max_request_pixels=160_000_000, max_decode_bytes=2**30,
    decode_seconds=30.0, media_seconds=30.0,
)  # fmt: skip
"""Limits of the images of a golden example."""


async def replay(engine: EngineClient, folder: Path) -> int:
    """Send the golden examples of a served bundle to the engine and compare the answers."""
    reader = MediaReader(LIMITS)
    try:
        examples = await asyncio.to_thread(read_examples, folder)
        for number, example in enumerate(examples):
            await _check(engine, reader, folder, number, example)
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, ImageError, UnreadableError
    ) as error:  # fmt: skip
        reason = error if isinstance(error, ImageError) else " ".join(repr(error).split())[:200]
        if isinstance(error, UnreadableError):
            reason = f"a file {error.reason}"
        raise AdapterError(
            f"the golden examples of {folder.name} are damaged ({reason}): export the bundle again"
        ) from error
    finally:
        await reader.close()
    return len(examples)


class TeacherBox(BaseModel):
    """A detected box (x0, y0, x1, y1), in pixels of the image."""

    model_config = ConfigDict(strict=True, frozen=True)

    label: str
    confidence: FiniteFloat
    box: list[FiniteFloat] = Field(min_length=4, max_length=4)


class TeacherAnswer(BaseModel):
    """What the small model that taught a domain answers for an example."""

    model_config = ConfigDict(strict=True, frozen=True)

    detections: list[TeacherBox] | None = Field(
        default=None, max_length=1000, description="its boxes from its own threshold on"
    )
    label: str | None = None
    confidence: FiniteFloat | None = None
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _named(cls, found: Any) -> Any:
        """Name the boxes, which bundles hold as a list."""
        if isinstance(found, dict) and not found.keys() & {"detections", "label", "text"}:
            raise ValueError("it holds neither boxes nor a label nor a text")
        return {"detections": found} if isinstance(found, list) else found


class Example(BaseModel):
    """A golden example, as docs/reference/bundle.md describes it; `files` are its images."""

    model_config = ConfigDict(strict=True, frozen=True)

    domain: str
    image: str | None = None
    rest: list[str] | None = Field(default=None, max_length=MAX_IMAGES - 1)
    media: str | None = None
    question: str | None = Field(default=None, max_length=PROMPT_LENGTH)
    max_tokens: int | None = Field(default=None, ge=1)
    expected: Any
    teacher: TeacherAnswer | None = None
    threshold: float = 0.0
    dtype: str = "float32"  # that the base model computed in
    files: tuple[Path, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, entry: Any) -> Any:
        """Take the prompt of earlier bundles' questions about contexts and texts, without image."""
        if isinstance(entry, dict) and "image" not in entry:
            entry = {"question": entry.get("prompt")} | entry
            if not entry["question"]:
                raise ValueError("expected an image or a prompt")
        return entry


def read_examples(folder: Path) -> list[Example]:
    """Read the golden examples of a bundle; none if it has no file of them."""
    if not os.path.lexists(folder / GOLDEN):
        return []
    found = _LISTED.validate_python(read_json(folder / GOLDEN))
    manifest = read_json(folder / MANIFEST)
    domains, base = manifest["domains"], manifest.get("base") or {}
    examples = []
    for one in found:
        names = [] if one.image is None else [one.image, *(one.rest or ())]
        for name in names:
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                raise ValueError("an image lies outside of the bundle")
        examples.append(one.model_copy(update={
            "threshold": float(domains[one.domain].get("threshold") or 0.0),
            "dtype": base.get("dtype", "float32"),
            "files": tuple(folder / name for name in names),
        }))  # fmt: skip
    return examples


_LISTED = TypeAdapter(Annotated[list[Example], Field(max_length=MAX_EXAMPLES)])


async def _check(
    engine: EngineClient, reader: MediaReader, folder: Path, number: int, example: Example
) -> None:
    domain, threshold = example.domain, example.threshold
    named = example.files[0].name if example.files else shown(example.question)
    files = [await asyncio.to_thread(read_bytes, one, IMAGE_BYTES) for one in example.files]
    with reader.pixels() as pixels:
        pictures = await reader.images([MediaUrl(content) for content in files], pixels)
    tokens = example.max_tokens
    request = Request.about(
        pictures, example.question, id=f"golden-{folder.name}-{number}", model=domain,
        video=example.media == "video", min_score=max(0.0, threshold - CONFIDENCE_TOLERANCE),
        sampling=SamplingParams() if tokens is None else SamplingParams(max_tokens=tokens),
        stream=False,
    )  # fmt: skip
    (last,) = [output async for output in engine.generate(request)]
    if last.finish in (Finish.ERROR, Finish.CANCELLED):
        raise AdapterError(
            f"golden example {named} of {domain} is not answered ({last.error}): the bundle is not "
            "served"
        )
    expected, found = example.expected, {"text": last.text.strip()}
    if last.head is None:
        same = text_matches(last.text, expected)
    else:
        found = last.head.golden()
        with computed_in(engine.dtype if example.dtype == "float32" else example.dtype):
            same = last.head.matches(found, expected, threshold)
    if not same:
        raise AdapterError(
            f"golden example {named} of {domain} came out differently here: expected "
            f"{shown(expected)}, got {shown(found)}; the bundle is not served (set golden to false "
            "to serve it all the same)"
        )
