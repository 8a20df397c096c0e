"""Questions about generic scenes with their answers: all abilities that later tasks build on.

The prompt is all the text that the model reads before the image; the answer is its target text.
Detection has boxes instead of a text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.bench.base_models.albums import WORDINGS, AlbumFact
from tests.bench.base_models.scenes import Scene, Thing, center, longer_side, plural
from tests.bench.base_models.shapes import SHAPES
from valora_data.sources.generic.scenes import COLORS, PATTERNS, SIZE

ORDINALS = ("first", "second", "third", "fourth")
"""How answers name one of several images."""

CAPTIONED = 4
"""Scenes with more things have no caption."""

GRID = 1000
"""Boxes as text are whole numbers from 0 to `GRID` across the image, as Qwen-VL writes them."""

GRID_STEP = 10
"""Boxes as text are rounded to this many grid units, about a pixel of a scene."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about one or more images and what is right.

    Attributes:
        task: One of the keys of `TASKS`, or `which_image`, `motion`.
        prompt: Text before the images.
        answer: The text to write; empty for detection.
        boxes: What to detect: (x0, y0, x1, y1) in pixels, for the task `detect` only.
    """

    task: str
    prompt: str
    answer: str = ""
    boxes: tuple[tuple[float, float, float, float], ...] = ()


def _pick(things: Sequence[Thing], rng: np.random.Generator) -> Thing:
    return things[int(rng.integers(len(things)))]


def _unique(scene: Scene) -> list[tuple[Thing, str]]:
    """Things that a name singles out, with the shortest such name."""
    shapes = Counter(t.shape for t in scene.things)
    names = Counter(t.name for t in scene.things)
    return [
        (t, t.shape if shapes[t.shape] == 1 else t.name) for t in scene.things if names[t.name] == 1
    ]


def _absent(scene: Scene, rng: np.random.Generator) -> str:
    """A name of nothing in the scene: half of them differ from a thing in one respect only."""
    present = {t.name for t in scene.things}
    while True:
        thing = _pick(scene.things, rng)
        shape, color = str(rng.choice(list(SHAPES))), str(rng.choice(list(COLORS)))
        near = rng.random()
        name = (
            f"{color} {thing.shape}" if near < 0.3 else
            f"{thing.color} {shape}" if near < 0.6 else f"{color} {shape}"
        )  # fmt: skip
        if name not in present:
            return name


def _detect(scene: Scene, rng: np.random.Generator) -> Question:
    thing, draw = _pick(scene.things, rng), rng.random()
    if draw < 0.5:
        name, meant = thing.shape, [t for t in scene.things if t.shape == thing.shape]
    elif draw < 0.72:
        name, meant = thing.name, [t for t in scene.things if t.name == thing.name]
    elif draw < 0.78:
        name = f"{thing.pattern} {thing.shape}"
        meant = [t for t in scene.things if (t.pattern, t.shape) == (thing.pattern, thing.shape)]
    elif draw < 0.84:
        name, meant = f"{thing.color} thing", [t for t in scene.things if t.color == thing.color]
    elif draw < 0.9:
        name, meant = "thing", list(scene.things)
    else:
        name, meant = _absent(scene, rng), []
        shape = name.split(" ", 1)[1]
        if rng.random() < 0.5 and all(t.shape != shape for t in scene.things):
            name = shape
    return Question("detect", f"detect {name}", boxes=tuple(t.box for t in meant))


def _count(scene: Scene, rng: np.random.Generator) -> Question:
    thing, draw = _pick(scene.things, rng), rng.random()
    if draw < 0.55:
        n, what = sum(t.shape == thing.shape for t in scene.things), plural(thing.shape)
    elif draw < 0.75:
        n = sum(t.name == thing.name for t in scene.things)
        what = f"{thing.color} {plural(thing.shape)}"
    elif draw < 0.9:
        n, what = len(scene.things), "things"
    else:
        color, shape = _absent(scene, rng).split(" ", 1)
        n, what = 0, f"{color} {plural(shape)}"
    return Question("count", f"how many {what}?", str(n))


def _where(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Asks for one of nine regions, where it is clear which one it is."""
    known = []
    for thing, name in _unique(scene):
        thirds = [edge * 3 / SIZE for edge in center(thing)]
        if all(min(abs(t - 1), abs(t - 2)) > 0.13 for t in thirds):
            row = ("top", "", "bottom")[int(thirds[1])]
            column = ("left", "", "right")[int(thirds[0])]
            known.append((name, f"{row} {column}".strip() or "center"))
    if not known:
        return None
    name, place = known[int(rng.integers(len(known)))]
    return Question("where", f"where is the {name}?", place)


