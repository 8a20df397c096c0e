"""Conversations about images in LLaVA's JSON format.

A list (or one object per line) of `image` (a path or several) or `video`, and `conversations`:
turns of `from` (human, gpt) and `value`, in which `<image>` stands for an image. Boxes in `<box>`
are on Qwen-VL's grid; those in brackets are in shares of the image. Entries with `messages` (`role`
and `content`) and `images` or `videos` are read alike.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Task
from valora_data.sources.base import ANSWERS, Location, Source
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, Shape, shares
from valora_data.sources.formats.files import Finder
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.records import read_count
from valora_data.sources.formats.tables import load_rows
from valora_data.wording import plural

log = logging.getLogger(__name__)

GRID = 1000
PLACE = re.compile(r"\s*<(image|video)>\s*")
ON_GRID = re.compile(r"<box>\s*\((\d+),\s*(\d+)\),\s*\((\d+),\s*(\d+)\)\s*</box>")
IN_SHARES = re.compile(r"\[\s*" + r",\s*".join([r"(\d*\.?\d+)"] * 4) + r"\s*\]")
REFERRED = re.compile(r"<ref>(.*?)</ref>")
ROLES = {"user": "human", "assistant": "gpt"}
"""Speakers of OpenAI's `messages` in the words of LLaVA."""


class LlavaFormat(AnnotatedFormat):
    """One file of conversations, each question of which is asked about the same images."""

    files = "LLaVA JSON"
    answers = ANSWERS - {"objects"}
    task = Task.VQA

    def recognises(self, location: Location) -> bool:
        """JSON Lines, or JSON whose entries have `conversations`."""
        lines = location.path.suffix == ".jsonl" and location.path.is_file()
        return lines or bool(location.keys & {"conversations", "messages"})

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        """A record for each question with its answer, in the file's order.

        The id is the entry's, or its number, followed by `#` and the number of the question where
        there are several. Entries without an image are left out.
        """
        entries = load_rows(part, "conversations")
        shown = [entry for entry in entries if not isinstance(entry, dict) or media_of(entry)]
        if not any(isinstance(entry, dict) for entry in shown):
            raise DataError(f"{part.name}: no conversation has an image: the data set is empty")
        if len(shown) < len(entries):
            log.info("%s: %d conversations have no image", part.name, len(entries) - len(shown))
        reading.total += len(shown)
        finder = Finder(source.image_folder)
        for position, entry in enumerate(shown):
            key = str(entry.get("id", position) if isinstance(entry, dict) else position)
            item, where = f"conversation {key}", f"{part.name}, conversation {key}"
            with reading.tolerate(item):
                if not isinstance(entry, dict):
                    raise FaultError(FaultKind.ROW_MALFORMED, f"{where} is no valid JSON object")
                pairs = _pairs(turns_of(entry), where)
                media = tuple(finder.find(path) for path in media_of(entry))
                places = sum(len(PLACE.findall(question)) for question, _ in pairs)
                if places not in (0, len(media)):
                    text = (
                        f"{where} has {plural(len(media), 'image')} and {places} <image>, which "
                        "must be equally many"
                    )
                    raise FaultError(FaultKind.ROW_MALFORMED, text)
                video = not (entry.get("image") or entry.get("images"))
                for number, (question, text) in enumerate(pairs):
                    name = key if len(pairs) == 1 else f"{key}#{number}"
                    record = Record(media, name, item=item, video=video)
                    record.prompt = PLACE.sub(" ", question).strip() or None
                    with reading.tolerate(item):
                        _answer(record, text.strip(), source.task, f"{where}, question {number}")
                        yield record


def media_of(entry: dict[str, Any]) -> list[str]:
    """Paths of an entry's images, or of its videos."""
    keys = ("image", "images", "video", "videos")
    value: Any = next((entry[key] for key in keys if entry.get(key)), [])
    places = value if isinstance(value, list) else [value]
    return [str(one.get("path") if isinstance(one, dict) else one) for one in places]


def turns_of(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """Speakers and texts of a conversation, in either form."""
    turns = entry.get("conversations") or entry.get("messages") or []
    found = []
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict):
            who = str(turn.get("from", turn.get("role")))
            text = turn.get("value", turn.get("content", ""))
            if isinstance(text, list):
                parts = (part.get("text", "") for part in text if isinstance(part, dict))
                text = " ".join(map(str, parts))
            found.append((ROLES.get(who, who), str(text)))
    return found


def _pairs(said: list[tuple[str, str]], where: str) -> list[tuple[str, str]]:
    """Pairs of question and answer."""
    said = said[1:] if said and said[0][0] == "system" else said
    people = [who for who, _ in said]
    if not said or people != ["human", "gpt"] * (len(said) // 2):
        text = f"{where} is told by {', '.join(people) or 'nobody'}, expected human and gpt in turn"
        raise FaultError(FaultKind.ROW_MALFORMED, text)
    texts = [text for _, text in said]
    return list(zip(texts[0::2], texts[1::2], strict=True))


def _answer(record: Record, text: str, task: Task, where: str) -> None:
    """Fill in the answer of a record, or the objects that it names."""
    if not text:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where}: the answer is empty")
    match task.spec.answer:
        case "boxes":
            phrase = REFERRED.search(text)
            record.prompt = (phrase[1].strip() if phrase else "") or record.prompt
            record.shapes = _shapes(text, record.prompt or "", where)
        case "captions":
            record.answer = Answer(captions=(text,))
        case "count":
            record.answer = Answer(count=read_count(text, where))
        case _:
            record.answer = Answer.chosen(task, text)


def _shapes(text: str, label: str, where: str) -> list[Shape]:
    found = [[int(edge) / GRID for edge in edges] for edges in ON_GRID.findall(text)]
    found = found or [[float(edge) for edge in edges] for edges in IN_SHARES.findall(text)]
    if not found:
        text = (
            f"{where}: {text!r} holds no box, expected <box>(x0,y0),(x1,y1)</box> on a grid of "
            "0 to 1000, or [x0, y0, x1, y1] in shares of the image"
        )
        raise FaultError(FaultKind.BOX_MALFORMED, text)
    return [Shape(label, shares(*edges), where) for edges in found]
