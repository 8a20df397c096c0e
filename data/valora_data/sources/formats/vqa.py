"""Questions about images in the JSON format of VQA v2: a file of questions, one of annotations."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Split, Task
from valora_data.sources.base import Location, Source
from valora_data.sources.formats.annotated import AnnotatedFormat, Record
from valora_data.sources.formats.files import Finder, is_file
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.tables import load_tables, sound_entries

log = logging.getLogger(__name__)


class VqaFormat(AnnotatedFormat):
    """A file of questions; `Source.annotations` is the file of answers."""

    files = "VQA JSON"
    answers = frozenset({"answers"})
    task = Task.VQA

    def recognises(self, location: Location) -> bool:
        """A JSON object with `questions`."""
        return "questions" in location.keys

    def parts(self, source: Source) -> Mapping[Split | None, Path]:
        """All questions as one piece: VQA v2 has a file for each split."""
        if source.annotations is None:
            raise DataError(
                f"{source.file.name} holds questions without answers: set source.annotations to "
                "the file of annotations"
            )
        return {None: Path(source.annotations)}

    def records(self, source: Source, part: Path, reading: ImageReader) -> Iterator[Record]:
        """A record for each question, with all annotators' answers in theirs.

        An `image` names the file where it does not follow COCO's pattern. Ids are
        ``<image id>#<question id>``. Questions of which the commonest answer is none of the
        domain's labels are left out.
        """
        name = source.file.name
        content = load_tables(source.file, ("questions",), "VQA questions")
        annotated = load_tables(part, ("annotations",), "VQA annotations")["annotations"]
        reading.total += len(content["questions"])
        questions = sound_entries(
            reading, name, "questions", content["questions"], "question_id", "image_id", "question",
            unique="question_id",
        )  # fmt: skip
        rows = sound_entries(reading, part.name, "annotations", annotated, "question_id", "answers")
        answers = {row["question_id"]: row["answers"] for row in rows}
        finder, wanted = Finder(source.image_folder), 0
        for entry in questions:
            number = entry["question_id"]
            item = f"question {number}"
            with reading.tolerate(item):
                if number not in answers:
                    text = f"{name}: {item} has no annotation in {part.name}"
                    raise FaultError(FaultKind.ROW_INCOMPLETE, text)
                answer = _answers(answers.pop(number), f"{part.name}: {item}")
                if not source.labels or answer.choice in source.labels:
                    wanted += 1
                    path = _file(source.image_folder, finder, entry, content.get("data_subtype"))
                    record = Record((path,), f"{entry['image_id']}#{number}", item=item)
                    record.answer, record.prompt = answer, str(entry["question"]).strip()
                    yield record
        for number in answers if reading.thorough else ():
            text = f"{part.name}: question {number} is not asked in {name}"
            reading.add(FaultKind.ANNOTATION_STRAY, f"question {number}", text)
        if not wanted:
            raise DataError(
                f"{name}: no question is answered by one of {', '.join(source.labels)}: correct "
                "the domain's labels"
            )
        if wanted < len(questions):
            log.info("%s: %d questions have other answers", name, len(questions) - wanted)


def _answers(given: Any, where: str) -> Answer:
    listed = given if isinstance(given, list) else [given]
    texts = [str(one.get("answer", "") if isinstance(one, dict) else one).strip() for one in listed]
    if not any(texts):
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no answers")
    return Answer(answers=tuple(texts))


def _file(folder: Path, finder: Finder, entry: dict[str, Any], subtype: Any) -> Path:
    if "image" in entry:
        return finder.find(str(entry["image"]))
    image = entry["image_id"]
    number = f"{image:012d}" if isinstance(image, int) else str(image)
    names = [f"COCO_{subtype}_{number}.jpg", f"{number}.jpg", f"{image}.jpg", f"{image}.png"]
    return next((folder / name for name in names if is_file(folder / name)), folder / names[1])
