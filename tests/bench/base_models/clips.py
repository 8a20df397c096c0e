"""Scenes of the base model alone: clips, and the words that it must never have seen."""

import re

import numpy as np

from tests.bench.base_models.scenes import (
    Scene,
    compose,
    draw_background,
    draw_clutter,
    draw_sprite,
    draw_sprites,
    finish,
    is_reserved,
    moved,
)
from tests.bench.base_models.shapes import SHAPES
from valora_data.sources.generic.scenes import COLORS, SIZE

DOMAIN_WORDS = frozenset(
    re.findall(
        "[a-z]+",
        """license licence plate plates number traffic sign signs vehicle vehicles car cars truck
        trucks bus buses van vans vegetation tree trees plant plants leaf leaves grass bush bushes
        flower flowers forest bicycle bicycles bike bikes cycle wheel wheels person persons people
        man men woman women child children human humans pedestrian pedestrians rider face street
        road""",
    )
)
"""Words of the built-in detection domains, which the base model must never have seen."""


def domain_words_in(text: str) -> frozenset[str]:
    """Words of `text` that belong to the built-in detection domains."""
    return DOMAIN_WORDS & set(re.findall(r"[a-z]+", text.lower()))


def draw_clip(seed: int, frames: int) -> tuple[tuple[Scene, ...], str, str]:
    """Draws frames in which one thing moves and the others stand still.

    Args:
        seed: Any non-negative integer.
        frames: Number of frames, 2 or more.

    Returns:
        The frames in order, the moving thing's shape (the only one of its kind) and the direction:
        left, right, up, down.
    """
    rng = np.random.default_rng(seed)
    background = draw_clutter(draw_background(rng), rng)
    way, dx, dy = [("left", -1, 0), ("right", 1, 0), ("up", 0, -1), ("down", 0, 1)][
        int(rng.integers(4))
    ]
    shape, color = str(rng.choice(list(SHAPES))), str(rng.choice(list(COLORS)))
    while is_reserved(shape, color):
        color = str(rng.choice(list(COLORS)))
    mover = draw_sprite(shape, color, "plain", float(rng.uniform(14, 30)), rng)
    w, h = (int(n) for n in (mover.thing.box[2] - mover.thing.box[0],
                             mover.thing.box[3] - mover.thing.box[1]))  # fmt: skip
    path = int(rng.integers(20, 46))
    start_x = int(rng.integers(path, SIZE - w)) if dx < 0 else int(
        rng.integers(0, SIZE - w - path * dx + 1))  # fmt: skip
    start_y = int(rng.integers(path, SIZE - h)) if dy < 0 else int(
        rng.integers(0, SIZE - h - path * dy + 1))  # fmt: skip
    mover = moved(mover, start_x - int(mover.thing.box[0]), start_y - int(mover.thing.box[1]))
    others = [s for s in draw_sprites(rng, 3) if s.thing.shape != shape]
    state = rng.bit_generator.state
    scenes = []
    for i in range(frames):
        rng.bit_generator.state = state  # one camera: the same shadow, light and blur
        step = round(path * i / (frames - 1))
        sprites = [*others, moved(mover, dx * step, dy * step)]
        pixels = finish(compose(background, sprites, rng), rng)
        scenes.append(Scene(pixels, tuple(sprite.thing for sprite in sprites)))
    return tuple(scenes), shape, way
