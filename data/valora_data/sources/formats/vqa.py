"""Questions about images in the JSON format of VQA v2: a file of questions, one of annotations."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Sample, Task
from valora_data.sources.base import Location, Source, SourceFormat, Splits
from valora_data.sources.formats.labelled import ImageReader, Reading
from valora_data.sources.formats.tables import (
    load_json,
    load_tables,
    sound_entries,
    unique_entries,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

log = logging.getLogger(__name__)

QUESTION = ("question_id", "image_id", "question")
ANNOTATION = ("question_id", "answers")


class VqaFormat(SourceFormat):
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

    def open(self, source: Source) -> Splits:
        """All questions as one piece: VQA v2 has a file for each split."""
        file = source.file
        if source.annotations is None:
            raise DataError(
                f"{file.name} holds questions without answers: set source.annotations to the "
                "file of annotations"
            )
        return {
            None: partial(
                read_vqa,
                file,
                Path(source.annotations),
                source.image_folder,
                source.labels or None,
                source.reader,
            )
        }

    def reads(self, source: Source) -> Iterator[Path]:
        """The file of questions, that of annotations, and the images that are asked about."""
        file = source.file
        yield file
        if source.annotations is not None:
            yield Path(source.annotations)
        content = load_json(file)
        subtype = str(content.get("data_subtype", ""))
        for entry in content.get("questions", ()):
            if isinstance(entry, dict) and "image_id" in entry:
                yield _file(source.image_folder, entry, subtype)


def read_vqa(
    questions_path: Path,
    annotations_path: Path,
    image_folder: Path,
    labels: Sequence[str] | None = None,
    reader: ImageReader | None = None,
) -> Iterator[Sample]:
    """Read questions with what annotators answered.

    Args:
        questions_path: File with `questions` of `question_id`, `image_id` and `question`; an
            `image` names the file where it does not follow COCO's pattern.
        annotations_path: File with `annotations` of `question_id` and `answers`.
        image_folder: Folder of the images.
        labels: Answers that a domain with a closed set allows, such as yes and no; questions with
            another commonest answer are left out. None or empty for any.
        reader: Opens the images; by default a reader that tolerates few broken files.

    Yields:
        One sample per question, in the file's order, with all annotators' answers in theirs; the
        id is ``<image id>#<question id>``.

    Raises:
        DataError: If a file is missing, corrupt or empty, ids do not match or occur twice, no
            question has an allowed answer, or too many images cannot be decoded.
    """
    source = questions_path.name
    content = load_tables(questions_path, ("questions",), "VQA questions")
    annotated = load_tables(annotations_path, ("annotations",), "VQA annotations")["annotations"]
    with Reading(reader, source, len(content["questions"])) as reading:
        questions = sound_entries(reading, source, "questions", content["questions"], QUESTION)
        questions = unique_entries(reading, source, "question", "question_id", questions)
        annotations = sound_entries(
            reading, annotations_path.name, "annotations", annotated, ANNOTATION
        )
        answers = {entry["question_id"]: entry for entry in annotations}
        wanted = []
        for entry in questions:
            with reading.tolerate(f"question {entry['question_id']}"):
                if entry["question_id"] not in answers:
                    raise FaultError(
                        FaultKind.ROW_INCOMPLETE,
                        f"{source}: question {entry['question_id']} has no annotation in "
                        f"{annotations_path.name}",
                    )
                answer = _answers(answers[entry["question_id"]], annotations_path)
                if not labels or answer.choice in labels:
                    wanted.append((entry, answer))
        asked = {entry["question_id"] for entry in questions}
        for number in answers:
            if reading.thorough and number not in asked:
                text = f"{annotations_path.name}: question {number} is not asked in {source}"
                reading.add(FaultKind.ANNOTATION_STRAY, f"question {number}", text)
        if not wanted:
            raise DataError(
                f"{source}: no question is answered by one of {', '.join(labels or ())}: correct "
                "the domain's labels"
            )
        if len(wanted) < len(questions):
            log.info("%s: %d questions have other answers", source, len(questions) - len(wanted))
        subtype = str(content.get("data_subtype", ""))
        paths = [_file(image_folder, entry, subtype) for entry, _ in wanted]
        for (entry, answer), picture in zip(wanted, reading.open_all(paths), strict=True):
            if picture is not None:
                key = f"{entry['image_id']}#{entry['question_id']}"
                yield Sample(key, picture, answer, str(entry["question"]).strip())


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


def _file(folder: Path, entry: dict[str, Any], subtype: str) -> Path:
    if "image" in entry:
        return folder / str(entry["image"])
    image = entry["image_id"]
    number = f"{image:012d}" if isinstance(image, int) else str(image)
    names = [f"COCO_{subtype}_{number}.jpg", f"{number}.jpg", f"{image}.jpg", f"{image}.png"]
    return next((folder / name for name in names if (folder / name).is_file()), folder / names[1])
