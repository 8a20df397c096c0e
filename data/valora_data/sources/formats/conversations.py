"""Conversations about images: the files of LLaVA, ms-swift and Qwen-VL.

Entries have `image` or `images` or `video`, and `conversations`: turns of `from` (human, gpt) and
`value`; or `messages` of `role` (user, assistant) and `content`. `<image>` stands for an image.
"""

from __future__ import annotations

import json
import logging
import re
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Task
from valora_data.sources.base import ANSWERS, Location, Source
from valora_data.sources.formats import annotated, files
from valora_data.sources.formats.annotated import AnnotatedFormat, Edges, Record, Scaled, Shape
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.rows import read_count
from valora_data.wording import plural

log = logging.getLogger(__name__)

GRID = 1000
PLACE = re.compile(r"\s*<(image|video)>\s*")
ON_GRID = re.compile(r"<box>\s*\((\d+),\s*(\d+)\),\s*\((\d+),\s*(\d+)\)\s*</box>")
IN_SHARES = re.compile(r"\[\s*" + r",\s*".join([r"(\d*\.?\d+)"] * 4) + r"\s*\]")
REFERRED = re.compile(r"<ref>(.*?)</ref>")
Objects = list[tuple[str, Edges | Scaled]]
"""Names and edges."""
BOX = "bbox_2d"
FENCE = re.compile(r"^\s*```(?:json)?\s*(.*?)\s*```\s*$", re.DOTALL)
ROLES = {"user": "human", "assistant": "gpt"}
"""Speakers of OpenAI's `messages` in the words of LLaVA."""


class LlavaFormat(AnnotatedFormat):
    """One file of conversations, each question of which is asked about the same images.

    Boxes in `<box>` are on Qwen-VL's grid; those in brackets are in shares of the image.
    """

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
        entries = files.load_rows(part, "conversations")
        shown = [entry for entry in entries if not isinstance(entry, dict) or media_of(entry)]
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
                pairs = _pairs(turns_of(files.as_object(entry)))
                media = tuple(finder.find(path) for path in media_of(entry))
                places = sum(len(PLACE.findall(question)) for question, _ in pairs)
                if places not in (0, len(media)):
                    raise ValueError(
                        f"has {plural(len(media), 'image')} and {places} <image>, which must be "
                        "equally many"
                    )
                video = not (entry.get("image") or entry.get("images"))
                for number, (question, text) in enumerate(pairs):
                    name = key if len(pairs) == 1 else f"{key}#{number}"
                    record = Record(media, name, item=item, video=video)
                    record.prompt = PLACE.sub(" ", question).strip() or None
                    place = f"{where}, question {number}"
                    with reading.tolerate(item, place):
                        _answer(record, text.strip(), source.task, place)
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


