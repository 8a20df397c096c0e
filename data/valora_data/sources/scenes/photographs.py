"""Real images inside the scikit-image and scikit-learn wheels, without what domains look for."""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from valora_data.errors import DataError
from valora_data.schema import Answer, Sample, Split
from valora_data.sources.generic.scenes import SIZE, Pixels, Rng

MIN_SIDE = 60
"""Shortest side of a crop in pixels of its photograph: smaller ones are mush when enlarged."""
DIGITS = tuple("0123456789")
SHARES = {Split.TRAIN: 0.4, Split.UNLABELLED: 0.25, Split.VAL: 0.15, Split.TEST: 0.2}
"""What of the 1,797 digits each split may show."""
PHOTOGRAPHS = {  # package and file, and the part (x0, y0, x1, y1) that is shown
    "skimage/data/brick.png": (0, 0, 512, 512),
    "skimage/data/gravel.png": (0, 0, 512, 512),
    "skimage/data/grass.png": (0, 0, 512, 512),
    "skimage/data/moon.png": (0, 0, 512, 512),
    "skimage/data/coins.png": (0, 0, 384, 303),
    "skimage/data/chelsea.png": (0, 0, 451, 300),
    "skimage/data/coffee.png": (0, 0, 600, 400),
    "skimage/data/ihc.png": (0, 0, 512, 512),
    "skimage/data/hubble_deep_field.jpg": (0, 0, 1000, 872),
    "skimage/data/rocket.jpg": (0, 0, 640, 427),
    # Above the motorcycle: a garage with shelves.
    "skimage/data/motorcycle_left.png": (0, 0, 740, 135),
    # Between and above the trees: a pagoda and a lake.
    "sklearn/datasets/images/china.jpg": (80, 0, 544, 265),
}


def region_of(photograph: int, split: Split) -> tuple[int, int, int, int]:
    x0, y0, x1, y1 = list(PHOTOGRAPHS.values())[photograph]
    splits = list(Split)
    strip = (splits.index(split) + photograph) % len(splits)
    width = (x1 - x0) // len(splits)
    return (x0 + strip * width, y0, x0 + (strip + 1) * width, y1)


def photograph_crop(
    rng: Rng, split: Split, size: int = SIZE, photograph: int | None = None
) -> Pixels:
    """A random crop of one of `PHOTOGRAPHS`, by its number, or of any: RGB, (size, size, 3)."""
    if photograph is None:
        photograph = int(rng.integers(len(PHOTOGRAPHS)))
    x0, y0, x1, y1 = region_of(photograph, split)
    side = int(rng.integers(MIN_SIDE, min(x1 - x0, y1 - y0) + 1))
    left, top = int(rng.integers(x0, x1 - side + 1)), int(rng.integers(y0, y1 - side + 1))
    # Cropped first: resizing a box of an image blends in pixels from around the box.
    crop = _pixels(photograph).crop((left, top, left + side, top + side))
    crop = crop.resize((size, size), Image.Resampling.BILINEAR)
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.2:
        crop = crop.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    pixels = np.asarray(crop, dtype=np.float32)
    mean = pixels.mean()
    pixels = mean + (pixels - mean) * rng.uniform(0.4, 1.0)  # backgrounds are quieter than objects
    # Lift very dark and dim very bright crops towards the middle: objects must stay visible.
    pixels += (rng.uniform(70, 180) - mean) * rng.uniform(0.3, 0.9)
    pixels *= 1 + rng.uniform(-0.12, 0.12, size=3).astype(np.float32)
    result: Pixels = np.clip(pixels, 0, 255).astype(np.uint8)
    return result


@cache
def _pixels(photograph: int) -> Image.Image:
    package, _, file = list(PHOTOGRAPHS)[photograph].partition("/")
    spec = find_spec(package)
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location) / file
        if path.is_file():
            with Image.open(path) as image:
                return image.convert("RGB")
    text = f"photograph {file} of {package} is not installed: run pip install 'valora[train]'"
    raise DataError(text)


def digit_samples(split: Split, count: int, seed: int = 0) -> Iterator[Sample]:
    """The first `count` digits of a split, in an order that `seed` decides: grey on black."""
    numbers = _numbers(split)
    if count > len(numbers):
        text = f"split {split} of the digits holds {len(numbers)} images, fewer than {count}"
        raise DataError(f"{text}: lower source.counts.{split}")
    pixels, digits = _digits()
    for number in np.random.default_rng(seed).permutation(numbers)[:count]:
        image = Image.fromarray(pixels[number]).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        answer = Answer(label=DIGITS[digits[number]])
        yield Sample(f"digits/{number:04d}", image.convert("RGB"), answer)


@cache
def _numbers(split: Split) -> npt.NDArray[np.int64]:
    total = len(_digits()[1])
    order = np.random.default_rng(1797).permutation(total)
    ends = np.round(np.cumsum([0.0, *SHARES.values()]) * total).astype(int)
    part = list(SHARES).index(split)
    return np.sort(order[ends[part] : ends[part + 1]])


@cache
def _digits() -> tuple[Pixels, list[int]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.clip(np.round(digits.images * 255 / 16), 0, 255).astype(np.uint8)
    return pixels, [int(digit) for digit in digits.target]
