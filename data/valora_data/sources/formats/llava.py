"""Conversations about images in LLaVA's JSON format.

A list (or one object per line) of `image` (a path or several) or `video`, and `conversations`:
turns of `from` (human, gpt) and `value`, in which `<image>` stands for an image. Boxes in `<box>`
are on Qwen-VL's grid; those in brackets are in shares of the image. Entries with `messages` (`role`
and `content`) and `images` or `videos` are read alike.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Box, Sample, Task
from valora_data.sources.base import Location, Source, SourceFormat, Splits
from valora_data.sources.formats import videos
from valora_data.sources.formats.labelled import (
    ImageReader,
    Reading,
    checked_box,
    stray_label,
)
from valora_data.sources.formats.qwen import GRID
from valora_data.sources.formats.records import read_count
from valora_data.sources.formats.tables import load_json, read_lines, sound_entries
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from PIL import Image

log = logging.getLogger(__name__)

PLACE = re.compile(r"\s*<(image|video)>\s*")
ON_GRID = re.compile(r"<box>\s*\((\d+),\s*(\d+)\),\s*\((\d+),\s*(\d+)\)\s*</box>")
IN_SHARES = re.compile(r"\[\s*([\d.]+),\s*([\d.]+),\s*([\d.]+),\s*([\d.]+)\s*\]")
REFERRED = re.compile(r"<ref>(.*?)</ref>")
ROLES = {"user": "human", "assistant": "gpt"}
"""Speakers of OpenAI's `messages` in the words of LLaVA."""


class LlavaFormat(SourceFormat):
    """One file of conversations."""

    files = "LLaVA JSON"

    def supports(self, task: Task) -> bool:
        """All tasks but object detection: conversations do not list objects."""
        return not task.spec.detects

    def recognises(self, location: Location) -> bool:
        """JSON Lines, or JSON whose entries have `conversations`."""
        lines = location.path.suffix == ".jsonl" and location.path.is_file()
        return lines or bool(location.keys & {"conversations", "messages"})

    def guess_task(self, path: str) -> Task:
        """Visual question answering."""
        return Task.VQA

    def open(self, source: Source) -> Splits:
        """All conversations as one piece."""
        return {
            None: partial(
                read_llava,
                source.file,
                source.image_folder,
                source.task,
                source.labels or None,
                frames=source.frames,
                reader=source.reader,
            )
        }

    def reads(self, source: Source) -> Iterator[Path]:
        """The file, and the images and videos that it names."""
        file = source.file
        yield file
        for entry in _content(file):
            if isinstance(entry, dict):
                yield from (source.image_folder / path for path in _media(entry))


def read_llava(
    json_path: Path,
    image_folder: Path,
    task: Task,
    labels: Sequence[str] | None = None,
    *,
    frames: int = videos.FRAMES,
    reader: ImageReader | None = None,
) -> Iterator[Sample]:
    """Read conversations: each question with its answer becomes a sample.

    Args:
        json_path: The `.json` or `.jsonl` file.
        image_folder: What paths of images and videos are relative to.
        task: Task of the samples; every task but detection.
        labels: Answers that the domain chooses from, if it does; None for any.
        frames: Frames to take of a video.
        reader: Opens the files; by default a reader that tolerates few broken files.

    Yields:
        Samples in the file's order, with the question as prompt; the id is the entry's, or its
        number, followed by `#` and the number of the question where there are several. Entries
        without an image are left out.

    Raises:
        DataError: If the file is missing, corrupt or without images, a conversation is not made of
            questions and answers, its placeholders and images differ in number, or an answer cannot
            be read.
    """
    if task.spec.detects:
        raise DataError(
            f"{json_path.name}: conversations do not list objects: use COCO or Ultralytics files "
            "for detection"
        )
    source = json_path.name
    content = _content(json_path)
    shown = [entry for entry in content if not isinstance(entry, dict) or _media(entry)]
    if not any(isinstance(entry, dict) for entry in shown):
        raise DataError(f"{source}: no conversation has an image: the data set is empty")
    if len(shown) < len(content):
        log.info("%s: %d conversations have no image", source, len(content) - len(shown))
    with Reading(reader, source, len(shown)) as reading:
        entries = sound_entries(reading, source, "conversations", shown, ("conversations",))
        said = []
        for position, entry in enumerate(entries):
            key = str(entry.get("id", position))
            where = f"{source}, conversation {key}"
            with reading.tolerate(f"conversation {key}"):
                turns = _turns(entry["conversations"], where)
                said.append((key, where, turns, _paths(entry, turns, where), "video" in entry))
        ahead = reading.open_all(
            image_folder / path for _, _, _, paths, moving in said if not moving for path in paths
        )
        for key, where, turns, paths, moving in said:
            images = _open(reading, ahead, image_folder, paths, moving, frames)
            if not images:
                continue
            for number, (question, text) in enumerate(turns):
                with reading.tolerate(f"conversation {key}"):
                    at = f"{where}, question {number}"
                    answer = _answer(text, task, labels, images[0].size, at)
                    prompt: str | None = PLACE.sub(" ", question).strip()
                    if answer.boxes:
                        prompt = answer.boxes[0].label or prompt
                    if not task.spec.prompted:
                        prompt = prompt or None
                    name = key if len(turns) == 1 else f"{key}#{number}"
                    rest = tuple(images[1:])
                    yield Sample(name, images[0], _named(answer, prompt), prompt, rest)


