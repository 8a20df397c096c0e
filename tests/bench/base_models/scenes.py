"""Varied generic scenes for pretraining the base model: things, textures, light and clutter.

A scene is a function of its seed alone. It is 96 pixels square, holds one to six named things of
about 15 to 60 pixels on a background with the statistics of photographs (multi-octave noise with
edges, tilings, gradients) among unnamed clutter, and is blurred, lit and grainy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from tests.bench.base_models.shapes import SHAPES
from valora_data.sources.generic import scenes as generic
from valora_data.sources.generic.scenes import (
    COLORS,
    OVERSAMPLING,
    PATTERNS,
    SIZE,
    Floats,
    Pixels,
    Rng,
    grainy,
    softened,
    windows,
)

TRAINING_SEEDS = 1_000_000_000
"""Scenes that the base model is trained on have this seed and larger ones; all else smaller."""
MAX_THINGS = 6  # named things in a scene
SMALLEST = 15.0  # shortest long side of a named thing in pixels: little more than a visual token
RESERVED_EVERY = 23
"""One in so many pairs of colour and shape is kept from training, to test new combinations."""


@dataclass(frozen=True, slots=True)
class Thing:
    """One named thing of a scene; its box is (x0, y0, x1, y1) in pixels."""

    shape: str
    color: str
    pattern: str
    box: tuple[float, float, float, float]

    @property
    def name(self) -> str:
        """Colour and shape, as questions name it."""
        return f"{self.color} {self.shape}"


@dataclass(frozen=True, slots=True)
class Sprite:
    """A thing: coverage (h, w) and colours (h, w, 3) in [0, 1], its corner at (x, y)."""

    thing: Thing
    alpha: Floats
    rgb: Floats
    corner: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Scene:
    """A drawn image, (96, 96, 3) RGB, and the things in it from back to front."""

    pixels: Pixels
    things: tuple[Thing, ...]


def is_reserved(shape: str, color: str) -> bool:
    """Whether this combination occurs only in scenes drawn with `novel`."""
    return (list(SHAPES).index(shape) + 5 * list(COLORS).index(color)) % RESERVED_EVERY == 0


def _field(rng: Rng, cells: int) -> Floats:
    """Smooth noise around 0 with about `cells` bumps across, (SIZE, SIZE)."""
    grid = Image.fromarray(rng.standard_normal((cells, cells)).astype(np.float32))
    return np.asarray(grid.resize((SIZE, SIZE), Image.Resampling.BICUBIC), dtype=np.float32)


def _ramp(rng: Rng) -> Floats:
    """A plane from about −1 to 1 in a random direction, (SIZE, SIZE)."""
    angle = rng.uniform(0, 2 * np.pi)
    at = np.linspace(-1, 1, SIZE, dtype=np.float32)
    return np.asarray(np.cos(angle) * at[None, :] + np.sin(angle) * at[:, None], dtype=np.float32)


def _octaves(rng: Rng) -> Floats:
    """Noise over several scales whose amplitude falls like a random power, (SIZE, SIZE)."""
    falloff, first = rng.uniform(0.4, 0.85), int(rng.integers(2, 7))
    octaves = [falloff**i * _field(rng, min(first * 2**i, SIZE)) for i in range(4)]
    return np.asarray(sum(octaves), dtype=np.float32)


def _tiling(rng: Rng) -> Floats:
    """Stripes, checks or bricks in perspective-free but warped coordinates, about −1 to 1."""
    angle = rng.uniform(0, np.pi)
    at = np.linspace(-1, 1, SIZE, dtype=np.float32)
    bend = _field(rng, 3) * rng.uniform(0, 0.12)
    u = np.cos(angle) * at[None, :] + np.sin(angle) * at[:, None] + bend
    v = np.cos(angle) * at[:, None] - np.sin(angle) * at[None, :] + bend
    period = rng.uniform(0.08, 0.5)
    kind = int(rng.integers(3))
    if kind == 0:
        return np.asarray(np.tanh(3 * np.sin(2 * np.pi * u / period)), dtype=np.float32)
    if kind == 1:
        checks = np.sin(2 * np.pi * u / period) * np.sin(2 * np.pi * v / period)
        return np.asarray(np.tanh(4 * checks), dtype=np.float32)
    row = np.floor(v / period)
    seam = np.minimum((v / period) % 1.0, ((u / period / 2 + row / 2) % 1.0) * 2)
    return np.asarray(np.where(seam < 0.15, -1.0, 0.4), dtype=np.float32)


def _surface(rng: Rng) -> Floats:
    """One textured surface, RGB around [0, 1], (SIZE, SIZE, 3)."""
    tone = rng.uniform(0.1, 0.9)
    base = np.clip(tone + rng.normal(0, 0.13, 3), 0.03, 0.97)
    swing = rng.normal(0, 0.06, 3) + rng.normal(0, 0.16)
    texture = _octaves(rng) * rng.uniform(0.1, 0.8)
    if rng.random() < 0.25:
        texture = texture + _tiling(rng) * rng.uniform(0.2, 1.0)
    return np.asarray(base + texture[:, :, None] * swing, dtype=np.float32)


def draw_background(rng: Rng) -> Floats:
    """Surfaces that meet at natural borders under one light, RGB in [0, 1], (SIZE, SIZE, 3)."""
    image = _surface(rng)
    for _ in range(int(rng.integers(0, 3))):
        border = _octaves(rng) * rng.uniform(0.1, 0.7) + _ramp(rng) * rng.uniform(0, 2.5)
        sharpness = np.exp(rng.uniform(0.5, 3.5))
        share = 1 / (1 + np.exp(-np.clip(sharpness * (border - rng.normal(0, 0.5)), -30, 30)))
        image += (_surface(rng) - image) * share[:, :, None]
    clipped: Floats = np.clip(image, 0.0, 1.0, dtype=np.float32)
    return clipped


def draw_clutter(image: Floats, rng: Rng) -> Floats:
    """Adds unnamed scraps, threads and blots, which resemble no thing."""
    canvas = Image.fromarray((image * 255).astype(np.uint8))
    pen = ImageDraw.Draw(canvas, "RGBA")
    for _ in range(int(rng.integers(0, 9))):
        x, y = rng.uniform(0, SIZE, 2)
        ink = (*(int(c) for c in rng.integers(0, 256, 3)), int(rng.integers(60, 230)))
        steps = rng.normal(0, np.exp(rng.uniform(0.7, 2.1)), (int(rng.integers(3, 7)), 2))
        points = [(float(x + a), float(y + b)) for a, b in steps]
        if rng.random() < 0.55:
            pen.polygon(points, fill=ink)
        else:
            pen.line(points, fill=ink, width=int(rng.integers(1, 3)))
    return np.asarray(canvas, dtype=np.float32) / 255.0


def plural(shape: str) -> str:
    """More than one of a shape."""
    if shape in ("glasses", "scissors", "dice"):
        return shape
    if shape.startswith("letter "):
        return shape.replace("letter", "letters")
    return generic.plural(shape)


def center(thing: Thing) -> tuple[float, float]:
    """Middle of a thing's box in pixels."""
    return (thing.box[0] + thing.box[2]) / 2, (thing.box[1] + thing.box[3]) / 2


