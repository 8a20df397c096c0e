"""Checks that the readers of users' data sets share: boxes, labels and images."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from PIL import Image, ImageOps

from valora_data.errors import DataError
from valora_data.schema import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

MAX_SKIPPED = 0.05
"""Share of images that may fail to decode before a data set counts as corrupt."""
TOLERANCE = 1.0
"""Pixels by which a box may reach over the edge: annotation tools round."""


@dataclass(slots=True)
class ImageReader:
    """Opens the images of one data set and counts those that cannot be decoded.

    Attributes:
        source: The data set, for messages.
        total: Number of images that the data set lists.
        tolerance: Share of them that may fail to decode.
        skipped: Names of images that did not decode.
    """

    source: str
    total: int = 0
    tolerance: float = MAX_SKIPPED
    skipped: list[str] = field(default_factory=list)

    def open(self, path: Path) -> Image.Image | None:
        """The RGB image as a viewer shows it, or None if it cannot be decoded.

        Raises:
            DataError: If more than `tolerance` of the images did not decode.
        """
        try:
            with Image.open(path) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
        except (OSError, SyntaxError, ValueError, ImportError) as error:
            # ImportError: Ultralytics, once imported, makes Pillow look for plugins here.
            self.skip(path.name, error)
        return None

    def skip(self, name: str, reason: Exception | str) -> None:
        """Leave out a file that cannot be decoded.

        Raises:
            DataError: If more than `tolerance` of the files did not decode.
        """
        log.warning("%s: skipped %s, which cannot be decoded (%s)", self.source, name, reason)
        self.skipped.append(name)
        if len(self.skipped) > self.tolerance * self.total:
            raise DataError(
                f"{self.source}: {len(self.skipped)} of {self.total} images cannot be decoded or "
                f"are missing, more than {self.tolerance:.0%} (first: {self.skipped[0]}): "
                "repair or remove them"
            )

    def finish(self) -> None:
        """Say how many images were skipped, if any."""
        if self.skipped:
            log.warning("%s: %d of %d images skipped", self.source, len(self.skipped), self.total)


def checked_box(
    edges: tuple[float, float, float, float], label: str, size: tuple[int, int], where: str
) -> Box:
    """A box inside its image; one that reaches over the edge by rounding is clipped.

    Args:
        edges: (x0, y0, x1, y1) in pixels.
        label: Name of its class.
        size: Width and height of the image.
        where: What the box belongs to, for messages.

    Raises:
        DataError: If the box has no area or lies outside the image by more than `TOLERANCE`.
    """
    x0, y0, x1, y1 = edges
    width, height = size
    # Written so that a NaN fails.
    if not (x1 > x0 and y1 > y0):
        raise DataError(f"{where}: box {_shown(edges)} has no area: give it a width and a height")
    inside = min(x0, y0) >= -TOLERANCE and x1 <= width + TOLERANCE and y1 <= height + TOLERANCE
    clipped = (max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1))
    if not inside or clipped[2] <= clipped[0] or clipped[3] <= clipped[1]:
        raise DataError(
            f"{where}: box {_shown(edges)} lies outside its {width} × {height} image: "
            "check the unit of the coordinates and the size of the image"
        )
    return Box(*clipped, label)


def _shown(edges: tuple[float, float, float, float]) -> str:
    return "(" + ", ".join(f"{edge:g}" for edge in edges) + ")"


def check_labels(source: str, known: Iterable[str], labels: Sequence[str]) -> None:
    """Check that a data set which declares its categories has all that a domain asks for.

    Raises:
        DataError: If one is missing.
    """
    names = list(known)
    missing = [label for label in labels if label not in names]
    if missing:
        shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        raise DataError(
            f"{source} has no category {', '.join(map(repr, missing))}, only {shown}: "
            "make the domain's labels and the data set's names match"
        )
    unused = len(set(names) - set(labels))
    if unused:
        log.info("%s: %d categories that the domain does not ask for are left out", source, unused)


def stray_label(where: str, label: str, labels: Sequence[str]) -> DataError:
    """What is wrong with a label that is none of a domain's."""
    return DataError(
        f"{where}: label {label!r} is not one of {', '.join(labels)}: correct it, or add it to the "
        "domain's labels"
    )
