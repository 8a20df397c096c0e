"""Folders of images and videos, beside what `datasets` makes of them."""

from pathlib import Path

import datasets
import pytest

from tests.support.data_sets import metadata, picture, write_video
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.formats.files import folder_splits
from valora_data.sources.registry import open_source


def read_folder(path: Path, task: Task, labels: list[str] = (), **more: object) -> list:
    kind = "videofolder" if "frames" in more else "imagefolder"
    return list(open_source(Source(kind, task, tuple(labels), path=str(path), **more))[None]())


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for index, name in enumerate(["cat/a.png", "cat/deep/b.png", "dog/a.png", "eel/x.png"]):
        picture(tmp_path / "pets" / name, index)
    (tmp_path / "pets" / "dog" / "notes.txt").write_text("no image")
    return tmp_path / "pets"


def test_a_folder_per_class(pets: Path) -> None:
    samples = read_folder(pets, Task.CLASSIFICATION)
    expected = {"cat/a.png": "cat", "cat/deep/b.png": "cat", "dog/a.png": "dog", "eel/x.png": "eel"}
    assert {s.id: s.answer.label for s in samples} == expected
    some = read_folder(pets, Task.CLASSIFICATION, ["dog", "cat"])
    assert [s.id for s in some] == ["cat/a.png", "cat/deep/b.png", "dog/a.png"]


def test_agrees_with_datasets(tmp_path: Path) -> None:
    for index in range(6):
        picture(tmp_path / "set" / f"class{index % 2}" / f"{index}.png", index)
    theirs = datasets.load_dataset(str(tmp_path / "set"), split="train", streaming=True)
    names = theirs.features["label"].names
    expected = sorted(
        (row["image"].convert("RGB").tobytes(), names[row["label"]]) for row in theirs
    )
    ours = read_folder(tmp_path / "set", Task.CLASSIFICATION)
    assert sorted((s.image.tobytes(), s.answer.label) for s in ours) == expected


