"""Generic scenes: things where their boxes say, in new combinations only where they are asked."""

import numpy as np
import pytest

from tests.bench.base_models.albums import draw_album
from tests.bench.base_models.questions import ask_about_album
from tests.bench.base_models.scenes import (
    MAX_THINGS,
    compose,
    draw_scene,
    draw_sprite,
    is_reserved,
    longer_side,
    moved,
)  # fmt: skip
from tests.bench.base_models.shapes import SHAPES
from valora_data.sources.generic.scenes import COLORS, PATTERNS, SIZE


def test_scenes_hold_a_few_things_inside_the_image():
    scenes = [draw_scene(seed) for seed in range(60)]
    for scene in scenes:
        assert (scene.pixels.shape, scene.pixels.dtype) == ((SIZE, SIZE, 3), np.uint8)
        assert 1 <= len(scene.things) <= MAX_THINGS
        for thing in scene.things:
            assert 0 <= min(thing.box) < max(thing.box) <= SIZE
            assert 9 <= longer_side(thing) <= 70
            assert not is_reserved(thing.shape, thing.color)
    assert np.array_equal(draw_scene(7).pixels, scenes[7].pixels)
    first = [draw_scene(seed, novel=True).things[0] for seed in range(10)]
    assert all(is_reserved(thing.shape, thing.color) for thing in first)
    pairs = [is_reserved(shape, color) for shape in SHAPES for color in COLORS]
    assert 0.02 < np.mean(pairs) < 0.08


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_box_is_where_the_thing_changes_the_picture(pattern):
    rng = np.random.default_rng(1)
    empty = np.full((SIZE, SIZE, 3), 0.5, dtype=np.float32)
    for shape in list(SHAPES)[:: 3 if pattern == "plain" else 9]:
        sprite = moved(draw_sprite(shape, "yellow", pattern, 40.0, rng), 20, 20)
        # Yellow on grey is set off by no halo, and a dark shadow never is lighter than the ground.
        image = compose(empty, [sprite], rng)
        x0, y0, x1, y1 = (int(edge) for edge in sprite.thing.box)
        seen = np.abs(image - empty).max(-1) > 0.02
        assert seen[y0:y1, x0:x1].any(1).mean() > 0.85
        seen[max(y0 - 3, 0) : y1 + 3, max(x0 - 3, 0) : x1 + 3] = False
        assert not seen.any(), shape


def test_an_album_is_asked_about_things_that_it_shows_once():
    scenes, facts = draw_album(20_000_000, 8)
    assert len(scenes) == 8
    things = [thing for scene in scenes for thing in scene.things]
    asked = ask_about_album(np.random.default_rng(6), facts, 6)
    assert len(asked) == min(6, len(facts)) and len({question for _, question in asked}) > 1
    for fact, question in asked:
        named = [thing for thing in things if f" {thing.shape} " in question.replace("?", " ")]
        assert len(named) == 1 and named[0] in scenes[fact.image].things
        assert fact.value == getattr(named[0], fact.attribute) and fact.box == named[0].box
    assert len(ask_about_album(np.random.default_rng(6), facts, 10_000)) == len(facts)
    for fact in facts:
        assert fact.question(-1).startswith(f"what {fact.attribute}")
        assert sum(thing.shape == fact.shape for thing in things) == 1
