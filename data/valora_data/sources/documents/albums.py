"""Albums of drawn scenes, with questions about things that occur in one of them only."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from valora_data.sources.generic.scenes import draw_scene

if TYPE_CHECKING:
    import numpy as np

    from valora_data.sources.generic.scenes import Scene

MOST_THINGS = 3
"""Most things of a scene in an album."""


def draw_album(
    rng: np.random.Generator, seed: int, images: int, questions: int
) -> tuple[list[Scene], list[tuple[str, str]]]:
    """Draw an album and ask about it.

    Args:
        rng: Chooses the questions.
        seed: Seed of the scenes.
        images: Number of images.
        questions: Most questions; there are fewer where few things occur once.

    Returns:
        The scenes in order, and questions with their answers.
    """
    while True:
        scenes = [draw_scene(seed + place, MOST_THINGS) for place in range(images)]
        things = [thing for scene in scenes for thing in scene.things]
        counts = Counter(thing.shape for thing in things)
        asked = [
            pair
            for thing in things
            if counts[thing.shape] == 1
            for pair in (
                (f"what color is the {thing.shape}?", thing.color),
                (f"which pattern has the {thing.shape}?", thing.pattern),
            )
        ]
        if asked:
            chosen = rng.permutation(len(asked))[:questions]
            return scenes, [asked[place] for place in chosen.tolist()]
        seed += images
