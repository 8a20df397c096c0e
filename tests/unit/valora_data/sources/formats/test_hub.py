"""Data sets that `datasets` loads: local stand-ins for the hub, streamed row by row."""

from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from tests.support.data_sets import write_video
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import FORMATS, open_source


def read_hub(path: str, split: Split | None, task: Task, labels: list[str] = (), **more: object):
    return open_source(Source("hub", task, tuple(labels), path=path, **more))[split]()


def image(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def table(folder: Path, split: str, features: dict, rows: list[dict]) -> None:
    folder.mkdir(exist_ok=True)
    whole = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    whole.to_parquet(folder / f"{split}-00000-of-00001.parquet")


PETS = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "eel"])}


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for split, start in (("train", 0), ("validation", 10)):
        rows = [{"image": image(start + i), "label": i % 3} for i in range(5)]
        table(tmp_path / "pets", split, PETS, rows)
    return tmp_path / "pets"


def test_classes_by_name(pets: Path) -> None:
    assert FORMATS["hub"]().guess_task(str(pets)) is Task.CLASSIFICATION
    samples = list(read_hub(str(pets), Split.VAL, Task.CLASSIFICATION))
    assert [s.answer.label for s in samples] == ["cat", "dog", "eel", "cat", "dog"]
    assert [s.image.tobytes() for s in samples] == [image(10 + i).tobytes() for i in range(5)]
    some = list(read_hub(str(pets), None, Task.CLASSIFICATION, ["eel", "cat"]))
    assert [(s.id, s.answer.label) for s in some] == [
        ("train/0", "cat"), ("train/2", "eel"), ("train/3", "cat"),
    ]  # fmt: skip


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    rows = [{"image": image(i), "label": i} for i in range(3)]
    whole = datasets.Dataset.from_list(rows, features=datasets.Features(PETS))
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(tmp_path / "both")
    both = Source("hub", Task.CLASSIFICATION, path=str(tmp_path / "both"))
    assert set(open_source(both)) == {None, Split.TEST}
    whole.save_to_disk(tmp_path / "one")
    samples = list(read_hub(str(tmp_path / "one"), None, Task.CLASSIFICATION))
    assert [s.answer.label for s in samples] == ["cat", "dog", "eel"]


def test_objects_and_several_images(tmp_path: Path) -> None:
    objects = {
        "bbox": datasets.List(datasets.List(datasets.Value("float32"), length=4)),
        "category": datasets.List(datasets.ClassLabel(names=["cat", "dog"])),
    }
    rows = [{"image_id": "k", "images": [image(0), image(1)],
             "objects": {"bbox": [[1, 2, 3, 4], [0, 0, 2, 2]], "category": [1, 0]}}]  # fmt: skip
    features = {"image_id": datasets.Value("string"), "images": datasets.List(datasets.Image()),
                "objects": objects}  # fmt: skip
    table(tmp_path / "set", "train", features, rows)
    (sample,) = read_hub(str(tmp_path / "set"), None, Task.DETECTION, columns={"id": "image_id"})
    assert (sample.id, len(sample.images)) == ("k", 2)
    assert sample.answer.boxes == (Box(1, 2, 4, 6, "dog"), Box(0, 0, 2, 2, "cat"))
    (sample,) = read_hub(str(tmp_path / "set"), None, Task.DETECTION, ["cat"])
    assert sample.answer.boxes == (Box(0, 0, 2, 2, "cat"),)


def test_questions_as_vqa_v2_has_them_on_the_hub(tmp_path: Path) -> None:
    answers = datasets.List({"answer": datasets.Value("string")})
    features = {"image": datasets.Image(), "question": datasets.Value("string"), "answers": answers}
    rows = [{"image": image(0), "question": "who?", "answers": [{"answer": "me"}] * 3}]
    table(tmp_path / "set", "test", features, rows)
    (sample,) = read_hub(str(tmp_path / "set"), Split.TEST, Task.VQA)
    assert (sample.prompt, sample.answer) == ("who?", Answer(answers=("me",) * 3))


def test_videos(tmp_path: Path) -> None:
    content = write_video(tmp_path / "a.mp4", [20, 80, 140, 200]).read_bytes()
    features = {"video": datasets.Video(decode=False), "label": datasets.Value("string")}
    rows = [{"video": {"bytes": content, "path": "a.mp4"}, "label": "wave"}]
    table(tmp_path / "set", "train", features, rows)
    (sample,) = read_hub(str(tmp_path / "set"), None, Task.VIDEO, frames=2)
    assert (sample.answer.label, len(sample.images)) == ("wave", 2)


def test_rows_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sample is there before the last row, which is broken, is read."""
    good = BytesIO()
    image(0).save(good, "PNG")
    raw = [good.getvalue()] * 30 + [b"broken"] * 6
    features = {"image": datasets.Image(), "label": datasets.Value("string")}
    rows = [{"image": {"bytes": part, "path": None}, "label": "cat"} for part in raw]
    table(tmp_path / "set", "train", features, rows)
    stream = read_hub(str(tmp_path / "set"), None, Task.CLASSIFICATION)
    assert next(stream).id == "0"
    with pytest.raises(DataError, match=r"6 of 100 images have faults.*row 30 cannot be"):
        list(stream)


def test_what_cannot_be_read(pets: Path) -> None:
    for name, task, labels, columns, message in (
        ("nobody/nothing", Task.VQA, [], {}, "data set nobody/nothing cannot be loaded"),
        (pets, Task.VQA, [], {"image": "x"}, "has no column x, only image, label"),
        (pets, Task.CLASSIFICATION, ["fox"], {}, "has no category 'fox', only cat, dog, eel"),
        (pets, Task.VQA, [], {}, r"row 0 has no answers or answer, only label"),
    ):
        with pytest.raises(DataError, match=message):
            list(read_hub(str(name), None, task, labels, columns=columns))
