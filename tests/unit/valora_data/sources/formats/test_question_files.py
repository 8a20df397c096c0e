"""LLaVA, VQA, RefCOCO and COCO caption files: what they say comes out, what is wrong is named."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from tests.unit.valora_data.sources.formats.test_folders import picture
from tests.unit.valora_data.sources.formats.test_videos import write_video
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.formats.coco import read_coco_captions
from valora_data.sources.formats.llava import read_llava
from valora_data.sources.formats.refcoco import read_refcoco, refcoco_splits
from valora_data.sources.formats.vqa import read_vqa


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def talk(*turns: str, **entry: object) -> dict[str, object]:
    people = ("human", "gpt")
    said = [{"from": people[i % 2], "value": text} for i, text in enumerate(turns)]
    return {"id": "x", "image": "a.png", "conversations": said} | entry


# ---- LLaVA -------------------------------------------------------------------------------------


def test_conversations_become_questions(tmp_path: Path) -> None:
    image = picture(tmp_path / "a.png", 0)
    file = write(
        tmp_path / "talk.json",
        [
            talk("<image>\nWho is it?", "me", "And where?", "here", id="first"),
            {"id": "text", "conversations": talk("hi", "ho")["conversations"]},
            talk("Why?\n<image>", "so"),
        ],
    )
    samples = list(read_llava(file, tmp_path, Task.VQA))
    assert [(s.id, s.prompt, s.answer.answers) for s in samples] == [
        ("first#0", "Who is it?", ("me",)), ("first#1", "And where?", ("here",)),
        ("x", "Why?", ("so",)),
    ]  # fmt: skip
    assert samples[1].image.tobytes() == image.tobytes()


@pytest.mark.parametrize(
    ("task", "turns", "prompt", "answer"),
    [
        (Task.CAPTION, ("<image>\nDescribe.", "a cat"), "Describe.", Answer(captions=("a cat",))),
        (Task.CAPTION, ("<image>", "a cat"), None, Answer(captions=("a cat",))),
        (Task.CLASSIFICATION, ("<image>\nWhat?", "cat"), "What?", Answer(label="cat")),
        (Task.COUNTING, ("<image>\nHow many?", "3"), "How many?", Answer(count=3)),
        (
            Task.GROUNDING,
            ("<image>\nlocate", "<ref>the cat</ref><box>(250,500),(500,1000)</box>"),
            "the cat", Answer((Box(3, 4, 6, 8, "the cat"),)),
        ),
        (
            Task.GROUNDING, ("<image>\nthe left cat", "[0.25, 0.5, 0.5, 1.0]"),
            "the left cat", Answer((Box(3, 4, 6, 8, "the left cat"),)),
        ),
    ],
)  # fmt: skip
def test_conversations_for_every_task(
    tmp_path: Path, task: Task, turns: tuple[str, ...], prompt: str | None, answer: Answer
) -> None:
    picture(tmp_path / "a.png", 0, (12, 8))
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps(talk(*turns)) + "\n\n")
    (sample,) = read_llava(file, tmp_path, task)
    assert (sample.id, sample.prompt, sample.answer) == ("x", prompt, answer)


def test_several_images_and_videos(tmp_path: Path) -> None:
    for index, name in enumerate("ab"):
        picture(tmp_path / f"{name}.png", index)
    write_video(tmp_path / "c.mp4", [20, 60, 100, 140])
    file = write(
        tmp_path / "talk.json",
        [
            talk("<image> and <image>\nsame?", "no", image=["a.png", "b.png"]),
            talk("<video>\nwhat?", "a fade", image=None, video="c.mp4", id="y"),
        ],
    )
    both, video = read_llava(file, tmp_path, Task.VQA, frames=2)
    assert (len(both.images), both.prompt) == (2, "and same?")
    assert both.rest[0].tobytes() == Image.open(tmp_path / "b.png").tobytes()
    assert (len(video.images), video.prompt) == (2, "what?")


@pytest.mark.parametrize(
    ("task", "entry", "message"),
    [
        (Task.VQA, talk("hi"), "told by human: expected human and gpt in turn"),
        (Task.VQA, talk("a", "b", "c", "d") | {"conversations": []}, "told by nobody"),
        (Task.VQA, talk("<image><image>?", "b"), "has 1 images and 2 <image>"),
        (Task.VQA, talk("<image>?", ""), "question 0: the answer is empty"),
        (Task.VQA, {"id": 1, "conversations": []}, "no conversation has an image"),
        (Task.VQA, {"id": 1, "image": "a.png"}, "entry 0 of 'conversations' has no conversations"),
        (Task.VQA, talk("<image>?", "b", image="gone.png"), "1 of 1 images cannot be decoded"),
        (Task.CLASSIFICATION, talk("<image>?", "fox"), "label 'fox' is not one of cat, dog"),
        (Task.GROUNDING, talk("<image>?", "over there"), "'over there' holds no box"),
        (Task.GROUNDING, talk("<image>?", "[0.5, 0.5, 0.5, 0.9]"), "has no area"),
        (Task.COUNTING, talk("<image>?", "some"), "count 'some' is no whole number"),
        (Task.DETECTION, talk("<image>?", "b"), "conversations do not list objects"),
    ],
)
def test_conversations_of_no_use(
    tmp_path: Path, task: Task, entry: dict[str, object], message: str
) -> None:
    picture(tmp_path / "a.png", 0)
    labels = ["cat", "dog"] if task is Task.CLASSIFICATION else None
    with pytest.raises(DataError, match=message):
        list(read_llava(write(tmp_path / "talk.json", [entry]), tmp_path, task, labels))


# ---- VQA ---------------------------------------------------------------------------------------


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
        write(folder / "q.json", {"data_subtype": "val2014", "questions": questions}),
        write(folder / "a.json", {"annotations": annotations}),
    )


def test_questions_and_annotations(tmp_path: Path) -> None:
    samples = list(read_vqa(*vqa_files(tmp_path), tmp_path))
    assert [(s.id, s.prompt, s.answer.answers) for s in samples] == [
        ("5#70", "Is it red?", ("yes", "yes", "no")),
        ("5#71", "What is it?", ("cat", "dog", "cat")),
        ("6#72", "Is it old?", ("no", "no", "yes")),
    ]  # fmt: skip
    own = np.asarray(Image.open(tmp_path / "own.png"))
    assert (np.asarray(samples[2].image) == own).all()


def test_a_closed_set_of_answers(tmp_path: Path) -> None:
    samples = list(read_vqa(*vqa_files(tmp_path), tmp_path, ["no", "yes"]))
    assert [s.answer.choice for s in samples] == ["yes", "no"]
    with pytest.raises(DataError, match="no question is answered by one of left, right"):
        list(read_vqa(*vqa_files(tmp_path), tmp_path, ["left", "right"]))


def test_questions_of_no_use(tmp_path: Path) -> None:
    questions, annotations = vqa_files(tmp_path)
    with pytest.raises(DataError, match=r"has no list 'questions': expected VQA questions with"):
        list(read_vqa(annotations, annotations, tmp_path))
    content = json.loads(annotations.read_text())
    fewer = write(tmp_path / "fewer.json", {"annotations": content["annotations"][1:]})
    with pytest.raises(DataError, match=r"question 72 has no annotation in fewer\.json"):
        list(read_vqa(questions, fewer, tmp_path))
    content["annotations"][0]["answers"] = []
    empty = write(tmp_path / "empty.json", content)
    with pytest.raises(DataError, match=r"empty\.json: question 72 has no answers"):
        list(read_vqa(questions, empty, tmp_path))
    (tmp_path / "own.png").unlink()
    with pytest.raises(DataError, match=r"1 of 3 images cannot be decoded.*own\.png"):
        list(read_vqa(questions, annotations, tmp_path))


# ---- RefCOCO -----------------------------------------------------------------------------------


def refcoco_file(folder: Path, **changes: object) -> Path:
    for name in "ab":
        picture(folder / f"{name}.png", ord(name), (40, 30))
    refs = [
        {"ref_id": 1, "ann_id": 10, "image_id": 7, "split": "train",
         "sentences": [{"sent": "left cat", "raw": "Left cat!"}, {"raw": "the cat"}]},
        {"ref_id": 2, "ann_id": 11, "image_id": 8, "split": "testA", "sentences": ["a dog"]},
        {"ref_id": 3, "ann_id": 10, "image_id": 7, "split": "testB", "sentences": ["that"]},
    ]  # fmt: skip
    content = {
        "images": [{"id": 8, "file_name": "b.png"}, {"id": 7, "file_name": "a.png"}],
        "annotations": [{"id": 11, "bbox": [0, 0, 9, 9]}, {"id": 10, "bbox": [4, 5, 6, 7]}],
        "refs": refs,
    }
    return write(folder / "refs.json", content | changes)


def test_every_sentence_is_a_sample(tmp_path: Path) -> None:
    file = refcoco_file(tmp_path)
    samples = list(read_refcoco(file, tmp_path))
    assert [(s.id, s.prompt) for s in samples] == [
        ("7#1-0", "left cat"), ("7#1-1", "the cat"), ("8#2-0", "a dog"), ("7#3-0", "that"),
    ]  # fmt: skip
    assert samples[0].answer == Answer((Box(4, 5, 10, 12, "left cat"),))
    assert samples[2].answer == Answer((Box(0, 0, 9, 9, "a dog"),))
    assert refcoco_splits(file) == {Split.TRAIN, Split.TEST}
    assert [s.prompt for s in read_refcoco(file, tmp_path, Split.TEST)] == ["a dog", "that"]


def test_references_with_their_own_boxes(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 0, (40, 30))
    ref = {"ref_id": 5, "file_name": "a.png", "bbox": [1, 2, 3, 4], "sentences": ["it"]}
    (sample,) = read_refcoco(write(tmp_path / "flat.json", [ref]), tmp_path)
    assert (sample.id, sample.answer.boxes[0].xyxy) == ("a.png#5-0", (1, 2, 4, 6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotations": []}, "reference 2 has ann_id 11, which is not listed, and no bbox"),
        ({"images": []}, "has image_id 8, which is not listed, and no file_name"),
        ({"refs": []}, "has no references for test"),
        ({"refs": None}, "has no list 'refs'"),
        ({"refs": [{"ref_id": 1}]}, "entry 0 of 'refs' has no sentences"),
        ({"refs": [{"ref_id": 1, "sentences": []}] * 2}, "reference id 1 occurs more than once"),
        (
            {"annotations": [{"id": 10, "bbox": [0, 0, 99, 9]}, {"id": 11, "bbox": [0, 0, 9, 99]}]},
            "outside its 40 × 30 image",
        ),
        (
            {"refs": [{"ref_id": 4, "image_id": 7, "ann_id": 10, "split": "test",
                       "sentences": [" "]}]},
            "reference 4: sentence 0 is empty",
        ),
    ],
)  # fmt: skip
def test_references_of_no_use(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(read_refcoco(refcoco_file(tmp_path, **changes), tmp_path, Split.TEST))


# ---- COCO captions -----------------------------------------------------------------------------


def test_captions_agree_with_pycocotools(tmp_path: Path, capsys: object) -> None:
    for index in range(3):
        picture(tmp_path / f"{index}.png", index)
    images = [{"id": 40 + i, "file_name": f"{i}.png"} for i in range(3)]
    texts = [(40, "a cat"), (42, "a dog "), (40, "one cat")]
    annotations = [{"id": i, "image_id": image, "caption": text}
                   for i, (image, text) in enumerate(texts)]  # fmt: skip
    file = write(tmp_path / "captions.json", {"images": images, "annotations": annotations})
    samples = list(read_coco_captions(file, tmp_path))
    theirs = COCO(str(file))
    expected = {
        str(image): tuple(a["caption"].strip() for a in theirs.imgToAnns[image])
        for image in theirs.getImgIds()
        if theirs.imgToAnns[image]
    }
    assert {s.id: s.answer.captions for s in samples} == expected
    write(file, {"images": images, "annotations": []})
    with pytest.raises(DataError, match="no image has a caption"):
        list(read_coco_captions(file, tmp_path))
    stray = annotations[0] | {"image_id": 9}
    write(file, {"images": images, "annotations": [*annotations, stray]})
    with pytest.raises(DataError, match="belongs to image 9, which is not listed"):
        list(read_coco_captions(file, tmp_path))
