"""Folders and tables of images and videos; the frames of videos, and files that have none."""

from io import BytesIO

import av
import datasets
import numpy as np
import pytest

from tests.support.data_sets import metadata, noise, picture, write_video
from tests.support.detection_sets import read_split
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.formats import videos
from valora_data.sources.formats.videos import read_frames
from valora_data.sources.registry import FORMATS, open_source


def read_folder(path, task, labels=(), **more):
    kind = "videofolder" if "frames" in more else "imagefolder"
    return list(read_split(kind, path, None, labels, task, **more))


@pytest.fixture
def pets(tmp_path):
    for index, name in enumerate(["cat/a.png", "cat/deep/b.png", "dog/a.png", "eel/x.png"]):
        picture(tmp_path / "pets" / name, index)
    (tmp_path / "pets" / "dog" / "notes.txt").write_text("no image")
    return tmp_path / "pets"


def test_a_folder_per_class(pets):
    samples = read_folder(pets, Task.CLASSIFICATION)
    expected = {"cat/a.png": "cat", "cat/deep/b.png": "cat", "dog/a.png": "dog", "eel/x.png": "eel"}
    assert {s.id: s.answer.label for s in samples} == expected
    some = read_folder(pets, Task.CLASSIFICATION, ["dog", "cat"])
    assert [s.id for s in some] == ["cat/a.png", "cat/deep/b.png", "dog/a.png"]


BOXES = Answer((Box(0, 0, 3, 2, "cat"),))
ROWS = [
    (Task.CLASSIFICATION, {"label": "cat"}, Answer(label="cat")),
    (Task.CLASSIFICATION, {"class": 3.0}, Answer(label="3")),
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
def test_metadata_of_every_task(tmp_path, task, row, answer):
    image = picture(tmp_path / "sub" / "a.png", 0)
    metadata(tmp_path, {"file_name": "sub/a.png"} | row)
    (sample,) = read_folder(tmp_path, task)
    prompt = "it" if task.spec.prompted else None
    assert (sample.id, sample.prompt, sample.answer) == ("sub/a.png", prompt, answer)
    assert sample.image.tobytes() == image.tobytes()


def test_several_questions_about_one_image(tmp_path):
    for name in ("a.png", "b.png"):
        picture(tmp_path / name, ord(name[0]))
    rows = [("a.png", "one?", "1"), ("b.png", "two?", "2"), ("a.png", "three?", "3")]
    metadata(tmp_path, *({"file_name": f, "question": q, "answer": a} for f, q, a in rows))
    found = [(s.id, s.prompt, s.answer.choice) for s in read_folder(tmp_path, Task.VQA)]
    assert found == [("a.png#0", "one?", "1"), ("b.png", "two?", "2"), ("a.png#1", "three?", "3")]


def test_columns_of_other_names(tmp_path):
    picture(tmp_path / "a.png", 0)
    metadata(tmp_path, {"file_name": "a.png", "species": "cat", "label": "wrong"})
    (sample,) = read_folder(tmp_path, Task.CLASSIFICATION, columns={"label": "species"})
    assert sample.answer.label == "cat"
    with pytest.raises(DataError, match=r"row 1 \(a\.png\) has no kind, only file_name, species"):
        read_folder(tmp_path, Task.CLASSIFICATION, columns={"label": "kind"})


ONE = {"file_name": "a.png"}
BOX = {"bbox": [[0, 0, 3, 2]], "category": ["fox"]}
FAULTS = {  # more in tests/unit/valora_data/validation
    r"label 'fox' is not one of cat, dog": (Task.CLASSIFICATION, [ONE | {"label": "fox"}]),
    r"metadata\.jsonl is empty": (Task.CLASSIFICATION, []),
    "the answer is empty": (Task.VQA, [ONE | {"question": "q", "answer": " "}]),
    "count 'few' is no whole number": (Task.COUNTING, [ONE | {"count": "few"}]),
    "count 99999999999 is no whole number": (Task.COUNTING, [ONE | {"count": 99999999999}]),
    r"\['q'\] is no text": (Task.VQA, [ONE | {"question": ["q"], "answer": "a"}]),
    "nan is no text": (Task.CAPTION, [ONE | {"caption": float("nan")}]),
    "'fox' is not one of": (Task.DETECTION, [ONE | {"objects": BOX}]),
    "1 bbox with 0 category": (Task.DETECTION, [ONE | {"objects": BOX | {"category": []}}]),
    "no object of lists": (Task.DETECTION, [ONE | {"objects": "fox"}]),
}


@pytest.mark.parametrize("message", list(FAULTS))
def test_rows_that_are_of_no_use(tmp_path, message):
    task, rows = FAULTS[message]
    picture(tmp_path / "set" / "a.png", 0)
    metadata(tmp_path / "set", *rows)
    labels = ["cat", "dog"] if task in (Task.CLASSIFICATION, Task.DETECTION) else []
    with pytest.raises(DataError, match=message):
        read_folder(tmp_path / "set", task, labels)


def test_folders_that_are_of_no_use(tmp_path, pets):
    (tmp_path / "clips" / "wave").mkdir(parents=True)
    (tmp_path / "clips" / "wave" / "00.avi").write_bytes(b"")
    for name in ("train", "validation", "extra", "dev"):
        (tmp_path / "two" / name).mkdir(parents=True)
    for path, message, arguments, more in (
        (pets, "has no category 'fox', only cat, dog, eel", (Task.CLASSIFICATION, ["fox"]), {}),
        (pets, r"has no metadata\.jsonl, which task vqa needs", (Task.VQA,), {}),
        (pets, "pets holds no videos: the data set is empty", (Task.VIDEO,), {"frames": 4}),
        (tmp_path / "two", "has folders dev and validation for the split val", (Task.VQA,), {}),
        (tmp_path / "nowhere", "nowhere does not exist", (Task.VQA,), {}),
        (tmp_path / "clips", r"1 of 1 .*video 00\.avi cannot be", (Task.VIDEO,), {"frames": 2}),
    ):
        with pytest.raises(DataError, match=message):
            read_folder(path, *arguments, **more)


def read_hub(path, task, labels=(), split=None, **more):
    return read_split("hub", path, split, labels, task, **more)


def table(folder, split, features, rows):
    folder.mkdir(exist_ok=True)
    whole = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    whole.to_parquet(folder / f"{split}-00000-of-00001.parquet")


FEATURES = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "eel"])}


