"""Backgrounds: every split has its own part of every photograph."""

import numpy as np
import pytest

from valora_data.errors import DataError
from valora_data.schema import Split
from valora_data.sources.scenes import photographs
from valora_data.sources.scenes.photographs import PHOTOGRAPHS, photograph_crop, region_of


def test_crops_stay_inside_their_region(monkeypatch):
    """Each region painted in one grey level: a crop of a split shows its level alone."""
    levels = {split: 40 + 50 * place for place, split in enumerate(Split)}
    painted = {}
    for photograph in range(len(PHOTOGRAPHS)):
        image = photographs._pixels(photograph).copy()
        for split in Split:
            level = levels[split]
            image.paste((level, level, level), region_of(photograph, split))
        painted[photograph] = image
    monkeypatch.setattr(photographs, "_pixels", painted.__getitem__)
    rng = np.random.default_rng(0)
    for split in Split:
        for _ in range(60):
            # A crop that reached into another region would show two levels.
            crop = photograph_crop(rng, split, 32).astype(int)
            assert np.ptp(crop, axis=(0, 1)).max() <= 1


@pytest.mark.parametrize("package", ["skimage", "a_package_that_is_not_installed"])
def test_missing_photograph_names_the_remedy(package, monkeypatch):
    missing = {f"{package}/data/no_such_photograph.png": (0, 0, 400, 400)}
    monkeypatch.setattr(photographs, "PHOTOGRAPHS", missing)
    photographs._pixels.cache_clear()
    with pytest.raises(DataError, match=r"no_such_photograph\.png .*'valora\[train\]'"):
        photograph_crop(np.random.default_rng(0), Split.TRAIN)
    photographs._pixels.cache_clear()
