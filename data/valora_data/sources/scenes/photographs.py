"""Backgrounds: crops of photographs that lie inside the scikit-image and scikit-learn wheels.

Nothing is downloaded. Photographs, or parts of them, that show something the built-in domains look
for (a person, a motorcycle, trees, lettering) are left out, so that what is drawn on a background
is all there is to find.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from valora_data.errors import DataError
from valora_data.schema import Split

if TYPE_CHECKING:
    import numpy.typing as npt

MIN_SIDE = 60
"""Shortest side of a crop in pixels of its photograph: smaller ones are mush when enlarged."""


class Photograph(NamedTuple):
    """A bundled photograph: its package, file, and the part (x0, y0, x1, y1) that is shown."""

    package: str
    file: str
    area: tuple[int, int, int, int]


PHOTOGRAPHS = (
    Photograph("skimage", "data/brick.png", (0, 0, 512, 512)),
    Photograph("skimage", "data/gravel.png", (0, 0, 512, 512)),
    Photograph("skimage", "data/grass.png", (0, 0, 512, 512)),
    Photograph("skimage", "data/moon.png", (0, 0, 512, 512)),
    Photograph("skimage", "data/coins.png", (0, 0, 384, 303)),
    Photograph("skimage", "data/chelsea.png", (0, 0, 451, 300)),
    Photograph("skimage", "data/coffee.png", (0, 0, 600, 400)),
    Photograph("skimage", "data/ihc.png", (0, 0, 512, 512)),
    Photograph("skimage", "data/hubble_deep_field.jpg", (0, 0, 1000, 872)),
    Photograph("skimage", "data/rocket.jpg", (0, 0, 640, 427)),
    # Above the motorcycle: a garage with shelves.
    Photograph("skimage", "data/motorcycle_left.png", (0, 0, 740, 135)),
    # Between and above the trees: a pagoda and a lake.
    Photograph("sklearn", "datasets/images/china.jpg", (80, 0, 544, 265)),
)


def region_of(photograph: int, split: Split) -> tuple[int, int, int, int]:
    """Part of a photograph that one split alone may show: a vertical strip of its area.

    The order of the strips rotates from photograph to photograph, so that no split always gets the
    left side.
    """
    x0, y0, x1, y1 = PHOTOGRAPHS[photograph].area
    splits = list(Split)
    strip = (splits.index(split) + photograph) % len(splits)
    width = (x1 - x0) // len(splits)
    return (x0 + strip * width, y0, x0 + (strip + 1) * width, y1)


def photograph_crop(
    rng: np.random.Generator, split: Split, size: int = 96, photograph: int | None = None
) -> npt.NDArray[np.uint8]:
    """A random crop: place, scale, flips, brightness, contrast and tint vary.

    Args:
        rng: Source of all randomness.
        split: Whose regions to crop from.
        size: Side of the result in pixels.
        photograph: Index into `PHOTOGRAPHS`; any if None.

    Returns:
        RGB pixels, (size, size, 3).

    Raises:
        DataError: If the photographs are not installed.
    """
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
    result: npt.NDArray[np.uint8] = np.clip(pixels, 0, 255).astype(np.uint8)
    return result


@cache
def _pixels(photograph: int) -> Image.Image:
    source = PHOTOGRAPHS[photograph]
    spec = find_spec(source.package)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    for location in locations:
        path = Path(location) / source.file
        if path.is_file():
            with Image.open(path) as image:
                return image.convert("RGB")
    raise DataError(
        f"photograph {source.file} of {source.package} is not installed: "
        "run pip install 'valora[train]'"
    )
