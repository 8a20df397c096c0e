"""Albums of drawn scenes, with questions about things that occur in one of them only.

Questions come in several wordings; the last one of each attribute is kept for measuring.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from valora_data.sources.generic.scenes import draw_scene

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from valora_data.sources.generic.scenes import Scene

MOST_THINGS = 3
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
    """What can be asked about an album.

    Attributes:
        shape: Shape of a thing that occurs once in the album.
        attribute: A key of `WORDINGS`.
        value: Its value.
        image: Index of the thing's image.
        box: Extent (x0, y0, x1, y1) of the thing in pixels.
    """

    shape: str
    attribute: str
    value: str
    image: int
    box: tuple[float, float, float, float]

    def question(self, wording: int) -> str:
        """Ask for the value.

        Args:
            wording: Index into `WORDINGS`; −1 is the wording for measuring.
        """
        return WORDINGS[self.attribute][wording].format(shape=self.shape)


def draw_album(seed: int, images: int) -> tuple[list[Scene], list[AlbumFact]]:
    """Draw an album of which something can be asked.

    Args:
        seed: Seed of the scenes.
        images: Number of images.

    Returns:
        The scenes in order, and all facts about things that occur in one of them only.
    """
    while True:
        scenes = [draw_scene(seed + place, MOST_THINGS) for place in range(images)]
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


def ask_about_album(
    rng: np.random.Generator, facts: list[AlbumFact], questions: int
) -> list[tuple[AlbumFact, str]]:
    """Ask about some facts of an album, each once, in any wording.

    Args:
        rng: Chooses the facts and the wordings.
        facts: The facts.
        questions: Most questions.

    Returns:
        Facts with their questions.
    """
    chosen = [facts[place] for place in rng.permutation(len(facts))[:questions].tolist()]
    wordings = rng.integers(len(WORDINGS["color"]), size=len(chosen)).tolist()
    return [(fact, fact.question(wording)) for fact, wording in zip(chosen, wordings, strict=True)]