def test_splits_have_the_names_that_others_give_them(tmp_path: Path) -> None:
    for name in ("train", "validation", "test", "extra"):
        (tmp_path / name).mkdir()
    found = folder_splits(tmp_path)
    assert {split: path.name for split, path in found.items()} == {
        Split.TRAIN: "train", Split.VAL: "validation", Split.TEST: "test",
    }  # fmt: skip
    (tmp_path / "dev").mkdir()
    with pytest.raises(DataError, match=r"has folders dev and validation for the split val"):
        folder_splits(tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist"):
        folder_splits(tmp_path / "nowhere")


def test_counts_are_names_of_folders(tmp_path: Path) -> None:
    for count in (0, 3):
        picture(tmp_path / str(count) / "a.png", count)
    assert [s.answer.count for s in read_folder(tmp_path, Task.COUNTING)] == [0, 3]
    picture(tmp_path / "many" / "a.png", 9)
    with pytest.raises(DataError, match="folder many: count 'many' is no whole number"):
        read_folder(tmp_path, Task.COUNTING)


def test_unlabelled_images(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 0)
    (sample,) = read_folder(tmp_path, Task.CLASSIFICATION)
    assert sample.answer == Answer()
    picture(tmp_path / "cat" / "b.png", 1)
    with pytest.raises(DataError, match=r"a\.png lies beside the folders of the classes"):
        read_folder(tmp_path, Task.CLASSIFICATION)


BOXES = Answer((Box(0, 0, 3, 2, "cat"),))
ROWS: list[tuple[Task, dict[str, object], Answer]] = [
    (Task.CLASSIFICATION, {"label": "cat"}, Answer(label="cat")),
    (Task.CLASSIFICATION, {"class": 3.0, "probabilities": [0.5, 0.5]},
     Answer(label="3", soft=(0.5, 0.5))),
    (Task.COUNTING, {"count": 4.0}, Answer(count=4)),
    (Task.VQA, {"question": "it", "answer": "me"}, Answer(answers=("me",))),
    (Task.VQA, {"question": "it", "answers": [{"answer": "a"}, {"answer": "b"}]},
     Answer(answers=("a", "b"))),
    (Task.CAPTION, {"text": "a cat"}, Answer(captions=("a cat",))),
    (Task.CAPTION, {"captions": ["a", " b "]}, Answer(captions=("a", "b"))),
    (Task.GROUNDING, {"phrase": "it", "bbox": [1, 2, 5, 4]}, Answer((Box(1, 2, 6, 6, "it"),))),
    (Task.DETECTION, {"objects": {"bbox": [[0, 0, 3, 2]], "category": ["cat"]}}, BOXES),
    (Task.DETECTION, {"objects": [{"bbox": [0, 0, 3, 2], "category": "cat"}]}, BOXES),
    (Task.DETECTION, {"objects": []}, Answer()),
]  # fmt: skip


@pytest.mark.parametrize(("task", "row", "answer"), ROWS)
def test_metadata_of_every_task(
    tmp_path: Path, task: Task, row: dict[str, object], answer: Answer
) -> None:
    image = picture(tmp_path / "sub" / "a.png", 0)
    metadata(tmp_path, {"file_name": "sub/a.png"} | row)
    (sample,) = read_folder(tmp_path, task)
    prompt = "it" if task.spec.prompted else None
    assert (sample.id, sample.prompt, sample.answer) == ("sub/a.png", prompt, answer)
    assert sample.image.tobytes() == image.tobytes()


def test_several_questions_about_one_image(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        picture(tmp_path / name, ord(name[0]))
    rows = [("a.png", "one?", "1"), ("b.png", "two?", "2"), ("a.png", "three?", "3")]
    metadata(tmp_path, *({"file_name": f, "question": q, "answer": a} for f, q, a in rows))
    found = [(s.id, s.prompt, s.answer.choice) for s in read_folder(tmp_path, Task.VQA)]
    assert found == [("a.png#0", "one?", "1"), ("b.png", "two?", "2"), ("a.png#1", "three?", "3")]


def test_columns_of_other_names(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 0)
    metadata(tmp_path, {"file_name": "a.png", "species": "cat", "label": "wrong"})
    (sample,) = read_folder(tmp_path, Task.CLASSIFICATION, columns={"label": "species"})
    assert sample.answer.label == "cat"
    with pytest.raises(DataError, match=r"row 1 \(a\.png\) has no kind, only file_name, species"):
        read_folder(tmp_path, Task.CLASSIFICATION, columns={"label": "kind"})


def test_videos(tmp_path: Path) -> None:
    for index, name in enumerate(["wave/a.mp4", "jump/b.avi"]):
        path = tmp_path / name
        path.parent.mkdir()
        write_video(path, [50 * index + 10 * i for i in range(9)])
    samples = read_folder(tmp_path, Task.VIDEO, frames=3)
    assert [(s.id, s.answer.label, len(s.images)) for s in samples] == [
        ("jump/b.avi", "jump", 3), ("wave/a.mp4", "wave", 3),
    ]  # fmt: skip
    metadata(tmp_path, {"file_name": "wave/a.mp4", "caption": "someone waves"})
    (sample,) = read_folder(tmp_path, Task.CAPTION, frames=2)
    assert (len(sample.images), sample.answer.captions) == (2, ("someone waves",))


ONE = {"file_name": "a.png"}
BOX = {"bbox": [[0, 0, 3, 2]], "category": ["fox"]}
FAULTS: dict[str, tuple[Task, list[object]]] = {  # more in tests/unit/valora_data/validation
    r"label 'fox' is not one of cat, dog": (Task.CLASSIFICATION, [ONE | {"label": "fox"}]),
    r"metadata\.jsonl is empty": (Task.CLASSIFICATION, []),
    "soft labels are no list": (Task.CLASSIFICATION, [ONE | {"label": "cat", "soft": "x"}]),
    "the answer is empty": (Task.VQA, [ONE | {"question": "q", "answer": " "}]),
    "has no area": (Task.GROUNDING, [ONE | {"phrase": "x", "bbox": [0, 0, 0, 4]}]),
    "is not four numbers": (Task.GROUNDING, [ONE | {"phrase": "x", "bbox": [0, 0, 4]}]),
    "count 'few' is no whole number": (Task.COUNTING, [ONE | {"count": "few"}]),
    "'fox' is not one of": (Task.DETECTION, [ONE | {"objects": BOX}]),
    "1 box with 0 categories": (Task.DETECTION, [ONE | {"objects": BOX | {"category": []}}]),
    "no object of lists": (Task.DETECTION, [ONE | {"objects": "fox"}]),
}


@pytest.mark.parametrize("message", list(FAULTS))
def test_rows_that_are_of_no_use(tmp_path: Path, message: str) -> None:
    task, rows = FAULTS[message]
    picture(tmp_path / "set" / "a.png", 0)
    metadata(tmp_path / "set", *rows)
    labels = ["cat", "dog"] if task in (Task.CLASSIFICATION, Task.DETECTION) else []
    with pytest.raises(DataError, match=message):
        read_folder(tmp_path / "set", task, labels)


def test_folders_that_are_of_no_use(tmp_path: Path, pets: Path) -> None:
    for message, arguments, more in (
        ("has no category 'fox', only cat, dog, eel", (Task.CLASSIFICATION, ["fox"]), {}),
        (r"has no metadata\.jsonl, which task vqa needs", (Task.VQA,), {}),
        ("pets holds no videos: the data set is empty", (Task.VIDEO,), {"frames": 4}),
    ):
        with pytest.raises(DataError, match=message):
            read_folder(pets, *arguments, **more)
    (tmp_path / "wave").mkdir()
    (tmp_path / "wave" / "00.avi").write_bytes(b"")
    with pytest.raises(DataError, match=r"1 of 1 image has faults.*video 00\.avi cannot be"):
        read_folder(tmp_path, Task.VIDEO, frames=2)
