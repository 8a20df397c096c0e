"""Named things in colours and patterns, as sprites of drawn scenes."""

import re
from collections.abc import Callable
from hashlib import sha256

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

from valora_data.sources.generic.shapes import FREE_TURN, KEEP_ASPECT, KEEP_SIDE, SHAPES, Outline

Rng = np.random.Generator
Floats = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]
Window = tuple[slice, slice]
Tone = Callable[[Image.Image, Floats, float], tuple[Image.Image, Floats, bool]]
"""What changes silhouette and colours of a thing of some length; and whether it keeps details."""

SIZE = 96  # width and height of a scene in pixels
OVERSAMPLING = 3  # things are drawn this many times larger and averaged down: smooth edges
Range = tuple[float, float]
COLORS: dict[str, tuple[Range, Range, Range]] = {
    "red": ((0.97, 1.015), (0.78, 1.0), (0.68, 0.95)),
    "orange": ((0.065, 0.09), (0.85, 1.0), (0.9, 1.0)),
    "yellow": ((0.14, 0.17), (0.75, 1.0), (0.88, 1.0)),
    "green": ((0.29, 0.39), (0.6, 1.0), (0.45, 0.8)),
    "cyan": ((0.48, 0.52), (0.6, 1.0), (0.78, 1.0)),
    "blue": ((0.59, 0.66), (0.7, 1.0), (0.55, 0.95)),
    "purple": ((0.74, 0.79), (0.55, 0.9), (0.45, 0.75)),
    "pink": ((0.88, 0.93), (0.32, 0.55), (0.92, 1.0)),
    "brown": ((0.05, 0.08), (0.6, 0.85), (0.3, 0.42)),
    "white": ((0.0, 1.0), (0.0, 0.05), (0.93, 1.0)),
    "black": ((0.0, 1.0), (0.0, 0.3), (0.04, 0.13)), "gray": ((0.0, 1.0), (0.0, 0.05), (0.42, 0.6)),
}  # fmt: skip
"""Name to the ranges of hue, saturation and value that people call so."""

PATTERNS = ("plain", "striped", "dotted", "checked", "outlined")


def seeded(text: str) -> Rng:
    return np.random.default_rng(int.from_bytes(sha256(text.encode()).digest()[:16], "little"))


def windows(shape: tuple[int, ...], left: int, top: int, side: int = SIZE) -> tuple[Window, Window]:
    """The part of an image that a sheet at (left, top) covers, and that part of the sheet."""
    x0, y0 = max(0, left), max(0, top)
    x1, y1 = max(x0, min(side, left + shape[1])), max(y0, min(side, top + shape[0]))
    part = (slice(y0 - top, y1 - top), slice(x0 - left, x1 - left))
    return (slice(y0, y1), slice(x0, x1)), part


def softened(coverage: Floats, radius: float) -> Floats:
    """A coverage map in [0, 1] after Gaussian blur with `radius` pixels."""
    image = Image.fromarray((coverage * 255).astype(np.uint8))
    blurred = image.filter(ImageFilter.GaussianBlur(radius))
    return np.asarray(blurred, dtype=np.float32) / np.float32(255)


def plural(shape: str) -> str:
    return re.sub("ys$", "ies", shape + ("es" if re.search(r"(s|sh|ch|x)$", shape) else "s"))


def color_of(name: str, rng: Rng) -> Floats:
    """A random RGB in [0, 1] that people call `name`, (3,)."""
    h, s, v = (float(rng.uniform(*limits)) for limits in COLORS[name])
    # Piecewise-linear hue: each channel is v · (1 − s · how far its own hue is away).
    away = np.abs((h * 6.0 + np.array([0.0, 4.0, 2.0])) % 6.0 - 3.0)
    return np.asarray(v * (1.0 - s * (1.0 - np.clip(away - 1.0, 0.0, 1.0))), dtype=np.float32)