@pytest.fixture
def table_of_pets(tmp_path):
    for split, start in (("train", 0), ("validation", 10)):
        rows = [{"image": noise(start + i), "label": i % 3} for i in range(5)]
        table(tmp_path / "pets", split, FEATURES, rows)
    return tmp_path / "pets"


def test_classes_by_name(table_of_pets):
    assert FORMATS["hub"]().guess_task(str(table_of_pets)) is Task.CLASSIFICATION
    samples = list(read_hub(table_of_pets, Task.CLASSIFICATION, split=Split.VAL))
    assert [s.answer.label for s in samples] == ["cat", "dog", "eel", "cat", "dog"]
    assert [s.image.tobytes() for s in samples] == [noise(10 + i).tobytes() for i in range(5)]
    some = list(read_hub(table_of_pets, Task.CLASSIFICATION, ["eel", "cat"]))
    assert [(s.id, s.answer.label) for s in some] == [
        ("train/0", "cat"), ("train/2", "eel"), ("train/3", "cat"),
    ]  # fmt: skip


def test_what_save_to_disk_wrote(tmp_path):
    rows = [{"image": noise(i), "label": i} for i in range(3)]
    whole = datasets.Dataset.from_list(rows, features=datasets.Features(FEATURES))
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(tmp_path / "both")
    both = Source("hub", Task.CLASSIFICATION, path=str(tmp_path / "both"))
    assert set(open_source(both)) == {None, Split.TEST}
    whole.save_to_disk(tmp_path / "one")
    samples = list(read_hub(tmp_path / "one", Task.CLASSIFICATION))
    assert [s.answer.label for s in samples] == ["cat", "dog", "eel"]


def test_objects_and_several_images(tmp_path):
    objects = {
        "bbox": datasets.List(datasets.List(datasets.Value("float32"), length=4)),
        "category": datasets.List(datasets.ClassLabel(names=["cat", "dog"])),
    }
    rows = [{"image_id": "k", "images": [noise(0), noise(1)],
             "objects": {"bbox": [[1, 2, 3, 4], [0, 0, 2, 2]], "category": [1, 0]}}]  # fmt: skip
    features = {"image_id": datasets.Value("string"), "images": datasets.List(datasets.Image()),
                "objects": objects}  # fmt: skip
    table(tmp_path / "set", "train", features, rows)
    (sample,) = read_hub(tmp_path / "set", Task.DETECTION, columns={"id": "image_id"})
    assert (sample.id, len(sample.images)) == ("k", 2)
    assert sample.answer.boxes == (Box(1, 2, 4, 6, "dog"), Box(0, 0, 2, 2, "cat"))
    (sample,) = read_hub(tmp_path / "set", Task.DETECTION, ["cat"])
    assert sample.answer.boxes == (Box(0, 0, 2, 2, "cat"),)


