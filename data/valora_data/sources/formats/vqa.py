"""Questions about images in the JSON format of VQA v2: a file of questions, one of annotations."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Task
from valora_data.sources.formats.annotated import AnnotatedFormat, Record
from valora_data.sources.formats.files import Finder, is_file
from valora_data.sources.formats.tables import load_tables, sound_entries, unique_entries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from valora_data.schema import Split
    from valora_data.sources.base import Location, Source
    from valora_data.sources.formats.labelled import ImageReader

log = logging.getLogger(__name__)

QUESTION = ("question_id", "image_id", "question")
ANNOTATION = ("question_id", "answers")


class VqaFormat(AnnotatedFormat):
    """A file of questions; `Source.annotations` is the file of answers."""

    files = "VQA JSON"

    def supports(self, task: Task) -> bool:
        """Visual question answering."""
        return task.spec.answer == "answers"

    def recognises(self, location: Location) -> bool:
        """A JSON object with `questions`."""
        return "questions" in location.keys

    def guess_task(self, path: str) -> Task:
        """Visual question answering."""
        return Task.VQA

    def parts(self, source: Source) -> Mapping[Split | None, Path]:
        """All questions as one piece: VQA v2 has a file for each split."""
        if source.annotations is None:
            raise DataError(
                f"{source.file.name} holds questions without answers: set source.annotations to "
                "the file of annotations"
            )
        return {None: Path(source.annotations)}

    def name(self, source: Source, part: Path) -> str:
        """Name of the file of questions."""
        return source.file.name

    def lists(self, source: Source) -> tuple[Path, ...]:
        """The files of questions and of annotations."""
        return (source.file, *self.parts(source).values())

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
        questions = sound_entries(reading, name, "questions", content["questions"], QUESTION)
        questions = unique_entries(reading, name, "question", "question_id", questions)
        answers = {
            entry["question_id"]: entry
            for entry in sound_entries(reading, part.name, "annotations", annotated, ANNOTATION)
        }
        subtype = str(content.get("data_subtype", ""))
        finder, wanted = Finder(source.image_folder), 0
        for entry in questions:
            number = entry["question_id"]
            with reading.tolerate(f"question {number}"):
                if number not in answers:
                    raise FaultError(
                        FaultKind.ROW_INCOMPLETE,
                        f"{name}: question {number} has no annotation in {part.name}",
                    )
                answer = _answers(answers.pop(number), part)
                if not source.labels or answer.choice in source.labels:
                    wanted += 1
                    path = _file(source.image_folder, finder, entry, subtype)
                    prompt = str(entry["question"]).strip()
                    yield Record(path, f"{entry['image_id']}#{number}", None, answer, prompt=prompt)
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


def _answers(entry: dict[str, Any], path: Path) -> Answer:
    listed = entry["answers"] if isinstance(entry["answers"], list) else [entry["answers"]]
    given = [
        str(answer.get("answer", "") if isinstance(answer, dict) else answer).strip()
        for answer in listed
    ]
    if not any(given):
        raise FaultError(
            FaultKind.ROW_INCOMPLETE, f"{path.name}: question {entry['question_id']} has no answers"
        )
    return Answer(answers=tuple(given))


def _file(folder: Path, finder: Finder, entry: dict[str, Any], subtype: str) -> Path:
    if "image" in entry:
        return finder.find(str(entry["image"]))
    image = entry["image_id"]
    number = f"{image:012d}" if isinstance(image, int) else str(image)
    names = [f"COCO_{subtype}_{number}.jpg", f"{number}.jpg", f"{image}.jpg", f"{image}.png"]
    return next((folder / name for name in names if is_file(folder / name)), folder / names[1])
