"""Questions about images in the JSON format of VQA v2: a file of questions, one of annotations."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.schema import Answer, Sample, Task
from valora_data.sources.base import Location, Source, SourceFormat, Splits
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.tables import check_unique, load_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

log = logging.getLogger(__name__)

QUESTIONS = {"questions": ("question_id", "image_id", "question")}
ANNOTATIONS = {"annotations": ("question_id", "answers")}


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
        file = Path(source.location)
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
    content = load_tables(questions_path, QUESTIONS, "VQA questions")
    questions = content["questions"]
    annotations = load_tables(annotations_path, ANNOTATIONS, "VQA annotations")["annotations"]
    check_unique(source, "question", [entry["question_id"] for entry in questions])
    answers = {entry["question_id"]: _answers(entry, annotations_path) for entry in annotations}
    wanted = []
    for entry in questions:
        if entry["question_id"] not in answers:
            raise DataError(
                f"{source}: question {entry['question_id']} has no annotation in "
                f"{annotations_path.name}: give the files of the same split"
            )
        answer = answers[entry["question_id"]]
        if not labels or answer.choice in labels:
            wanted.append((entry, answer))
    if not wanted:
        raise DataError(
            f"{source}: no question is answered by one of {', '.join(labels or ())}: correct the "
            "domain's labels"
        )
    if len(wanted) < len(questions):
        log.info("%s: %d questions have other answers", source, len(questions) - len(wanted))
    reader = reader or ImageReader(source)
    reader.total += len(wanted)
    subtype = str(content.get("data_subtype", ""))
    for entry, answer in wanted:
        picture = reader.open(_file(image_folder, entry, subtype))
        if picture is not None:
            key = f"{entry['image_id']}#{entry['question_id']}"
            yield Sample(key, picture, answer, str(entry["question"]).strip())
    reader.finish()


def _answers(entry: dict[str, Any], path: Path) -> Answer:
    given = [
        str(answer["answer"] if isinstance(answer, dict) else answer).strip()
        for answer in entry["answers"]
    ]
    if not any(given):
        raise DataError(
            f"{path.name}: question {entry['question_id']} has no answers: remove it or add some"
        )
    return Answer(answers=tuple(given))


def _file(folder: Path, entry: dict[str, Any], subtype: str) -> Path:
    if "image" in entry:
        return folder / str(entry["image"])
    image = entry["image_id"]
    number = f"{image:012d}" if isinstance(image, int) else str(image)
    names = [f"COCO_{subtype}_{number}.jpg", f"{number}.jpg", f"{image}.jpg", f"{image}.png"]
    return next((folder / name for name in names if (folder / name).is_file()), folder / names[1])
