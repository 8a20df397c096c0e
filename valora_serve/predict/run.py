"""Predictions of a run: files are asked for several at a time, and every answer is kept at once."""

import asyncio
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import PIL.Image
from PIL.Image import Image
from pydantic import TypeAdapter

from valora_data.cpu import ahead
from valora_data.errors import ValoraError
from valora_data.faults import FaultError, load_image
from valora_data.sources.formats.files import IMAGES, files_below, readable
from valora_data.sources.formats.videos import SUFFIXES, read_frames
from valora_serve.errors import SettingsError
from valora_serve.server.api.domain_prompt import filled
from valora_serve.server.gather import gathered
from valora_serve.server.samples import NOTE
from valora_serve.types import EngineClient, Finish, Request, SamplingParams, ServedModel

PREDICTIONS = "predictions.jsonl"
RUN = "run.json"  # what the predictions depend on, and the models that could be asked
STILLS = IMAGES - SUFFIXES
OWN = ("downloads", "yolo")  # folders of the output that hold pictures, which nobody asks about
FRAMES = 8  # frames of a video, for domains that were measured with an unknown number


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer of one domain to one file."""

    file: str  # path of the image or video below the folder that was read
    domain: str
    task: str
    width: int = 0  # of the image in pixels, as a viewer shows it
    height: int = 0
    # Fields of `/v1/vision`'s results: `detections` (each with `label`, `confidence` and `box`
    # (x0, y0, x1, y1) in pixels), or `label`, `confidence` and `confidences`, or `text`.
    answer: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # why there is no answer
    version: tuple[int, int] = (0, 0)  # bytes of the file, and time of change in nanoseconds

    @property
    def detections(self) -> list[dict[str, Any]]:
        """Boxes, by falling confidence; none for tasks without boxes."""
        return list(self.answer.get("detections") or ())


@dataclass(frozen=True, slots=True)
class Results:
    """A finished run, as the writers of formats read it."""

    out: Path
    source: Path  # folder of the images and videos, absolute
    model: str  # name and version of the bundles, e.g. ``detection@1``
    domains: dict[str, ServedModel]  # that were asked, by name

    def predictions(self) -> Iterator[Prediction]:
        """All answers, sorted by file and domain; failures are left out."""
        order = {name: number for number, name in enumerate(self.domains)}
        found = read_predictions(self.out / PREDICTIONS)
        kept = [made for made in found if made.error is None and made.domain in order]
        yield from sorted(kept, key=lambda made: (made.file, order[made.domain]))


def read_predictions(path: Path) -> list[Prediction]:
    """Return the newest prediction of each file and domain; a last line cut off is removed."""
    content = path.read_bytes() if path.is_file() else b""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("rb+") as file:
            file.truncate(end)
    found: dict[tuple[str, str], Prediction] = {}
    for number, line in enumerate(content[:end].splitlines(), start=1):
        try:
            fields = json.loads(line)
            made = Prediction(**fields | {"version": tuple(fields["version"])})
        except (ValueError, TypeError, KeyError) as error:
            raise SettingsError(f"line {number} of {path} is damaged: remove that line") from error
        found[made.file, made.domain] = made
    return list(found.values())


def take_sample(folder: Path, out: Path) -> list[ServedModel]:
    """Take over what a server kept in a `sample_folder`; of each domain, its newest bundle's."""
    found = []
    root, files = files_in(folder, {".png"}, out)
    for path in sorted(files, key=lambda path: path.name):
        file, facts = path.relative_to(root).as_posix(), path.stat()
        try:
            with PIL.Image.open(path) as image:
                row, size = json.loads(image.info[NOTE]), image.size
            model = ServedModel(kind="domain", root="", **row["domain"])
            version = facts.st_size, facts.st_mtime_ns
            made = Prediction(
                file, model.name, model.task or "", *size, row["answer"], None, version
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"{path} holds no answer of a server: name the bundle to ask with --bundle"
            raise SettingsError(text) from error
        found.append((model, made))
    if not found:
        raise SettingsError(f"{folder} holds no sample of a server: name a bundle with --bundle")
    newest = {model.name: model for model, _ in found}
    kept = [asdict(made) for model, made in found if model == newest[model.name]]
    written(out / PREDICTIONS, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in kept))
    return list(newest.values())


