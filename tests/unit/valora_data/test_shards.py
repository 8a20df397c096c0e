"""Shards: everything that a sample holds comes back, is readable by other tools, and streams."""

import datasets
import pytest

from tests.support.data_sets import noise
from valora_data import shards
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Domain, Sample, Task

LABELS = ("cat", "dog", "eel")


def same(a, b):
    images = [image.tobytes() for image in a.images] == [image.tobytes() for image in b.images]
    return images and (a.id, a.prompt, a.answer) == (b.id, b.prompt, b.answer)


FULL = Sample(
    "full#3",
    noise(0),
    Answer(
        (Box(1, 0.5, 3, 2.25, "dog", 0.75), Box(0, 0, 5, 4, "cat")), "eel", (0.25, 0.125, 0.625),
        ("two", "2", "two"), ("a dog.", "there is a dog"), 2,
    ),
    "how many dogs?",
    (noise(1, (2, 3)), noise(2)),
)  # fmt: skip


def test_all_fields_come_back_and_other_tools_read_them(tmp_path):
    plain = Sample("plain", noise(3), Answer())
    assert shards.write([FULL, plain], LABELS, tmp_path / "set") == 2
    back = shards.read(tmp_path / "set")
    assert same(back[0], FULL) and same(back[1], plain)
    assert [p.name for p in tmp_path.iterdir()] == ["set"]
    raw = datasets.load_from_disk(str(tmp_path / "set"))
    assert raw.features["label"].names == list(LABELS)
    row = raw[0]
    assert row["label"] == 2
    assert row["objects"]["bbox"] == [[1, 0.5, 2, 1.75], [0, 0, 5, 4]]
    assert row["objects"]["category"] == [1, 0]
    assert [image.size for image in row["images"]] == [(12, 8), (2, 3), (12, 8)]
    phrase = Sample("a", noise(0), Answer((Box(0, 0, 2, 2, "the cat"),)), "the cat")
    shards.write([phrase], (), tmp_path / "language")
    shard = shards.open_shard(tmp_path / "language")
    assert shard.labels == () and same(shard[0], phrase)


def test_samples_are_decoded_one_by_one(tmp_path):
    made = [Sample(f"s{i}", noise(i), Answer(label=LABELS[i % 3])) for i in range(150)]
    with shards.ShardWriter(LABELS, tmp_path / "set") as writer:
        for sample in made:
            writer.add(sample)
            assert not (tmp_path / "set").exists()
    shard = shards.open_shard(tmp_path / "set")
    assert len(shard) == writer.count == 150
    assert same(shard[149], made[149])
    assert all(map(same, shard, made))
    assert shard.answers() == [sample.answer for sample in made]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "no samples to write to set: the source is empty"),
        ([FULL, Sample("a", noise(0), Answer(label="fox"))],
         "sample a: label 'fox' is not one of cat, dog, eel"),
        ([Sample("a", noise(0), Answer(soft=(0.5, 0.5)))], "a has 2 soft labels, expected 3"),
    ],
)  # fmt: skip
def test_nothing_is_left_of_a_failed_write(samples, message, tmp_path):
    with pytest.raises(DataError, match=message):
        shards.write(samples, LABELS, tmp_path / "set")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_shard(tmp_path):
    with pytest.raises(DataError, match="missing is not a readable data set"):
        shards.read(tmp_path / "missing")
    datasets.Dataset.from_list([{"id": "a"}]).save_to_disk(tmp_path / "other")
    with pytest.raises(DataError, match=r"other is not a readable data set \(no column answers"):
        shards.read(tmp_path / "other")


def test_answers_that_cannot_be():
    for answer, message in (
        ({"soft": (0.5, 1.0)}, r"add up to 1, got a sum of 1\.5"),
        ({"soft": (-0.5, 1.5)}, r"least one of -0\.5: apply a softmax"),
        ({"count": -1}, r"a count must lie in \[0, 2³¹\), got -1"),
    ):
        with pytest.raises(DataError, match=message):
            Answer(**answer)
    found = [Answer(label="cat", count=3), Answer(count=0), Answer(answers=("no", "yes", "yes"))]
    assert [answer.choice for answer in (*found, Answer())] == ["cat", "0", "yes", None]
    tasks = (Task.COUNTING, Task.VQA, Task.CLASSIFICATION)
    chosen = [Answer(count=3), Answer(answers=("3",)), Answer(label="3")]
    assert [Answer.chosen(task, "3") for task in tasks] == chosen
    assert Box(0, 0, 2, 2, "cat").iou(Box(1, 0, 3, 4, "dog")) == 2 / (4 + 8 - 2)


def domain(task, *labels, required=0.5, name="d"):
    return Domain(name, task, labels, "what is this?", required)


def test_questions_of_a_domain():
    assert domain(Task.CAPTION, required=6.0).metric == "cider"
    own, none = (Sample("a", noise(0), Answer(), prompt) for prompt in ("who?", None))
    assert domain(Task.VQA).question(own) == "who?"
    assert domain(Task.VQA).question(none) == "what is this?"
    asked = Domain("d", Task.GROUNDING, (), "locate {} here", 0.5)
    phrase = Sample("a", noise(0), Answer(), "the {} cat")
    assert asked.question(phrase) == "locate the {} cat here"


@pytest.mark.parametrize(
    ("task", "labels", "required", "message"),
    [
        (Task.CLASSIFICATION, ("cat",), 0.5, "domain d has one class, 'cat'"),
        (Task.VQA, ("yes",), 0.5, "domain d has one class, 'yes'"),
        (Task.CLASSIFICATION, (), 0.5, "needs a list of distinct labels"),
        (Task.DETECTION, ("a", "a"), 0.5, "needs a list of distinct labels"),
        (Task.CAPTION, ("a", "b"), 0.5, "does not choose from labels: leave its labels empty"),
        (Task.GROUNDING, ("a",), 0.5, "does not choose from labels: leave its labels empty"),
        (Task.COUNTING, ("one", "two"), 0.5, "labels must be digits, got 'one'"),
        (Task.VQA, (), 6.0, r"must lie in \(0, 1\], got 6\.0"),
        (Task.CAPTION, (), 11.0, r"must lie in \(0, 10\], got 11\.0$"),
        (Task.VQA, (), 97.0, r"must lie in \(0, 1\], got 97\.0: 97 % is 0\.97"),
    ],
)
def test_domains_that_cannot_be(task, labels, required, message):
    with pytest.raises(DataError, match=message):
        domain(task, *labels, required=required)
    with pytest.raises(DataError, match="domain name 'a b' must be letters, digits"):
        domain(task, *labels, required=required, name="a b")
