"""Albums of drawn scenes, with questions about things that occur in one of them only.

Questions come in several wordings; the last one of each attribute is kept for measuring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.base_models.scenes import Scene, draw_scene

MAX_THINGS = 3
"""Most things of a scene in an album."""
WORDINGS: dict[str, tuple[str, ...]] = {
    attribute: (
        f"which {attribute} has the {{shape}}?",
        f"the {{shape}} has which {attribute}?",
        f"what {attribute} has the {{shape}}?",
    )
    for attribute in ("color", "pattern")
}
"""Wordings of a question about an attribute; the last one is for measuring."""


@dataclass(frozen=True, slots=True)
class AlbumFact:
    """What can be asked about an album: an attribute (of `WORDINGS`) of the only thing of a shape.

    `image` is the index of the thing's image, `box` its extent (x0, y0, x1, y1) there in pixels.
    """

    shape: str
    attribute: str
    value: str
    image: int
    box: tuple[float, float, float, float]

    def question(self, wording: int) -> str:
        """Ask for the value; wording −1 is the one for measuring."""
        return WORDINGS[self.attribute][wording].format(shape=self.shape)


def draw_album(seed: int, images: int) -> tuple[list[Scene], list[AlbumFact]]:
    """Draw scenes, and all facts about things that occur in one of them only: at least one."""
    while True:
        scenes = [draw_scene(seed + place, MAX_THINGS) for place in range(images)]
        facts = album_facts(scenes)
        if facts:
            return scenes, facts
        seed += images


def album_facts(scenes: Sequence[Scene]) -> list[AlbumFact]:
    """All facts about things whose shape occurs once in an album of these scenes."""
    things = [(image, thing) for image, scene in enumerate(scenes) for thing in scene.things]
    counts = Counter(thing.shape for _, thing in things)
    return [
        AlbumFact(thing.shape, attribute, value, image, thing.box)
        for image, thing in things
        if counts[thing.shape] == 1
        for attribute, value in (("color", thing.color), ("pattern", thing.pattern))
    ]