def _content(json_path: Path) -> list[Any]:
    """The entries; rows of JSON Lines that are no JSON are None."""
    content: Any
    if json_path.suffix == ".jsonl":
        content = [entry for _, entry in read_lines(json_path)]
    else:
        content = load_json(json_path)
    if not isinstance(content, list):
        raise DataError(f"{json_path.name} is no list: expected LLaVA conversations")
    return [_conversation(entry) for entry in content]


def _conversation(entry: Any) -> Any:
    """An entry with `messages` in LLaVA's form; any other as it is."""
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or "conversations" in entry:
        return entry
    turns = [
        {"from": ROLES.get(str(one.get("role")), one.get("role")), "value": one.get("content")}
        for one in messages
        if isinstance(one, dict)
    ]
    media = {name[:-1]: entry[name] for name in ("images", "videos") if entry.get(name)}
    return {**entry, **media, "conversations": turns}


def _media(entry: dict[str, Any]) -> list[str]:
    """Paths of an entry's images, or of its video."""
    value = entry.get("image") or entry.get("video") or []
    places = value if isinstance(value, list) else [value]
    return [str(one.get("path") if isinstance(one, dict) else one) for one in places]


def _turns(turns: Any, where: str) -> list[tuple[str, str]]:
    """Pairs of question and answer."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise FaultError(FaultKind.ROW_MALFORMED, f"{where} is no list of turns")
    said = [(turn.get("from"), str(turn.get("value", ""))) for turn in turns]
    if said and said[0][0] == "system":
        said = said[1:]
    people = [who for who, _ in said]
    if not said or len(said) % 2 or people != ["human", "gpt"] * (len(said) // 2):
        raise FaultError(
            FaultKind.ROW_MALFORMED,
            f"{where} is told by {', '.join(map(str, people)) or 'nobody'}, expected human and gpt "
            "in turn",
        )
    texts = [text for _, text in said]
    return list(zip(texts[0::2], texts[1::2], strict=True))


def _paths(entry: dict[str, Any], turns: list[tuple[str, str]], where: str) -> list[str]:
    paths = _media(entry)
    places = sum(len(PLACE.findall(question)) for question, _ in turns)
    if places not in (0, len(paths)):
        raise FaultError(
            FaultKind.ROW_MALFORMED,
            f"{where} has {plural(len(paths), 'image')} and {places} <image>, which must be "
            "equally many",
        )
    return paths


def _open(
    reader: ImageReader,
    ahead: Iterator[Image.Image | None],
    folder: Path,
    paths: list[str],
    moving: bool,
    frames: int,
) -> list[Image.Image]:
    """All images of an entry; none if one of them cannot be decoded."""
    if not moving:
        opened = [next(ahead) for _ in paths]
        return [] if None in opened else [image for image in opened if image is not None]
    images: list[Image.Image] = []
    for path in paths:
        found = len(images)
        with reader.tolerate(path):
            images += videos.read_frames(folder / path, frames)
        if len(images) == found:
            return []
    return images


def _answer(
    text: str, task: Task, labels: Sequence[str] | None, size: tuple[int, int], where: str
) -> Answer:
    text = text.strip()
    if not text:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where}: the answer is empty")
    if task.spec.answer == "boxes":
        return Answer(_boxes(text, size, where))
    if task.spec.answer == "captions":
        return Answer(captions=(text,))
    if task.spec.answer == "count":
        return Answer(count=read_count(text, labels, where))
    if labels and text not in labels:
        raise stray_label(where, text, labels)
    return Answer.chosen(task, text)


def _boxes(text: str, size: tuple[int, int], where: str) -> tuple[Box, ...]:
    phrase = REFERRED.search(text)
    label = phrase[1].strip() if phrase else ""
    found = [tuple(int(edge) / GRID for edge in edges) for edges in ON_GRID.findall(text)]
    found = found or [tuple(map(float, edges)) for edges in IN_SHARES.findall(text)]
    if not found:
        raise FaultError(
            FaultKind.BOX_MALFORMED,
            f"{where}: {text!r} holds no box, expected <box>(x0,y0),(x1,y1)</box> on a grid of "
            "0 to 1000, or [x0, y0, x1, y1] in shares of the image",
        )
    width, height = size
    return tuple(
        checked_box((x0 * width, y0 * height, x1 * width, y1 * height), label, size, where)
        for x0, y0, x1, y1 in found
    )


def _named(answer: Answer, prompt: str | None) -> Answer:
    """Boxes that bear the phrase they were asked for."""
    boxes = tuple(Box(*box.xyxy, box.label or prompt or "") for box in answer.boxes)
    return Answer(boxes, answer.label, answer.soft, answer.answers, answer.captions, answer.count)