def _pairs(said: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of question and answer."""
    said = said[1:] if said and said[0][0] == "system" else said
    people = [who for who, _ in said]
    if not said or people != ["human", "gpt"] * (len(said) // 2):
        told = ", ".join(people) or "nobody"
        raise ValueError(f"is told by {told}, expected human and gpt in turn")
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
                message = (
                    f"{text!r} holds no box, expected <box>(x0,y0),(x1,y1)</box> on a grid of 0 to "
                    "1000, or [x0, y0, x1, y1] in shares of the image"
                )
                raise FaultError(FaultKind.BOX_MALFORMED, message)
            record.shapes = [
                Shape(record.prompt or "", annotated.shares(*box), where) for box in found
            ]
        case "captions":
            record.answer = Answer(captions=(text,))
        case "count":
            record.answer = Answer(count=read_count(text))
        case _:
            record.answer = Answer.chosen(task, text)


class ObjectsFormat(AnnotatedFormat):
    """Grounding files: entries of an image with named objects."""

    answers = frozenset({"objects", "phrase"})
    task = Task.GROUNDING

    @abstractmethod
    def shapes(self, entry: dict[str, Any]) -> Objects:
        """The objects of an entry; what it raises of wrong values is a fault."""

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        """A record for each image, with the objects of all its entries.

        Referring expressions have one for each name of an image's objects, which is its prompt.
        """
        entries = files.load_rows(part, "entries")
        reading.total += len(entries)
        finder = files.Finder(source.image_folder)
        for image, shapes in self.objects(entries, part.name, reading).items():
            media = (finder.find(image),)
            if source.task.spec.detects:
                yield Record(media, image, shapes)
                continue
            names = list(dict.fromkeys(shape.label for shape in shapes))
            for number, name in enumerate(names):
                mine = [shape for shape in shapes if shape.label == name]
                key = image if len(names) == 1 else f"{image}#{number}"
                yield Record(media, key, mine, prompt=name)

    def objects(
        self, entries: list[Any], name: str, reading: ImageReader
    ) -> dict[str, list[Shape]]:
        """Objects of all images, by the images' paths."""
        found: defaultdict[str, list[Shape]] = defaultdict(list)
        for number, entry in enumerate(entries, start=1):
            where = f"{name}, entry {number}"
            with reading.tolerate(where, where):
                shapes, media = self.shapes(files.as_object(entry)), media_of(entry)
                if len(media) != 1:
                    raise ValueError(f"has {len(media)} images, expected one")
                found[media[0]] += [Shape(label, edges, where) for label, edges in shapes]
        return found


class SwiftFormat(ObjectsFormat):
    """ms-swift: `objects` of `ref`, the names, and `bbox`, the boxes (x0, y0, x1, y1).

    They stand for `<ref-object>` and `<bbox>` in the messages; boxes are in pixels, or in shares of
    the image where `bbox_type` is `norm1`.
    """

    files = "ms-swift JSONL"

    def recognises(self, location: Location) -> bool:
        """Entries with `messages` and `objects`."""
        return {"messages", "objects"} <= location.entry.keys()

    def shapes(self, entry: dict[str, Any]) -> Objects:
        """Its `objects`."""
        objects = files.as_object(entry["objects"])
        names, boxes = objects.get("ref") or [], objects.get("bbox") or []
        unit = objects.get("bbox_type") or "real"
        if len(names) not in (1, len(boxes)):  # one name is that of all boxes
            raise ValueError(f"has {len(names)} names in objects.ref for {len(boxes)} boxes")
        if unit not in ("real", "norm1"):
            raise ValueError(f"bbox_type is {unit!r}, expected real or norm1")
        names = list(names) * len(boxes) if len(names) == 1 else names
        edges = [annotated.four_numbers(box) for box in boxes]
        return [
            (str(name), box if unit == "real" else annotated.shares(*box))
            for name, box in zip(names, edges, strict=True)
        ]


class PixelQwenFormat(ObjectsFormat):
    """Qwen2.5-VL: answers are JSON with `bbox_2d`, in pixels of the image, and `label`.

    Files do not say whether they are of Qwen2.5-VL or of Qwen3-VL: each has a kind of its own.
    """

    files = "Qwen2.5-VL JSON"
    grid = False

    def recognises(self, location: Location) -> bool:
        """Answers with `bbox_2d`, one of them beyond the grid of Qwen3-VL."""
        return _largest(location) > GRID

    def shapes(self, entry: dict[str, Any]) -> Objects:
        """The objects of its answers; what was asked names those without a label."""
        found: Objects = []
        asked = ""
        for who, text in turns_of(entry):
            if who == "gpt":
                for one in _listed(text):
                    name = str(one.get("label") or one.get("ref") or asked)
                    box = annotated.four_numbers(one[BOX], BOX)
                    on_grid = annotated.shares(*(edge / GRID for edge in box))
                    found.append((name, on_grid if self.grid else box))
            else:
                asked = PLACE.sub(" ", text).strip()
        if not found:
            raise KeyError(f"answer with {BOX}")
        return found


class GridQwenFormat(PixelQwenFormat):
    """Qwen3-VL: boxes on a grid from 0 to 1000."""

    files = "Qwen3-VL JSON"
    grid = True

    def recognises(self, location: Location) -> bool:
        """Answers with `bbox_2d` within the grid."""
        return 0 < _largest(location) <= GRID


def _largest(location: Location) -> float:
    """The largest coordinate of a file; 0 if its first entry has none."""
    if not any(BOX in text for who, text in turns_of(location.entry) if who == "gpt"):
        return 0.0
    entries = files.load_rows(location.file, "entries")
    found = PixelQwenFormat().objects(entries, "", ImageReader.forgiving())
    edges = (shape.edges for shapes in found.values() for shape in shapes)
    return max((max(one) for one in edges if not callable(one)), default=0.0)


def _listed(text: str) -> list[dict[str, Any]]:
    """The objects of an answer: JSON, in a fence of Markdown or not."""
    if BOX not in text:
        return []
    fenced = FENCE.match(text)
    try:
        content = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer {text[:60]!r} is no valid JSON") from error
    items = content if isinstance(content, list) else [content]
    return [item for item in items if isinstance(item, dict) and BOX in item]
