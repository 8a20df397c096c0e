"""Generic scenes: things where their boxes say, in colours that people call so."""

import numpy as np
import pytest

from valora_data.sources.generic.scenes import (
    COLORS,
    MAX_THINGS,
    PATTERNS,
    SIZE,
    color_of,
    compose,
    draw_scene,
    draw_sprite,
    is_reserved,
)
from valora_data.sources.generic.shapes import SHAPES

SCENES = [draw_scene(seed) for seed in range(120)]


def test_a_scene_is_a_function_of_its_seed():
    again = draw_scene(7)
    assert np.array_equal(again.pixels, SCENES[7].pixels)
    assert again.things == SCENES[7].things
    assert not np.array_equal(draw_scene(8).pixels, again.pixels)


def test_scenes_hold_a_few_things_inside_the_image():
    for scene in SCENES:
        assert (scene.pixels.shape, scene.pixels.dtype) == ((SIZE, SIZE, 3), np.uint8)
        assert 1 <= len(scene.things) <= MAX_THINGS
        for thing in scene.things:
            assert min(thing.box[:2]) >= 0
            assert max(thing.box[2:]) <= SIZE
            assert 9 <= thing.length <= 70


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_box_is_where_the_thing_changes_the_picture(pattern):
    rng = np.random.default_rng(1)
    empty = np.full((SIZE, SIZE, 3), 0.5, dtype=np.float32)
    for shape in list(SHAPES)[:: 3 if pattern == "plain" else 9]:
        sprite = draw_sprite(shape, "yellow", pattern, 40.0, rng).moved(20, 20)
        # Yellow on grey is set off by no halo, and a dark shadow never is lighter than the ground.
        image = compose(empty, [sprite], rng)
        changed = sprite.alpha > 0.4
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        left, top = sprite.corner
        drawn = (left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1)
        assert sprite.thing.box == drawn
        seen = np.abs(image - empty).max(-1) > 0.02
        x0, y0, x1, y1 = (int(edge) for edge in sprite.thing.box)
        assert seen[y0:y1, x0:x1].any(1).mean() > 0.85
        seen[max(y0 - 3, 0) : y1 + 3, max(x0 - 3, 0) : x1 + 3] = False
        assert not seen.any(), shape


def test_colors_look_like_their_names():
    rng = np.random.default_rng(0)
    for _ in range(50):
        (red, *rest), (*others, blue) = color_of("red", rng), color_of("blue", rng)
        assert red > 2 * max(rest)
        assert blue > 1.2 * max(others)
        *bright, dark = color_of("yellow", rng)
        assert min(bright) > 2 * dark
        assert color_of("black", rng).max() < 0.2 < 0.85 < color_of("white", rng).min()


def test_reserved_combinations_occur_in_novel_scenes_only():
    pairs = [is_reserved(shape, color) for shape in SHAPES for color in COLORS]
    assert 0.02 < np.mean(pairs) < 0.08
    assert not any(is_reserved(t.shape, t.color) for scene in SCENES for t in scene.things)
    first = [draw_scene(seed, novel=True).things[0] for seed in range(10)]
    assert all(is_reserved(thing.shape, thing.color) for thing in first)