def longer_side(thing: Thing) -> float:
    """Longer side of a thing's box in pixels."""
    return max(thing.box[2] - thing.box[0], thing.box[3] - thing.box[1])


def moved(sprite: Sprite, dx: int, dy: int) -> Sprite:
    """The same sprite, (dx, dy) pixels further right and down."""
    x0, y0, x1, y1 = sprite.thing.box
    thing = replace(sprite.thing, box=(x0 + dx, y0 + dy, x1 + dx, y1 + dy))
    return replace(sprite, thing=thing, corner=(sprite.corner[0] + dx, sprite.corner[1] + dy))


def _pattern(name: str, shape: tuple[int, int], rng: Rng) -> Floats:
    """Where the second tone of a pattern goes, in [0, 1], (h, w)."""
    y, x = np.mgrid[: shape[0], : shape[1]].astype(np.float32)
    angle = rng.uniform(0, np.pi)
    period = max(4.0, max(shape) * rng.uniform(0.18, 0.3))
    u = 2 * np.pi * (np.cos(angle) * x + np.sin(angle) * y) / period + rng.uniform(0, 6)
    v = 2 * np.pi * (np.cos(angle) * y - np.sin(angle) * x) / period + rng.uniform(0, 6)
    wave = {
        "striped": np.sin(u), "dotted": np.cos(u) + np.cos(v) - 0.9,
        "checked": 1.5 * np.sin(u) * np.sin(v),
    }[name]  # fmt: skip
    return np.asarray(np.clip(0.5 + 1.6 * wave, 0, 1), dtype=np.float32)


def _toned(
    pattern: str, rng: Rng, fill: Image.Image, rgb: Floats, length: float
) -> tuple[Image.Image, Floats, bool]:
    if pattern == "outlined":
        inner = fill.filter(ImageFilter.GaussianBlur(max(length * OVERSAMPLING * 0.055, 3.5)))
        ring = inner.point(lambda level: 255 if level > 225 else 0)
        return ImageChops.subtract(fill, ring), rgb, False
    main = rgb[0, 0]
    strong = rng.uniform(0.5, 0.75)
    dark = float(main.mean()) <= 0.35
    second = main + (1 - main) * strong * 0.7 if dark else main * (1 - strong)
    return fill, rgb + _pattern(pattern, rgb.shape[:2], rng)[:, :, None] * (second - main), True


