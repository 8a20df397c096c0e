"""Conversations about images: the files of LLaVA, or with OpenAI's `messages`."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind, ImageReader
from valora_data.schema import Answer, Task
from valora_data.sources.base import ANSWERS, Location, Source
from valora_data.sources.formats import annotated, files
from valora_data.sources.formats.annotated import AnnotatedFormat, Record
from valora_data.sources.formats.rows import as_text, read_count
from valora_data.wording import plural

log = logging.getLogger(__name__)

GRID = 1000
PLACE = re.compile(r"\s*<(image|video)>\s*")
# Boxes as Qwen-VL writes them, and in shares of the image.
ON_GRID = re.compile(r"<box>\s*\((\d+),\s*(\d+)\),\s*\((\d+),\s*(\d+)\)\s*</box>")
IN_SHARES = re.compile(r"\[\s*" + r",\s*".join([r"(\d*\.?\d+)"] * 4) + r"\s*\]")
REFERRED = re.compile(r"<ref>(.*?)</ref>")
MEDIA = ("image", "images", "video", "videos")
ROLES = {"user": "human", "assistant": "gpt"}
"""Speakers of OpenAI's `messages` in the words of LLaVA."""


class LlavaFormat(AnnotatedFormat):
    """One file of conversations, each question of which is asked about the same images."""

    texts = True
    answers = ANSWERS - {"objects"}
    task = Task.VQA

    def recognises(self, location: Location) -> bool:
        """JSON Lines, or JSON whose entries have `conversations`."""
        lines = location.path.suffix == ".jsonl" and location.path.is_file()
        return lines or bool(location.keys & {"conversations", "messages"})

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        entries = files.load_rows(part, "conversations")
        shown = [entry for entry in entries if not isinstance(entry, dict) or _media_of(entry)]
        if source.task.spec.answer != "boxes" and not any(isinstance(one, dict) for one in shown):
            shown = entries
        if not any(isinstance(entry, dict) for entry in shown):
            raise DataError(f"{part.name}: no conversation has an image: the data set is empty")
        if len(shown) < len(entries):
            log.info("%s: %d conversations have no image", part.name, len(entries) - len(shown))
        reading.total += len(shown)
        finder = files.Finder(source.image_folder)
        for position, entry in enumerate(shown):
            key = str(entry.get("id", position) if isinstance(entry, dict) else position)
            item, where = f"conversation {key}", f"{part.name}, conversation {key}"
            with reading.tolerate(item, where):
                pairs = _pairs(files.as_object(entry))
                media = tuple(finder.find(path) for path in _media_of(entry))
                markers = sum(len(PLACE.findall(question)) for question, _ in pairs)
                if markers not in (0, len(media)):
                    text = f"has {plural(len(media), 'image')} and {markers} <image>"
                    raise ValueError(f"{text}, which must be equally many")
                video = not (entry.get("image") or entry.get("images"))
                for number, (question, text) in enumerate(pairs):
                    name = key if len(pairs) == 1 else f"{key}#{number}"
                    record = Record(media, name, item=item, video=video)
                    record.prompt = PLACE.sub(" ", question).strip() or None
                    if not media and record.prompt is None:
                        raise ValueError("has neither an image nor a question")
                    asked = f"{where}, question {number}"
                    with reading.tolerate(item, asked):
                        _answer(record, text.strip(), source.task, asked)
                        yield record


def _media_of(entry: dict[str, Any]) -> list[str]:
    value: Any = next((entry[key] for key in MEDIA if entry.get(key)), [])
    given = value if isinstance(value, list) else [value]
    return [str(one.get("path") if isinstance(one, dict) else one) for one in given]


def _pairs(entry: dict[str, Any]) -> list[tuple[str, str]]:
    if "objects" in entry:
        raise ValueError("has objects beside its messages, which are not read")
    said = []
    for turn in entry.get("conversations") or entry.get("messages") or ():
        who, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content", ""))
        if isinstance(text, list):
            text = " ".join(str(part.get("text") or "") for part in text)
        said.append((ROLES.get(who, str(who)), "" if text is None else as_text(text)))
    said = said[1:] if said and said[0][0] == "system" else said
    people = [who for who, _ in said]
    if not said or people != ["human", "gpt"] * (len(said) // 2):
        by = ", ".join(people) or "nobody"
        raise ValueError(f"is by {by}, expected human and gpt in turn")
    texts = [text for _, text in said]
    return list(zip(texts[0::2], texts[1::2], strict=True))


def _answer(record: Record, text: str, task: Task, where: str) -> None:
    """Fill in the answer of a record, or the objects that it names."""
    if not text:
        raise FaultError(FaultKind.ROW_INCOMPLETE, "the answer is empty")
    match task.spec.answer:
        case "boxes":
            phrase = REFERRED.search(text)
            record.prompt = (phrase[1].strip() if phrase else "") or record.prompt
            found = [[float(edge) / GRID for edge in edges] for edges in ON_GRID.findall(text)]
            found = found or [list(map(float, edges)) for edges in IN_SHARES.findall(text)]
            if not found:
                message = f"{text!r} holds no box, expected <box>(x0,y0),(x1,y1)</box> on a grid of"
                message += " 0 to 1000, or [x0, y0, x1, y1] in shares of the image"
                raise FaultError(FaultKind.BOX_MALFORMED, message)
            label = record.prompt or ""
            record.entries = [(where, (label, annotated.shares(*box))) for box in found]
        case "captions":
            record.answer = Answer(captions=(text,))
        case "count":
            record.answer = Answer(count=read_count(text))
        case _:
            record.answer = Answer.chosen(task, text)
