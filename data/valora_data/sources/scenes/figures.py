"""People drawn in a given posture, so that the frames of a clip show one person moving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from valora_data.sources.scenes.drawing import Colour, Layer, Pen, scaled
from valora_data.sources.scenes.props import BLACK, CLOTHES, HAIR, SKIN, pick

if TYPE_CHECKING:
    import numpy as np

HIPS, SHOULDERS = 0.55, 0.24


@dataclass(frozen=True, slots=True)
class Look:
    """What stays the same from frame to frame.

    Attributes:
        height: Pixels from the sole to the crown when upright.
        skin: Colour of the skin.
        hair: Colour of the hair.
        top: Colour of the jacket.
        bottom: Colour of the trousers.
    """

    height: float
    skin: Colour
    hair: Colour
    top: Colour
    bottom: Colour

    @classmethod
    def any(cls, rng: np.random.Generator) -> Look:
        """Someone."""
        clothes = pick(rng, CLOTHES), pick(rng, CLOTHES)
        return cls(rng.uniform(40, 54), pick(rng, SKIN, 12), pick(rng, HAIR, 12), *clothes)


@dataclass(frozen=True, slots=True)
class Posture:
    """How someone stands; all in shares of the height.

    Attributes:
        feet: Distance of each foot from the middle, left and right.
        hands: Place of each hand (x from the middle, y from the crown), left and right.
        sink: How far the body is lowered by bent knees.
    """

    feet: tuple[float, float] = (-0.08, 0.08)
    hands: tuple[tuple[float, float], tuple[float, float]] = ((-0.14, 0.56), (0.14, 0.56))
    sink: float = 0.0


def figure(look: Look, posture: Posture) -> Layer:
    """Draw someone; the sheet's size depends on the look alone, the soles are at its foot."""
    pen = Pen(look.height, look.height, margin=0.12)
    limb, drop = look.height * 0.085, posture.sink
    hips, shoulders = HIPS + drop, SHOULDERS + drop
    for side, foot, shade in ((-1, posture.feet[0], 0.8), (1, posture.feet[1], 1.0)):
        bend = 0.5 + foot * 0.6 + side * drop * 0.7
        knee = (bend, (hips + 0.97) / 2 - drop * 0.15)
        leg = ((0.5 + side * 0.05, hips), knee, (0.5 + foot, 0.95))
        pen.limb(leg, scaled(look.bottom, shade), limb * 1.2)
        pen.limb(((0.5 + foot, 0.97), (0.56 + foot, 0.97)), scaled(BLACK, 1.3), limb * 0.8)
    for side, (x, y), shade in ((-1, posture.hands[0], 0.8), (1, posture.hands[1], 1.1)):
        hand = (0.5 + x, y + drop)
        elbow = (0.5 + side * 0.13 + x * 0.25, (shoulders + hand[1]) / 2 + 0.03)
        pen.limb(
            ((0.5 + side * 0.09, shoulders + 0.02), elbow, hand), scaled(look.top, shade), limb
        )
        pen.disc(*hand, limb * 0.6, look.skin)
    chest = (
        (0.39, shoulders), (0.45, shoulders - 0.05), (0.55, shoulders - 0.05), (0.61, shoulders),
        (0.59, hips + 0.03), (0.41, hips + 0.03),
    )  # fmt: skip
    pen.polygon(chest, look.top)
    head = look.height * 0.085
    pen.disc(0.5, 0.085 + drop, head * 1.08, look.hair)
    pen.disc(0.51, 0.1 + drop, head * 0.85, look.skin)
    return pen.layer()
