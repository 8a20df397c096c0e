"""Hashes by which the inspection finds pictures that look the same."""

import numpy as np
from PIL import Image

from tests.support.data_sets import natural_picture
from valora_data.validation.inspection import perceptual_hash


def test_different_pictures_do_not_look_the_same() -> None:
    hashes = [perceptual_hash(natural_picture(i)) for i in range(60)]
    kept = np.array([h for h in hashes if h is not None])
    apart = np.bitwise_count(kept[:, None] ^ kept[None])
    assert (apart[~np.eye(len(kept), dtype=bool)] <= 6).mean() < 0.01
    assert perceptual_hash(Image.new("RGB", (50, 50), "white")) is None
