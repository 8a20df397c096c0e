"""Handwritten digits: the real images that lie inside the scikit-learn wheel (UCI Optdigits)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from valora_data.errors import DataError
from valora_data.schema import Answer, Sample, Split
from valora_data.sources.scenes.drawing import Layer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

LABELS = tuple("0123456789")
SIZE = 96
SHARES = {Split.TRAIN: 0.4, Split.UNLABELLED: 0.25, Split.VAL: 0.15, Split.TEST: 0.2}
"""What of the 1,797 images each split may show."""


def digit_samples(split: Split, count: int, seed: int = 0) -> Iterator[Sample]:
    """The first `count` digits of a split, in a random order that `seed` decides.

    Args:
        split: Which part of the images, which is the same for every seed.
        count: Number of digits; the splits hold 719, 449, 270 and 359.
        seed: Decides the order.

    Yields:
        Grey strokes on black, 96 × 96 pixels, of one of `LABELS`.

    Raises:
        DataError: If the split holds fewer.
    """
    pixels, digits = _digits()
    places = _places(split)
    if count > len(places):
        raise DataError(
            f"split {split} of the digits holds {len(places)} images, fewer than {count}: lower "
            f"source.counts.{split}"
        )
    for place in np.random.default_rng(seed).permutation(places)[:count]:
        image = Image.fromarray(pixels[place]).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        answer = Answer(label=LABELS[digits[place]])
        yield Sample(f"digits/{place:04d}", image.convert("RGB"), answer)


def digit_layer(
    rng: np.random.Generator, split: Split, length: float, colour: tuple[int, int, int]
) -> tuple[Layer, str]:
    """A digit of a split as a thing to put on a picture."""
    pixels, digits = _digits()
    places = _places(split)
    place = int(places[int(rng.integers(len(places)))])
    side = max(8, round(length))
    ink = Image.fromarray(pixels[place]).resize((side, side), Image.Resampling.BICUBIC)
    cover = np.asarray(ink, dtype=np.float32)[..., None] / 255
    sheet = np.broadcast_to(np.array(colour, dtype=np.float32), (side, side, 3))
    return Layer(np.concatenate([sheet, cover], axis=-1)), LABELS[digits[place]]


@cache
def _places(split: Split) -> npt.NDArray[np.int64]:
    """Indices of a split: a fixed random part of all."""
    total = len(_digits()[1])
    order = np.random.default_rng(1797).permutation(total)
    ends = np.round(np.cumsum(list(SHARES.values())) * total).astype(int)
    part = list(SHARES).index(split)
    return np.sort(order[ends[part - 1] if part else 0 : ends[part]])


@cache
def _digits() -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Images, (1797, 8, 8), and digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the digits lie in scikit-learn, which is not installed: run pip install "
            "'valora[train]'"
        ) from error
    digits = load_digits()
    pixels = np.clip(np.round(digits.images * 255 / 16), 0, 255).astype(np.uint8)
    return pixels, [int(digit) for digit in digits.target]