def written(path: Path, text: str) -> Path:
    """Write a file in one rename, so that it is never half there; returns it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def note_run(out: Path, facts: dict[str, Any], models: Iterable[ServedModel] = ()) -> None:
    """Keep the JSON values that predictions depend on, and what can be asked."""
    content = facts | {"models": [asdict(model) for model in models]}
    written(out / RUN, json.dumps(content, indent=1) + "\n")


def check_run(out: Path, facts: dict[str, Any]) -> list[ServedModel]:
    """Return what an earlier run could ask; refuse to mix its predictions with others."""
    file, made = out / RUN, out / PREDICTIONS
    if not made.is_file() or not made.stat().st_size:
        note_run(out, facts)
        return []
    try:
        before = {**json.loads(file.read_text(encoding="utf-8"))}
        models = TypeAdapter(list[ServedModel]).validate_python(before.pop("models", []))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SettingsError(f"{out} is without a sound {RUN}: name another folder") from error
    other = sorted(name for name in facts | before if facts.get(name) != before.get(name))
    if other:
        raise SettingsError(f"{out} holds predictions of another run, with other "
                            f"{', '.join(other)}: name another folder with --out")  # fmt: skip
    return models


@dataclass(frozen=True, slots=True)
class Job:
    """A file that is to be answered, by domains that were measured with as many frames of it."""

    path: Path
    name: str  # below the folder
    version: tuple[int, int]  # size and time
    domains: tuple[ServedModel, ...]  # which have not answered it yet
    frames: int  # 0 of an image


def find_jobs(source: Path, domains: Sequence[ServedModel], out: Path) -> tuple[list[Job], int]:
    """Return what is left to ask, and how many answers earlier runs have left in `out`."""
    before = read_predictions(out / PREDICTIONS)
    done = {(one.file, one.domain): one.version for one in before if one.error is None}
    videos = tuple(model for model in domains if model.media == "video")
    images = tuple(model for model in domains if model.media != "video")
    kinds = [("images", STILLS)] * bool(images) + [("videos", SUFFIXES)] * bool(videos)
    wanted = frozenset().union(*(suffixes for _, suffixes in kinds))
    root, files = files_in(source, wanted, out)
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
        groups: dict[int, list[ServedModel]] = {}
        for model in left:
            groups.setdefault(model.images or FRAMES if video else 0, []).append(model)
        jobs += [Job(path, name, version, tuple(some), n) for n, some in groups.items()]
    return jobs, answered


def files_in(source: Path, suffixes: Set[str], out: Path) -> tuple[Path, list[Path]]:
    """A folder and its files, or the folder of a file and that file; none that `out` was given."""
    if not source.is_dir():
        return source.parent, [source] * (source.suffix.lower() in suffixes)
    own = [(out / name).resolve() for name in OWN]
    found = files_below(source, frozenset(suffixes))
    return source, [p for p in found if not any(map(p.parent.resolve().is_relative_to, own))]


async def answer_all(
    engine: EngineClient,
    jobs: Sequence[Job],
    options: Namespace,
    note: Callable[[Prediction], None],
) -> None:
    """Answer all jobs as the command's `options` say; files to come are decoded ahead."""
    decoded = ahead(jobs, _content, weight=lambda job: job.frames or 1)
    turn = asyncio.Lock()

    async def work() -> None:
        while True:
            async with turn:
                if (item := next(decoded, None)) is None:
                    return
                content = await asyncio.wrap_future(item[1])
            for made in await _answers(engine, item[0], content, options):
                note(made)

    count = min(options.at_once, len(jobs))
    await gathered(*(work() for _ in range(count)), at_once=count)


def _content(job: Job) -> list[Image] | str:
    """The image or the frames of a job, or why there are none."""
    try:
        return read_frames(job.path, job.frames) if job.frames else [load_image(job.path)]
    except ValoraError as error:
        return error.text if isinstance(error, FaultError) else str(error)


async def _answers(
    engine: EngineClient, job: Job, content: list[Image] | str, options: Namespace
) -> list[Prediction]:
    made = {
        f"{job.name}:{m.name}": Prediction(job.name, m.name, m.task or "text", version=job.version)
        for m in job.domains
    }
    if isinstance(content, str):
        return [replace(one, error=content) for one in made.values()]
    first, *also = (
        make_request(name, model, content, options)
        for name, model in zip(made, job.domains, strict=True)
    )
    async for output in engine.generate(replace(first, also=tuple(also))):
        fields: dict[str, Any] = {"width": content[0].width, "height": content[0].height}
        if output.finish in (Finish.ERROR, Finish.CANCELLED):
            fields["error"] = str(output.error or "the request was cancelled")
        else:
            answer = output.head.image_fields(0) if output.head is not None else None
            fields["answer"] = answer or {"text": output.text.strip()}
        made[output.id] = replace(made[output.id], **fields)
    return list(made.values())


def make_request(
    name: str, model: ServedModel, content: Sequence[Image], options: Namespace
) -> Request:
    """Return a request with a file's image or frames, and the given words where some are needed."""
    words = filled(model.prompt or "", options.prompt) if model.takes_words else None
    tokens = options.max_tokens or model.max_tokens
    return Request.about(
        content, words, video=model.media == "video", id=name,
        model=model.name, min_score=options.min_score, stream=False,
        sampling=SamplingParams() if tokens is None else SamplingParams(max_tokens=tokens),
    )  # fmt: skip