def _draw_masks(
    shape: str, outline: Outline, length: float, rng: Rng
) -> tuple[Image.Image, Image.Image, Image.Image]:
    """Oversampled silhouette, dark and light details of one specimen, turned and bent at random."""
    parts = outline(rng) if callable(outline) else outline
    turn = rng.uniform(0, 2 * np.pi) if shape in FREE_TURN else np.radians(rng.normal(0, 9))
    stretch = rng.normal(0, 0.03 if shape in KEEP_ASPECT else 0.12)
    shear = rng.normal(0, 0.02 if shape in KEEP_ASPECT else 0.08)
    mirror = -1.0 if shape not in KEEP_SIDE and rng.random() < 0.5 else 1.0
    cos, sin = np.cos(turn), np.sin(turn)
    matrix = np.array([[cos, -sin], [sin, cos]]) @ np.array(
        [[mirror * np.exp(stretch), shear], [0.0, np.exp(-stretch)]]
    )
    phase, bend = rng.uniform(0, 6, 2), rng.uniform(0, 0.06)
    thickness = rng.uniform(0.85, 1.25)

    moved = [
        (part, (part.points + bend * np.sin(2.5 * part.points[:, ::-1] + phase)) @ matrix.T)
        for part in parts
    ]
    filled = [(part.width / 2, points) for part, points in moved if part.role == "fill"]
    low = np.min([points.min(0) - half for half, points in filled], 0)
    high = np.max([points.max(0) + half for half, points in filled], 0)
    scale = length * OVERSAMPLING / float((high - low).max())
    margin = 2 * OVERSAMPLING
    # One more pixel at random: specimens do not sit on the pixel grid.
    shift = margin - low * scale + rng.uniform(0, OVERSAMPLING, 2)
    side = (np.ceil((high - low) * scale / OVERSAMPLING).astype(int) + 5) * OVERSAMPLING
    canvas = (int(side[0]), int(side[1]))
    masks = {role: Image.new("L", canvas) for role in ("fill", "dark", "light")}
    pens = {role: ImageDraw.Draw(mask) for role, mask in masks.items()}
    # Holes cut what was drawn before them, so strokes may cross them later.
    for part, points in moved:
        pen = pens["fill" if part.role == "hole" else part.role]
        ink = 0 if part.role == "hole" else 255
        xy = [(float(x), float(y)) for x, y in points * scale + shift]
        if part.width:
            width = max(round(part.width * thickness * scale), OVERSAMPLING)
            pen.line(xy, fill=ink, width=width, joint="curve")
        else:
            pen.polygon(xy, fill=ink)
    return masks["fill"], masks["dark"], masks["light"]


def draw_sprite(
    shape: str, color: str, length: float, rng: Rng, outline: Outline | None = None,
    tone: Tone | None = None,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Coverage (h, w) and colours (h, w, 3) in [0, 1] of a specimen, about `length` pixels long."""
    fill, dark, light = _draw_masks(shape, outline or SHAPES[shape], length, rng)
    main = color_of(color, rng)
    size = (fill.height // OVERSAMPLING, fill.width // OVERSAMPLING)
    rgb, toned, detailed = np.full((*size, 3), main, np.float32), float(main.mean()), True
    if tone is not None:
        fill, rgb, detailed = tone(fill, rgb, length)
    cover, shade, shine = (
        np.asarray(mask.reduce(OVERSAMPLING), dtype=np.float32) / 255.0
        for mask in (fill, dark, light)
    )
    if detailed:
        rgb += shade[:, :, None] * (main * 0.25 + (0.35 if toned < 0.15 else 0.0) - rgb) * 0.9
        rgb += shine[:, :, None] * (main * 0.25 + 0.75 - (0.5 if toned > 0.85 else 0.0) - rgb) * 0.9
    if rng.random() < 0.5:  # a border, as of cut paper
        soft = np.asarray(fill.filter(ImageFilter.GaussianBlur(3.0)).reduce(OVERSAMPLING))
        edge = np.clip((0.92 - soft.astype(np.float32) / 255.0) * 2.0, 0, 1)[:, :, None]
        rgb += edge * (main * (0.45 if toned > 0.3 else 1.0) + (0.0 if toned > 0.3 else 0.3) - rgb)
    if rng.random() < 0.7:  # light from one side
        y, x = np.mgrid[-1 : 1 : cover.shape[0] * 1j, -1 : 1 : cover.shape[1] * 1j]
        angle, depth = rng.uniform(0, 2 * np.pi), rng.uniform(0, 0.18)
        rgb *= (1 + depth * (np.cos(angle) * x + np.sin(angle) * y))[:, :, None].astype(np.float32)
    return cover, np.clip(rgb, 0, 1)


def grainy(pixels: Pixels, rng: Rng, blur: float, strength: float) -> Pixels:
    """Blur, of half of all images, and grain of up to some radius and standard deviation."""
    photo = Image.fromarray(pixels)
    if rng.random() < 0.5:
        photo = photo.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.2, blur))))
    grain = rng.standard_normal(pixels.shape, dtype=np.float32) * rng.uniform(0, strength)
    return np.clip(np.asarray(photo, dtype=np.float32) + grain, 0, 255).astype(np.uint8)
