"""Shards that a stage wrote, as a source."""

from pathlib import Path

import pytest

from tests.support.data_sets import picture
from valora_data import shards
from valora_data.errors import DataError
from valora_data.schema import Answer, Sample, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import open_source


def test_a_folder_of_shards_is_a_source(tmp_path: Path) -> None:
    """What a stage wrote can be given to another project."""
    image = picture(tmp_path / "a.png", 0)
    sample = Sample("a", image, Answer(label="dog"), None)
    for split in ("train", "test"):
        shards.write([sample], ("cat", "dog"), tmp_path / "data" / split)
    splits = open_source(Source("shards", Task.CLASSIFICATION, path=str(tmp_path / "data")))
    assert set(splits) == {Split.TRAIN, Split.TEST}
    splits |= open_source(Source("shards", Task.VQA, path=str(tmp_path / "data" / "train")))
    for stream in splits.values():
        (found,) = stream()
        assert (found.id, found.answer.label) == ("a", "dog")
        assert found.image.tobytes() == image.tobytes()
    with pytest.raises(DataError, match="holds no shards"):
        open_source(Source("shards", Task.VQA, path=str(tmp_path)))
