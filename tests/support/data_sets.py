"""Small data sets on disk (pictures, videos, metadata and JSON files), and a check for leaks."""

import json
from fractions import Fraction
from functools import cache

import numpy as np
from PIL import Image

from valora_data.duplicates import Duplicates
from valora_data.prepare import check_leaks
from valora_data.schema import Split, Task
from valora_data.sources.scenes.builtin import builtin_samples


def noise(seed, size=(12, 8)):
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def picture(path, seed, size=(12, 8)):
    """A picture of noise, written to a file."""
    image = noise(seed, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return image


def natural_picture(seed):
    """A drawn scene with a vehicle, which no other seed gives."""
    return _drawn(seed).copy()


@cache
def _drawn(seed):
    (sample,) = builtin_samples(Task.CLASSIFICATION, "vehicle_type", Split.TRAIN, 1, seed)
    return sample.image


def check_no_leak(splits):
    """Raise a `DataError` if an id or an image occurs in two splits."""
    duplicates = Duplicates(near=False)
    for split, samples in splits.items():
        for sample in samples:
            duplicates.add(split, sample)
    check_leaks([pair for pair in duplicates.pairs() if pair.leaks])


def metadata(folder, *rows):
    """A `metadata.jsonl` with some rows."""
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metadata.jsonl").write_text(text, encoding="utf-8")


def write_json(path, content):
    """A JSON file."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_video(path, levels, size=(32, 16)):
    """A video whose frames are grey, each of its own level, with a bright left edge."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(10))
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        for level in levels:
            pixels = np.full((size[1], size[0], 3), level, np.uint8)
            pixels[:, : size[0] // 4] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path
