"""Augmented views against pixels: where a box is, the image shows what was in it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from valora_data.schema import Answer, Box, Sample, Task
from valora_train.settings import AugmentSettings
from valora_train.tasks.augment import Augmenter
from valora_train.tasks.registry import TASK_TYPES

WIDTH, HEIGHT = 240, 160


def with_rectangle(box):
    """A black image with a white rectangle, and its box."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)] = 255
    return Sample("a", Image.fromarray(pixels), Answer((box,)))


def bounds(image):
    """Edges of what is white in an image, to a fraction of a pixel."""
    white = np.asarray(image)[..., 0] / 255
    rows, columns = np.nonzero(white > 0.5)
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"crop": 0.5}, {"zoom_out": 0.5, "stretch": 0.4}, {"rotate": 12.0},
        {"crop": 0.3, "rotate": 8.0, "shift": 0.1},
    ],
)  # fmt: skip
def test_a_box_is_where_the_pixels_are(changes):
    settings = AugmentSettings(1, least_visible=0.0, **changes)
    rng = np.random.default_rng(3)
    inside = 0
    for number in range(40):
        x, y = rng.integers(20, 120), rng.integers(20, 80)
        box = Box(x, y, x + rng.integers(30, 80), y + rng.integers(30, 60), "cat", 0.75)
        sample = replace(with_rectangle(box), id=str(number))
        view = Augmenter(settings, True, 0)(sample, 1)
        assert view.image.size == (WIDTH, HEIGHT)
        if not view.answer.boxes:
            continue
        (moved,) = view.answer.boxes
        assert (moved.label, moved.confidence) == ("cat", 0.75)
        assert moved.x0 >= 0 and moved.y0 >= 0 and moved.x1 <= WIDTH and moved.y1 <= HEIGHT
        whole = moved.x0 > 0 and moved.y0 > 0 and moved.x1 < WIDTH and moved.y1 < HEIGHT
        if whole or not settings.rotate:  # a rotated corner outside leaves the box loose
            assert np.abs(np.subtract(bounds(view.image), moved.xyxy)).max() <= 2.5
            inside += 1
    assert inside >= 15


def test_boxes_are_dropped_by_the_share_that_is_left():
    columns, rows = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    pixels = np.stack([columns, rows, 0 * rows], axis=2).astype(np.uint8)
    box, kept = Box(10, 10, 110, 90, "cat"), []
    augmenter = Augmenter(AugmentSettings(1, crop=0.7, least_visible=0.6), True, 5)
    for number in range(60):
        view = augmenter(Sample(str(number), Image.fromarray(pixels), Answer((box,))), 0)
        # Red and green say which part of the image is left.
        left = np.asarray(view.image).astype(float)
        x0, x1 = left[:, 0, 0].mean(), left[:, -1, 0].mean() + 1
        y0, y1 = left[0, :, 1].mean(), left[-1, :, 1].mean() + 1
        wide = max(0.0, min(box.x1, x1) - max(box.x0, x0))
        high = max(0.0, min(box.y1, y1) - max(box.y0, y0))
        share = wide * high / box.area
        if abs(share - 0.6) > 0.05:
            assert bool(view.answer.boxes) == (share > 0.6)
            kept.append(share > 0.6)
    assert 5 <= sum(kept) <= len(kept) - 5


def photograph():
    small = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    return Image.fromarray(small).resize((WIDTH, HEIGHT))


EVERYTHING = AugmentSettings(1, 0.4, 0.3, 8.0, 0.1, 1.0, 0.03, 0.5)


def test_a_view_depends_on_seed_sample_and_number_alone():
    sample = Sample("a", photograph(), Answer((Box(10, 10, 90, 90, "x"),)))

    def pixels(seed=0, view=0, name="a", threads=1):
        before, state = torch.get_num_threads(), torch.get_rng_state()
        torch.set_num_threads(threads)
        found = Augmenter(EVERYTHING, True, seed)(replace(sample, id=name), view)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == threads
        torch.set_num_threads(before)
        return found.image.tobytes(), found.answer

    first = pixels()
    torch.rand(3)
    assert first[0] not in [pixels(seed=1)[0], pixels(view=1)[0], pixels(name="b")[0]]
    assert pixels() == first == pixels(threads=2)
    # All frames change alike.
    settings = replace(EVERYTHING, noise=0.0)  # noise differs from frame to frame, as a camera's
    frame = photograph()
    view = Augmenter(settings, True, 0)(Sample("a", frame, Answer(), None, (frame, frame)), 0)
    assert len({image.tobytes() for image in view.images}) == 1
    assert (len(view.images), view.image == frame) == (3, False)


def test_only_colours_change_where_places_are_words_or_counts():
    geometric = {str(task) for task in Task.all() if TASK_TYPES[task].geometric}
    assert geometric >= {"detection", "classification", "video"}
    assert not geometric & {"counting", "vqa", "caption", "grounding"}
    box = Box(40, 40, 100, 90, "cat")
    sample = with_rectangle(box)
    view = Augmenter(replace(EVERYTHING, blur=0.0, noise=0.0), False, 0)(sample, 0)
    assert view.answer == sample.answer
    assert np.abs(np.subtract(bounds(view.image), box.xyxy)).max() <= 1
    assert view.image.tobytes() != sample.image.tobytes()
    still = Augmenter(AugmentSettings(1, crop=0.5), False, 0)(sample, 0)
    assert still.image.tobytes() == sample.image.tobytes()
    # Hues stay.
    red = Sample("a", Image.new("RGB", (32, 32), (200, 40, 40)), Answer())
    for view in range(10):
        found = Augmenter(AugmentSettings(1, color=0.5), False, 0)(red, view)
        pixel = found.image.convert("HSV").getpixel((5, 5))
        assert min(pixel[0], 255 - pixel[0]) <= 4 or pixel[1] < 10
