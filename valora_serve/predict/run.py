"""Asks an engine about many files, several at a time, and notes every answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL.Image import Image

from valora_data.cpu import ahead
from valora_data.errors import ValoraError
from valora_data.faults import FaultError, load_image
from valora_data.sources.formats.files import IMAGES, files_below, readable
from valora_data.sources.formats.videos import SUFFIXES, read_frames
from valora_serve.errors import SettingsError
from valora_serve.predict.records import Prediction
from valora_serve.server.gather import gathered
from valora_serve.types import EngineClient, Finish, Request, SamplingParams, ServedModel

STILLS = IMAGES - SUFFIXES
FRAMES = 8  # frames of a video, for domains that were measured with an unknown number


@dataclass(frozen=True, slots=True)
class Job:
    """A file that is to be answered."""

    path: Path
    name: str  # below the folder
    version: tuple[int, int]  # size and time
    domains: tuple[ServedModel, ...]  # which have not answered it yet
    video: bool


@dataclass(frozen=True, slots=True)
class Question:
    """What every request has in common; None for what each domain has."""

    prompt: str | None = None  # words, for domains that need some
    min_score: float | None = None  # least confidence of boxes
    max_tokens: int | None = None  # of written answers


def find_jobs(
    source: Path, domains: Sequence[ServedModel], done: Mapping[tuple[str, str], tuple[int, int]]
) -> tuple[list[Job], int]:
    """Return what is left to ask, and how many answers `done` has, by file and domain."""
    videos = tuple(model for model in domains if model.media == "video")
    images = tuple(model for model in domains if model.media not in ("video", "text"))
    kinds = [("images", STILLS)] * bool(images) + [("videos", SUFFIXES)] * bool(videos)
    wanted = frozenset().union(*(suffixes for _, suffixes in kinds))
    root, files = files_in(source, wanted)
    if not files:
        what = " or ".join(name for name, _ in kinds)
        raise SettingsError(f"{source} holds no {what}: check the path")
    jobs, answered = [], 0
    for path in files:
        name, facts = readable(path.relative_to(root).as_posix()), path.stat()
        version, video = (facts.st_size, facts.st_mtime_ns), path.suffix.lower() not in STILLS
        able = videos if video else images
        left = tuple(model for model in able if done.get((name, model.name)) != version)
        answered += len(able) - len(left)
        if left:
            jobs.append(Job(path, name, version, left, video))
    return jobs, answered


def files_in(source: Path, suffixes: Set[str]) -> tuple[Path, list[Path]]:
    """A folder and its files, or the folder of a file and that file, with these suffixes."""
    if source.is_dir():
        return source, files_below(source, frozenset(suffixes))
    return source.parent, [source] * (source.suffix.lower() in suffixes)


async def answer_all(
    engine: EngineClient,
    jobs: Sequence[Job],
    question: Question,
    note: Callable[[Prediction], None],
    at_once: int,
) -> None:
    """Answer all jobs; at most `at_once` files are in the engine, and others are decoded ahead."""
    decoded, turn = _decoded(jobs), asyncio.Lock()

    async def work() -> None:
        while True:
            async with turn:
                item = await asyncio.to_thread(lambda: next(decoded, None))
            if item is None:
                return
            for made in await _answers(engine, *item, question):
                note(made)

    await gathered(*(work() for _ in range(min(at_once, len(jobs)))), at_once=at_once)


def _decoded(jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Image] | str]]:
    """Each job with its images or frames, or with the reason why there are none."""
    for job, image in ahead(
        [job for job in jobs if not job.video], lambda job: load_image(job.path)
    ):
        try:
            yield job, [image.result()]
        except FaultError as error:
            yield job, error.text
    for job in jobs:
        if job.video:
            try:
                yield job, read_frames(job.path, max(m.images or FRAMES for m in job.domains))
            except (FaultError, ValoraError) as error:
                yield job, str(error)


async def _answers(
    engine: EngineClient, job: Job, content: list[Image] | str, question: Question
) -> list[Prediction]:
    made = {
        f"{job.name}:{m.name}": Prediction(job.name, m.name, m.task or "text", version=job.version)
        for m in job.domains
    }
    if isinstance(content, str):
        return [replace(one, error=content) for one in made.values()]
    first, *also = (
        make_request(name, model, content, question)
        for name, model in zip(made, job.domains, strict=True)
    )
    texts = dict.fromkeys(made, "")
    async for output in engine.generate(replace(first, also=tuple(also))):
        texts[output.id] += output.text
        fields: dict[str, Any] = {"width": content[0].width, "height": content[0].height}
        if output.finish in (Finish.ERROR, Finish.CANCELLED):
            fields["error"] = str(output.error or "the request was cancelled")
        elif output.finish is not None:
            answer = output.head.image_fields(0) if output.head is not None else None
            fields["answer"] = answer or {"text": texts[output.id].strip()}
        made[output.id] = replace(made[output.id], **fields)
    return list(made.values())


def make_request(
    name: str, model: ServedModel, content: Sequence[Image], question: Question
) -> Request:
    """Return a request with a file's image or frames, and the given words where some are needed."""
    words = (model.prompt or "{}").replace("{}", question.prompt or "")
    tokens = question.max_tokens or model.max_tokens
    return Request.about(
        content,
        words if model.takes_words else None, video=model.media == "video", id=name,
        model=model.name, min_score=question.min_score,
        sampling=SamplingParams() if tokens is None else SamplingParams(max_tokens=tokens),
    )  # fmt: skip