def draw_sprite(shape: str, color: str, pattern: str, length: float, rng: Rng) -> Sprite:
    """Draws one specimen of a named thing in a pattern, see `generic.draw_sprite`."""
    tone = None if pattern == "plain" else partial(_toned, pattern, rng)
    cover, rgb = generic.draw_sprite(shape, color, length, rng, SHAPES[shape], tone)
    rows, columns = np.flatnonzero(cover.max(1) > 0.4), np.flatnonzero(cover.max(0) > 0.4)
    box = (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))
    return Sprite(Thing(shape, color, pattern, box), cover, rgb, (0, 0))


def _covered(a: Thing, b: Thing) -> float:
    """Share of the smaller of two things' boxes that lies in the other's."""
    w = min(a.box[2], b.box[2]) - max(a.box[0], b.box[0])
    h = min(a.box[3], b.box[3]) - max(a.box[1], b.box[1])
    areas = [(t.box[2] - t.box[0]) * (t.box[3] - t.box[1]) for t in (a, b)]
    return max(w, 0.0) * max(h, 0.0) / min(areas)


def place(sprite: Sprite, others: list[Sprite], rng: Rng) -> Sprite | None:
    """Moves a sprite to a random place where it hides little; None if none is found."""
    x0, y0, x1, y1 = (int(edge) for edge in sprite.thing.box)
    if x1 - x0 > SIZE or y1 - y0 > SIZE:
        return None
    allowed = 0.25 if rng.random() < 0.4 else 0.03
    for _ in range(12):
        dx, dy = rng.integers(-x0, SIZE - x1 + 1), rng.integers(-y0, SIZE - y1 + 1)
        there = moved(sprite, int(dx), int(dy))
        if all(_covered(there.thing, other.thing) <= allowed for other in others):
            return there
    return None


def compose(background: Floats, sprites: list[Sprite], rng: Rng) -> Floats:
    """Puts sprites on a copy of a background from back to front, with borders where they vanish."""
    image = background.copy()
    shadow = rng.uniform(0, 0.5) if rng.random() < 0.4 else 0.0
    for sprite in sprites:
        window, inside = windows(sprite.alpha.shape, *sprite.corner)
        under, alpha, rgb = image[window], sprite.alpha[inside][:, :, None], sprite.rgb[inside]
        ink = (rgb * alpha).sum((0, 1)) / alpha.sum()
        if np.abs(ink - under.mean((0, 1))).sum() < 0.45:
            # Nobody could tell it from what is behind: a halo sets it off.
            halo = softened(alpha[:, :, 0], 1.5)[:, :, None]
            tone = 0.0 if ink.mean() > 0.45 else 1.0
            under = under + np.clip(2.0 * halo, 0, 1) * (tone - under)
        elif shadow:
            under = under * (1 - shadow * np.roll(alpha, (1, 1), (0, 1)))
        image[window] = under + alpha * (rgb - under)
    return image


def finish(image: Floats, rng: Rng) -> Pixels:
    """Light, blur and grain of a camera; colours keep their names."""
    light = rng.uniform(0.8, 1.12) * (1 + _ramp(rng) * rng.uniform(0, 0.14))
    tint = rng.normal(1.0, 0.02, 3)
    image = np.clip(image * light[:, :, None] * tint, 0, 1)
    return grainy((image * 255).astype(np.uint8), rng, 0.9, 9)


def draw_sprites(rng: Rng, most: int = MAX_THINGS, *, novel: bool = False) -> list[Sprite]:
    """One to `most` things of few kinds, so that counting and confusing them is possible.

    With `novel` the first one, if it finds a place, is a reserved combination.
    """
    wanted = int(rng.integers(1, most + 1))
    kinds = [str(k) for k in rng.choice(list(SHAPES), max(1, int(rng.integers(1, 6))))]
    tones = [str(c) for c in rng.choice(list(COLORS), int(rng.integers(2, 6)))]
    largest = 62.0 if wanted <= 2 else 46.0 if wanted <= 4 else 34.0
    sprites: list[Sprite] = []
    for i in range(wanted):
        length = float(np.exp(rng.uniform(np.log(SMALLEST), np.log(largest))))
        pattern = "plain" if rng.random() < 0.6 else str(rng.choice(PATTERNS))
        if length < 18:
            pattern = "plain"  # a pattern of two pixels is none
        shape, color = str(rng.choice(kinds)), str(rng.choice(tones))
        while is_reserved(shape, color) != (novel and i == 0):
            color = str(rng.choice(list(COLORS)))
            shape = str(rng.choice(list(SHAPES))) if novel and i == 0 else shape
        placed = place(draw_sprite(shape, color, pattern, length, rng), sprites, rng)
        if placed is not None:
            sprites.append(placed)
    return sprites


def draw_scene(seed: int, most: int = MAX_THINGS, *, novel: bool = False) -> Scene:
    """Draws the scene of a seed with one to `most` things."""
    rng = np.random.default_rng(seed)
    background = draw_clutter(draw_background(rng), rng)
    sprites = draw_sprites(rng, most, novel=novel)
    pixels = finish(compose(background, sprites, rng), rng)
    return Scene(pixels, tuple(sprite.thing for sprite in sprites))
