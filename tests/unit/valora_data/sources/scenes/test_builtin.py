"""Built-in domains of every task: as they ever were, apart by split, and true."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.support.data_sets import check_no_leak
from valora_data.errors import DataError
from valora_data.schema import Split, Task
from valora_data.sources.scenes import photographs
from valora_data.sources.scenes.builtin import SCENES, builtin_samples
from valora_data.sources.scenes.photographs import photograph_crop

DRAWN = Path(__file__).parents[4] / "fixtures" / "drawn.npz"  # written by `drawn`
DOMAINS = [(task, name) for task in Task.all() for name in SCENES.get(task, ())]


def samples(task, name, split=Split.TRAIN, count=24, seed=0):
    return list(builtin_samples(task, name, split, count, seed))


def drawn(task, name, seed=0):
    """Eight samples: small copies of their images, and a hash of what is asked and answered."""
    some = [s for part in (Split.TRAIN, Split.TEST) for s in samples(task, name, part, 4, seed)]
    images = [s.images[-1].resize((8, 8), Image.Resampling.BOX) for s in some]
    told = repr([(s.id, s.prompt, s.answer) for s in some])
    return np.stack([np.asarray(image) for image in images]), sha256(told.encode()).hexdigest()


@pytest.mark.parametrize(("task", "name"), DOMAINS)
def test_samples_are_those_of_earlier_versions(task, name):
    """But for a level of rounding, as other versions of libjpeg decode what a camera wrote."""
    with np.load(DRAWN) as before:
        pixels, told = before[f"{task}/{name}"], str(before[f"{task}/{name}/told"])
    found, said = drawn(task, name)
    assert np.abs(found.astype(int) - pixels).max() <= 1
    assert said == told
    other = samples(task, name, Split.TRAIN, 4, seed=1)
    assert [s.image for s in other] != [s.image for s in samples(task, name, Split.TRAIN, 4)]
    # No split shows what another one does.
    check_no_leak({split: samples(task, name, split, 6) for split in Split})


def test_the_digits_are_those_of_scikit_learn():
    real = load_digits()
    counts = {Split.TRAIN: 719, Split.UNLABELLED: 449, Split.VAL: 270, Split.TEST: 359}
    for split, count in counts.items():
        found = samples(Task.CLASSIFICATION, "digits", split, count)
        assert len({s.id for s in found}) == count
        for sample in found[:40]:
            place = int(sample.id.split("/")[1])
            assert sample.answer.label == str(real.target[place])
            small = np.asarray(sample.image.convert("L").resize((8, 8)), dtype=float)
            assert np.corrcoef(small.ravel(), real.images[place].ravel())[0, 1] > 0.97
        with pytest.raises(DataError, match=rf"holds {count} images, fewer than {count + 1}"):
            samples(Task.CLASSIFICATION, "digits", split, count + 1)


def test_unknown_domains_are_named():
    with pytest.raises(DataError, match="unknown built-in domain 'fox' of task video: choose from"):
        samples(Task.VIDEO, "fox")


@pytest.mark.parametrize("package", ["skimage", "a_package_that_is_not_installed"])
def test_missing_photograph_names_the_remedy(package, monkeypatch):
    missing = {f"{package}/data/no_such_photograph.png": (0, 0, 400, 400)}
    monkeypatch.setattr(photographs, "PHOTOGRAPHS", missing)
    photographs._pixels.cache_clear()
    with pytest.raises(DataError, match=r"no_such_photograph\.png .*'valora\[train\]'"):
        photograph_crop(np.random.default_rng(0), Split.TRAIN)
    photographs._pixels.cache_clear()