def test_rows_are_streamed(tmp_path, monkeypatch):
    """The first sample is there before the last row, which is broken, is read."""
    good = BytesIO()
    noise(0).save(good, "PNG")
    raw = [good.getvalue()] * 30 + [b"broken"] * 6
    features = {"image": datasets.Image(), "label": datasets.Value("string")}
    rows = [{"image": {"bytes": part, "path": None}, "label": "cat"} for part in raw]
    table(tmp_path / "set", "train", features, rows)
    stream = read_hub(tmp_path / "set", Task.CLASSIFICATION)
    assert next(stream).id == "0"
    with pytest.raises(DataError, match=r"6 of 100 images have faults.*row 30 cannot be"):
        list(stream)


def test_a_table_of_questions_without_images(tmp_path):
    features = {name: datasets.Value("string") for name in ("question", "answer")}
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(3)]
    table(tmp_path / "set", "train", features, rows)
    samples = list(read_hub(tmp_path / "set", Task.VQA))
    assert [(one.images, one.prompt, one.answer.choice) for one in samples] == [
        ((), "0 + 0?", "0"), ((), "1 + 1?", "2"), ((), "2 + 2?", "4"),
    ]  # fmt: skip
    with pytest.raises(DataError, match="has no column image or images"):
        list(read_hub(tmp_path / "set", Task.CAPTION))


def test_tables_of_no_use(table_of_pets):
    for name, task, labels, columns, message in (
        ("nobody/nothing", Task.VQA, [], {}, "data set nobody/nothing cannot be loaded"),
        (table_of_pets, Task.VQA, [], {"image": "x"}, "has no column x, only image, label"),
        (table_of_pets, Task.CLASSIFICATION, ["fox"], {}, "has no category 'fox', only cat, dog"),
        (table_of_pets, Task.VQA, [], {}, r"row 0 has no answers or answer, only label"),
    ):
        with pytest.raises(DataError, match=message):
            list(read_hub(name, task, labels, columns=columns))


def level(image):
    return float(np.asarray(image)[4:-4, 16:-4].mean())


def test_frames_are_taken_uniformly(tmp_path):
    levels = [20 + 7 * i for i in range(24)]
    video = write_video(tmp_path / "a.mp4", levels)
    for source in (video, video.read_bytes()):
        frames = read_frames(source, 4)
        assert [(frame.mode, frame.size) for frame in frames] == [("RGB", (32, 16))] * 4
        shown = [levels[i] for i in (3, 9, 15, 21)]  # the middles of equal parts
        assert [level(f) for f in frames] == pytest.approx(shown, abs=4)
    frames = read_frames(write_video(tmp_path / "b.mp4", [40, 200]), 5)  # too short: some repeat
    assert [level(f) > 120 for f in frames] == [False, False, True, True, True]


def test_frames_are_turned_as_a_player_shows_them(tmp_path):
    """A phone writes what it sees lying down, and says how to turn it."""
    video = write_video(tmp_path / "a.mp4", [60] * 6)
    content = bytearray(video.read_bytes())
    start = content.index(b"tkhd") + 4 + 4 + 20 + 16  # version and flags, times and ids, layer
    one, minus = (65536).to_bytes(4, "big"), (-65536).to_bytes(4, "big", signed=True)
    zero, unit = bytes(4), (1 << 30).to_bytes(4, "big")
    # A quarter turn clockwise.
    content[start : start + 36] = (zero + one + zero) + (minus + zero + zero) + (zero + zero + unit)
    video.write_bytes(content)
    (frame,) = read_frames(video, 1)
    assert frame.size == (16, 32)
    pixels = np.asarray(frame).mean(-1)
    assert pixels[:6].mean() > 230 > 120 > pixels[-6:].mean()  # what was left is now on top


def test_what_cannot_be_read(tmp_path):
    (tmp_path / "broken.mp4").write_bytes(b"no video at all" * 40)
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    video = write_video(tmp_path / "cut.avi", [10 * i for i in range(20)])
    video.write_bytes(video.read_bytes()[: video.stat().st_size * 2 // 3])
    for name, count, message in (
        ("no.mp4", 4, r"video no\.mp4 cannot be decoded"),
        ("broken.mp4", 4, r"video broken\.mp4 cannot be decoded.*repair or remove them"),
        ("cut.avi", 4, r"video cut\.avi cannot be decoded"),
        ("sound.mp4", 4, r"video sound\.mp4 has no frames"),
        ("sound.mp4", 0, r"at least one frame, got 0: raise source\.frames"),
    ):
        with pytest.raises(DataError, match=message):
            read_frames(tmp_path / name, count)


def test_packets_without_frames(tmp_path, monkeypatch):
    """Some codecs have packets that show nothing: what counts is what decodes."""
    video = write_video(tmp_path / "a.mp4", [10 * i for i in range(20)])
    right = [frame.tobytes() for frame in read_frames(video, 4)]
    monkeypatch.setattr(videos, "_packets", lambda *_: 27)
    assert [frame.tobytes() for frame in read_frames(video, 4)] == right
