"""VQA files: what they say comes out, what is wrong is named."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.data_sets import picture, write_json
from valora_data.errors import DataError
from valora_data.schema import Task
from valora_data.sources.base import Source
from valora_data.sources.registry import open_source


def read_vqa(questions: Path, annotations: Path, folder: Path, labels: list[str] = ()) -> list:
    given = Source("vqa", Task.VQA, tuple(labels), path=str(questions), images=str(folder),
                   annotations=str(annotations))  # fmt: skip
    return list(open_source(given)[None]())


def vqa_files(folder: Path) -> tuple[Path, Path]:
    questions = [
        {"question_id": 70, "image_id": 5, "question": "Is it red?"},
        {"question_id": 71, "image_id": 5, "question": "What is it?"},
        {"question_id": 72, "image_id": 6, "question": "Is it old? ", "image": "own.png"},
    ]
    given = {70: ["yes"] * 2 + ["no"], 71: ["cat", "dog", "cat"], 72: ["no", "no", "yes"]}
    annotations = [
        {"question_id": key, "image_id": 5, "answers": [{"answer": a, "answer_id": i + 1}
         for i, a in enumerate(answers)]}
        for key, answers in reversed(given.items())
    ]  # fmt: skip
    picture(folder / "COCO_val2014_000000000005.jpg", 5)
    picture(folder / "own.png", 6)
    return (
        write_json(folder / "q.json", {"data_subtype": "val2014", "questions": questions}),
        write_json(folder / "a.json", {"annotations": annotations}),
    )


def test_questions_and_annotations(tmp_path: Path) -> None:
    samples = read_vqa(*vqa_files(tmp_path), tmp_path)
    assert [(s.id, s.prompt, s.answer.answers) for s in samples] == [
        ("5#70", "Is it red?", ("yes", "yes", "no")),
        ("5#71", "What is it?", ("cat", "dog", "cat")),
        ("6#72", "Is it old?", ("no", "no", "yes")),
    ]  # fmt: skip
    own = np.asarray(Image.open(tmp_path / "own.png"))
    assert (np.asarray(samples[2].image) == own).all()


def test_a_closed_set_of_answers(tmp_path: Path) -> None:
    samples = read_vqa(*vqa_files(tmp_path), tmp_path, ["no", "yes"])
    assert [s.answer.choice for s in samples] == ["yes", "no"]
    with pytest.raises(DataError, match="no question is answered by one of left, right"):
        read_vqa(*vqa_files(tmp_path), tmp_path, ["left", "right"])


def test_questions_of_no_use(tmp_path: Path) -> None:
    questions, annotations = vqa_files(tmp_path)
    content = json.loads(annotations.read_text())
    first, *rest = content["annotations"]
    (tmp_path / "own.png").unlink()
    for message, tables in (
        ("has no list 'annotations': expected VQA annotations", {"annotations": None}),
        (r"question 72 has no annotation in a\.json", {"annotations": rest}),
        (r"a\.json: question 72 has no answers", {"annotations": [first | {"answers": []}, *rest]}),
        (r"1 of 3 images has faults.*own\.png", content),
    ):
        write_json(annotations, tables)
        with pytest.raises(DataError, match=message):
            read_vqa(questions, annotations, tmp_path)
