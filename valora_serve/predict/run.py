"""Asks an engine about many files, several at a time, and notes every answer as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import ValoraError
from valora_data.faults import FaultError
from valora_data.sources.formats.files import IMAGES, files_below
from valora_data.sources.formats.labelled import ahead, load_image
from valora_data.sources.formats.videos import SUFFIXES, read_frames
from valora_serve.errors import SettingsError
from valora_serve.predict.records import Prediction
from valora_serve.types import Finish, Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.Image import Image

    from valora_serve.types import EngineClient, ServedModel

STILLS = IMAGES - SUFFIXES
AHEAD = 8
"""Decoded files that wait for the engine."""
FRAMES = 8
"""Frames of a video, for domains that were measured with an unknown number."""

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Job:
    """A file and the domains that have not answered it yet.

    Attributes:
        path: The file.
        name: Its path below the folder, with slashes.
        version: Its size in bytes, and its time of change in nanoseconds.
        domains: The domains.
    """

    path: Path
    name: str
    version: Version
    domains: tuple[ServedModel, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """What every request has in common.

    Attributes:
        prompt: Words of the request, for domains that need some; None for the domain's prompt.
        min_score: Least confidence of boxes; None for each domain's threshold.
        max_tokens: Most tokens of written answers; None for what the domain was measured with.
    """

    prompt: str | None = None
    min_score: float | None = None
    max_tokens: int | None = None


def find_files(source: Path, *, images: bool, videos: bool) -> list[Path]:
    """The images and videos in a folder and below it, or the file itself, in the order of paths.

    Raises:
        SettingsError: There are none.
    """
    wanted = (STILLS if images else frozenset()) | (SUFFIXES if videos else frozenset())
    if source.is_file():
        found = [source] if source.suffix.lower() in wanted else []
    else:
        found = files_below(source, wanted)
    if not found:
        what = " or ".join(
            name for name, asked in (("images", images), ("videos", videos)) if asked
        )
        reason = f"holds no {what}" if source.exists() else "does not exist"
        raise SettingsError(f"{source} {reason}: check the path")
    return found


def find_jobs(
    source: Path, domains: Sequence[ServedModel], done: Mapping[tuple[str, str], Version]
) -> tuple[list[Job], int]:
    """What is left to ask.

    Args:
        source: Folder of the files, or one file.
        domains: Domains to ask.
        done: Version of each file that was answered, by (name of the file, domain).

    Returns:
        The jobs, and the number of answers that there are already.
    """
    of_videos = [model for model in domains if model.media == "video"]
    of_images = [model for model in domains if model.media not in ("video", "text")]
    root = source.parent if source.is_file() else source
    jobs, answered = [], 0
    for path in find_files(source, images=bool(of_images), videos=bool(of_videos)):
        name, facts = path.relative_to(root).as_posix(), path.stat()
        version = (facts.st_size, facts.st_mtime_ns)
        asked = of_images if path.suffix.lower() in STILLS else of_videos
        left = tuple(model for model in asked if done.get((name, model.name)) != version)
        answered += len(asked) - len(left)
        if left:
            jobs.append(Job(path, name, version, left))
    return jobs, answered


async def answer_all(
    engine: EngineClient,
    jobs: Sequence[Job],
    question: Question,
    note: Callable[[Prediction], None],
    at_once: int,
) -> None:
    """Answer all jobs; files are decoded ahead in threads, and `at_once` of them are asked about.

    Args:
        engine: Running engine that serves the domains.
        jobs: The jobs.
        question: What every request has in common.
        note: Called with every answer, and with one that has an error for a file or a domain that
            failed.
        at_once: Most files that the engine has at a time.
    """
    waiting: asyncio.Queue[tuple[Job, list[Image] | str] | None] = asyncio.Queue()
    room = threading.Semaphore(AHEAD)
    stopped = threading.Event()
    loop = asyncio.get_running_loop()

    def decode() -> None:
        try:
            with contextlib.closing(_decoded(jobs)) as decoded:
                for item in decoded:
                    room.acquire()
                    if stopped.is_set():
                        return
                    loop.call_soon_threadsafe(waiting.put_nowait, item)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(waiting.put_nowait, None)

    async def work() -> None:
        while (item := await waiting.get()) is not None:
            room.release()
            job, content = item
            for made in await _answers(engine, job, content, question):
                note(made)
        waiting.put_nowait(None)  # for the other workers

    decoding = asyncio.ensure_future(asyncio.to_thread(decode))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, min(at_once, len(jobs)))):
                group.create_task(work())
        await decoding
    finally:
        stopped.set()
        room.release()


def _decoded(jobs: Sequence[Job]) -> Generator[tuple[Job, list[Image] | str], None, None]:
    """Each job with its images or frames, or with the reason why there are none."""
    stills = [job for job in jobs if job.path.suffix.lower() in STILLS]
    for job, image in ahead(stills, lambda job: load_image(job.path)):
        try:
            yield job, [image.result()]
        except FaultError as error:
            yield job, error.text
    for job in jobs:
        if job.path.suffix.lower() not in STILLS:
            frames = max(model.images or FRAMES for model in job.domains)
            try:
                yield job, read_frames(job.path, frames)
            except (FaultError, ValoraError) as error:
                yield job, str(error)


async def _answers(
    engine: EngineClient, job: Job, content: list[Image] | str, question: Question
) -> list[Prediction]:
    """The answers of a job's domains to its file, which are asked together."""
    blank = [
        Prediction(job.name, model.name, model.task or "text", version=job.version)
        for model in job.domains
    ]
    if isinstance(content, str):
        return [replace(one, error=content) for one in blank]
    asked = [
        make_request(f"{job.name}:{model.name}", model, content, question) for model in job.domains
    ]
    made = dict(zip((request.id for request in asked), blank, strict=True))
    texts = dict.fromkeys(made, "")
    async for output in engine.generate(replace(asked[0], also=tuple(asked[1:]))):
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
    """The request of a file: the domain's own prompt, with the given words where it needs some.

    Args:
        name: Id of the request.
        model: The domain.
        content: Its image, or the frames of its video.
        question: What every request has in common.
    """
    video = model.media == "video"
    messages = None
    if needs_words(model):
        text = (model.prompt or "{}").replace("{}", question.prompt or "")
        shown = {"type": "video"} if video else {"type": "image"}
        messages = [{"role": "user", "content": [{"type": "text", "text": text}, shown]}]
    tokens = question.max_tokens or model.max_tokens
    return Request(
        id=name,
        model=model.name,
        messages=messages,
        images=() if video else content,
        videos=[content] if video else (),
        min_score=question.min_score,
        sampling=SamplingParams() if tokens is None else SamplingParams(max_tokens=tokens),
    )


def needs_words(model: ServedModel) -> bool:
    """Whether a domain's prompt lacks words that only a request has, such as a question."""
    return model.prompted or not model.prompt or "{}" in model.prompt
