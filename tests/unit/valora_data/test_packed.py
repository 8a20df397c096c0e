"""A packed shard holds the same samples; images of a built-in domain are drawn anew."""

import json
import zipfile

import pytest
from PIL import Image

from valora_data import packed, shards
from valora_data.errors import DataError
from valora_data.schema import Answer, Document, Sample, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.scenes.builtin import builtin_samples

PEOPLE = Source("scenes", Task.DETECTION, ("person",), "person", counts={"val": 5, "test": 7})
MOTIONS = ("left", "right", "closer", "away", "still")
VEHICLES = Source("scenes", Task.VIDEO, MOTIONS, "vehicle_motion", counts={"val": 3}, seed=4)


def shard_of(folder, source, split):
    samples = builtin_samples(
        source.task, source.name, split, source.counts[str(split)], source.seed
    )
    shards.write(samples, source.labels, folder)
    return shards.open_shard(folder)


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one.id, one.answer, one.prompt) == (other.id, other.answer, other.prompt)
        assert [image.tobytes() for image in one.images] == [
            image.tobytes() for image in other.images
        ]


@pytest.mark.parametrize(("source", "split"), [(PEOPLE, Split.TEST), (VEHICLES, Split.VAL)])
def test_images_of_built_in_domains_are_left_out_and_drawn(tmp_path, source, split):
    shard = shard_of(tmp_path / "shard", source, split)
    packed.pack(shard, tmp_path / "whole.zip")
    packed.pack(shard, tmp_path / "drawn.zip", source)
    whole, drawn = ((tmp_path / f"{name}.zip").stat().st_size for name in ("whole", "drawn"))
    assert drawn < whole / 5
    assert packed.is_drawn(tmp_path / "drawn.zip")
    with pytest.raises(DataError, match="its images are not drawn yet"):
        packed.read(tmp_path / "drawn.zip")
    assert packed.complete(tmp_path / "drawn.zip")
    assert not packed.complete(tmp_path / "drawn.zip")
    same(packed.read(tmp_path / "drawn.zip"), list(shard))
    same(packed.read(tmp_path / "whole.zip"), list(shard))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixels": "0" * 64}, "draws other pixels of person/test/00003"),
        ({"id": "person/test/99999"}, "has samples that person does not have"),
    ],
)
def test_other_pixels_and_samples_are_refused(tmp_path, change, message):
    file = tmp_path / "people.zip"
    packed.pack(shard_of(tmp_path / "shard", PEOPLE, Split.TEST), file, PEOPLE)
    with zipfile.ZipFile(file) as archive:
        content = json.loads(archive.read(packed.ROWS))
    content["rows"][3] |= change
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(packed.ROWS, json.dumps(content))
    before = file.read_bytes()
    with pytest.raises(DataError, match=message):
        packed.complete(file)
    assert file.read_bytes() == before


def test_a_document_is_packed_with_its_questions(tmp_path):
    pictures = tuple(Image.new("RGB", (8, 6), color) for color in ("red", "navy"))
    document = Document("Zoe keeps three owls.", pictures)
    image = Image.new("RGB", (4, 4), "white")
    samples = [
        Sample(f"{number}", image, Answer(answers=("three",)), "how many owls?", (), document)
        for number in range(2)
    ]
    shards.write(samples, (), tmp_path / "shard")
    packed.pack(shards.open_shard(tmp_path / "shard"), tmp_path / "packed.zip")
    found = packed.read(tmp_path / "packed.zip")
    assert found[1].document.text == document.text
    assert [one.tobytes() for one in found[1].document.images] == [
        one.tobytes() for one in pictures
    ]
    same(found, samples)


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "packed.zip").write_bytes(b"PK")
    with pytest.raises(DataError, match="is not a readable packed data set"):
        packed.complete(tmp_path / "packed.zip")