def _color(scene: Scene, rng: np.random.Generator) -> Question | None:
    shapes = Counter(t.shape for t in scene.things)
    known = [t for t in scene.things if shapes[t.shape] == 1]
    if not known:
        return None
    thing = _pick(known, rng)
    return Question("color", f"what color is the {thing.shape}?", thing.color)


def _pattern(scene: Scene, rng: np.random.Generator) -> Question | None:
    known = [(t, n) for t, n in _unique(scene) if longer_side(t) >= 18]
    if not known:
        return None
    rare = [(t, n) for t, n in known if t.pattern != "plain"]
    pool = rare if rare and rng.random() < 0.8 else known
    thing, name = pool[int(rng.integers(len(pool)))]
    return Question("pattern", f"which pattern has the {name}?", thing.pattern)


def _size(scene: Scene, rng: np.random.Generator) -> Question | None:
    known = [(t, n) for t, n in _unique(scene) if not 21 < longer_side(t) < 27]
    if not known:
        return None
    thing, name = known[int(rng.integers(len(known)))]
    size = "big" if longer_side(thing) > 24 else "small"
    return Question("size", f"is the {name} big or small?", size)


def _yes_no(scene: Scene, rng: np.random.Generator) -> Question:
    if rng.random() < 0.5:
        name, answer = _pick(scene.things, rng).name, "yes"
    else:
        name, answer = _absent(scene, rng), "no"
    shape = name.split(" ", 1)[1]
    if rng.random() < 0.3 and any(t.shape == shape for t in scene.things) == (answer == "yes"):
        name = shape
    article = "an" if name[0] in "aeiou" else "a"
    return Question("yes_no", f"is there {article} {name}?", answer)


def _relation(scene: Scene, rng: np.random.Generator) -> Question | None:
    known = _unique(scene)
    if len(known) < 2:
        return None
    i, j = (int(k) for k in rng.choice(len(known), 2, replace=False))
    (a, a_name), (b, b_name) = known[i], known[j]
    axis = int(rng.integers(2))
    gap = center(a)[axis] - center(b)[axis]
    if abs(gap) < 8:
        return None
    side = (("left of", "right of"), ("above", "below"))[axis][int(rng.integers(2))]
    answer = "yes" if (gap < 0) == (side in ("left of", "above")) else "no"
    return Question("relation", f"is the {a_name} {side} the {b_name}?", answer)


def _classify(scene: Scene, rng: np.random.Generator) -> Question | None:
    if len(scene.things) != 1:
        return None
    shape = scene.things[0].shape
    if rng.random() < 0.5:
        return Question("classify", "what is this?", shape)
    options = [shape, *(str(s) for s in rng.choice([s for s in SHAPES if s != shape], 3, False))]
    options = [options[i] for i in rng.permutation(int(rng.integers(2, 5)))]
    if shape not in options:
        options[0] = shape
    return Question("classify", f"what is this: {', '.join(options)}?", shape)


def _caption(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Names every thing with its colour, from left to right."""
    del rng
    if len(scene.things) > CAPTIONED:
        return None
    ordered = sorted(scene.things, key=center)
    phrases = [f"{'an' if t.color[0] in 'aeiou' else 'a'} {t.name}" for t in ordered]
    text = " and ".join([", ".join(phrases[:-1]), phrases[-1]] if phrases[1:] else phrases)
    return Question("caption", "describe the image.", text)


def _box(scene: Scene, rng: np.random.Generator) -> Question:
    """Asks for boxes as text of all things of a name, at most three, from left to right."""
    thing = _pick(scene.things, rng)
    shapes = [t for t in scene.things if t.shape == thing.shape]
    names = [t for t in scene.things if t.name == thing.name]
    name, meant = (
        (thing.shape, shapes) if len(shapes) == 1 and rng.random() < 0.5 else (thing.name, names)
    )
    boxes = [t.box for t in sorted(meant, key=center)[:3]]
    return Question("box", f"locate {name}", write_boxes(name, boxes))


TASKS: dict[str, Callable[[Scene, np.random.Generator], Question | None]] = {
    "detect": _detect,
    "count": _count,
    "where": _where,
    "color": _color,
    "pattern": _pattern,
    "size": _size,
    "yes_no": _yes_no,
    "relation": _relation,
    "classify": _classify,
    "caption": _caption,
    "box": _box,
}
"""Name of a task to what asks it about one scene; None where the scene allows no clear question."""


def ask_which_image(scenes: Sequence[Scene], rng: np.random.Generator) -> Question | None:
    """Asks which of several images has a thing that only one of them has."""
    where = Counter(shape for s in scenes for shape in {t.shape for t in s.things})
    known = [s for s, n in sorted(where.items()) if n == 1]
    if not known:
        return None
    shape = str(rng.choice(known))
    index = next(i for i, s in enumerate(scenes) if any(t.shape == shape for t in s.things))
    return Question("which_image", f"which image has the {shape}?", ORDINALS[index])


def ask_motion(shape: str, way: str) -> Question:
    """Asks which way a thing moves from frame to frame."""
    return Question("motion", f"which way does the {shape} move?", way)


def write_boxes(name: str, boxes: Sequence[tuple[float, float, float, float]]) -> str:
    """Boxes of one name as text.

    Args:
        name: What they are boxes of.
        boxes: (x0, y0, x1, y1) in pixels of a scene.
    """
    text = ""
    for box in boxes:
        x0, y0, x1, y1 = (round(edge / SIZE * GRID / GRID_STEP) * GRID_STEP for edge in box)
        text += f"<box>({x0},{y0}),({x1},{y1})</box>"
    return f"<ref>{name}</ref>{text}"


def read_boxes(text: str) -> list[tuple[float, float, float, float]]:
    """Boxes in a text as (x0, y0, x1, y1) in shares of the image; what is malformed is left out."""
    found = re.findall(r"<box>\((\d+),(\d+)\),\((\d+),(\d+)\)</box>", text)
    boxes = [tuple(int(edge) / GRID for edge in numbers) for numbers in found]
    return [(x0, y0, x1, y1) for x0, y0, x1, y1 in boxes if x0 < x1 and y0 < y1]


def caption_phrases(text: str) -> Counter[str]:
    """What a caption names, whatever the order."""
    return Counter(phrase.strip() for phrase in re.split(r",| and ", text))


def vocabulary() -> list[str]:
    """Phrases that together hold the words that questions and answers use."""
    names = [f"{color} {shape}" for color in COLORS for shape in SHAPES]
    return [
        *(f"detect {name}" for name in names),
        *(f"how many {plural(shape)}? {plural(shape)}" for shape in SHAPES),
        *(f"is there a {name}? is there an {name}?" for name in names),
        *(f"the {pattern} thing" for pattern in PATTERNS),
        *(f"which image has the {shape}? which way does the {shape} move?" for shape in SHAPES),
        *(f"what color is the {shape}? which pattern has the {shape}?" for shape in SHAPES),
        "is the star left of the ring? right of above below big or small? yes no things",
        "top left, top right, bottom left, bottom right, center, up, down",
        "describe the image. locate a star, two rings and three keys. what is this: a star?",
        "no, a, two, three, four, five, six",
        " ".join(ORDINALS),
    ]


def ask_about_album(
    rng: np.random.Generator, facts: list[AlbumFact], questions: int
) -> list[tuple[AlbumFact, str]]:
    """Ask about some facts of an album, each once, in any wording."""
    chosen = [facts[place] for place in rng.permutation(len(facts))[:questions].tolist()]
    wordings = rng.integers(len(WORDINGS["color"]), size=len(chosen)).tolist()
    return [(fact, fact.question(wording)) for fact, wording in zip(chosen, wordings, strict=True)]
