"""What the readers of users' data sets share: opening images on all cores, and checking answers."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from valora_data.cpu import usable_cores
from valora_data.errors import DataError
from valora_data.faults import MAX_FAULTY, FaultError, FaultKind, Faults
from valora_data.images import TRANSPOSED, decode_image, encoded_file
from valora_data.schema import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from PIL import Image

log = logging.getLogger(__name__)

TOLERANCE = 1.0
"""Pixels by which a box may reach over the edge: annotation tools round."""
AHEAD = 3
"""Images per core that are decoded before they are needed."""


@dataclass(slots=True)
class ImageReader:
    """Opens the images of one data set and collects its faults.

    Attributes:
        source: The data set, for messages.
        total: Number of images that the data set lists.
        tolerance: Share of them that may have faults.
        thorough: Whether to look for what a reader does not need: files that belong to nothing.
        faults: What was found.
    """

    source: str
    total: int = 0
    tolerance: float = MAX_FAULTY
    thorough: bool = False
    faults: Faults = field(init=False)

    def __post_init__(self) -> None:
        self.faults = Faults(self.source, self.tolerance)

    @classmethod
    def for_check(cls, source: str) -> ImageReader:
        """A reader that tolerates and looks for all faults."""
        return cls(source, tolerance=math.inf, thorough=True)

    @classmethod
    def forgiving(cls) -> ImageReader:
        """A reader for a first look, of which the faults do not count."""
        return cls("", tolerance=math.inf)

    @property
    def skipped(self) -> list[str]:
        """Names of images and videos that did not decode or are missing."""
        kinds = {
            FaultKind.IMAGE_MISSING, FaultKind.IMAGE_UNREADABLE, FaultKind.VIDEO_UNREADABLE,
        }  # fmt: skip
        return [fault.item for fault in self.faults.found if fault.kind in kinds]

    def open(self, path: Path) -> Image.Image | None:
        """The RGB image as a viewer shows it, or None if it cannot be decoded.

        Raises:
            DataError: If more than `tolerance` of the images have faults.
        """
        return self._checked(path, _decoded(path))

    def open_all(self, paths: Iterable[Path]) -> Iterator[Image.Image | None]:
        """Open images in order; all cores decode, some images ahead of the one that is yielded.

        Args:
            paths: The files. One that follows itself is decoded once.

        Yields:
            For each path what `open` returns.

        Raises:
            DataError: If more than `tolerance` of the images have faults.
        """
        threads = usable_cores()
        coming = iter(paths)
        waiting: deque[tuple[Path, Future[Image.Image | FaultError]]] = deque()
        pool = ThreadPoolExecutor(threads, "decode")
        try:
            last: tuple[Path, Future[Image.Image | FaultError]] | None = None
            opened: tuple[Path, Image.Image | None] | None = None
            while True:
                for path in islice(coming, AHEAD * threads - len(waiting)):
                    same = last is not None and last[0] == path
                    last = last if same and last else (path, pool.submit(_decoded, path))
                    waiting.append(last)
                if not waiting:
                    return
                path, future = waiting.popleft()
                if opened is None or opened[0] != path:
                    opened = (path, self._checked(path, future.result()))
                yield opened[1]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _checked(self, path: Path, found: Image.Image | FaultError) -> Image.Image | None:
        if isinstance(found, FaultError):
            self.add(found.kind, readable(path.name), found.text)
            return None
        return found

    def tolerate(self, item: str) -> AbstractContextManager[None]:
        """Collect a `FaultError` of a block (see `Faults.tolerate`)."""
        self.faults.total = self.total
        return self.faults.tolerate(item)

    def add(self, kind: FaultKind, item: str, text: str) -> None:
        """Collect a fault (see `Faults.add`)."""
        self.faults.total = self.total
        self.faults.add(kind, item, text)

    def skip(self, name: str, reason: Exception | str) -> None:
        """Leave out an image that cannot be decoded.

        Raises:
            DataError: If more than `tolerance` of the images have faults.
        """
        self.add(FaultKind.IMAGE_UNREADABLE, name, f"{name} cannot be decoded ({reason})")

    def finish(self) -> None:
        """Say in one warning what was skipped, if anything was."""
        self.faults.total = self.total
        self.faults.warn()


class Reading:
    """A reader for one pass over a data set: the caller's, or one that warns at the end.

    Args:
        reader: The caller's, which warns itself; None for a new one.
        source: The data set, for messages.
        total: Number of images that the pass lists.
    """

    def __init__(self, reader: ImageReader | None, source: str, total: int) -> None:
        self._own = reader is None
        self._reader = reader or ImageReader(source)
        self._reader.total += total

    def __enter__(self) -> ImageReader:
        return self._reader

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if self._own and kind is None:
            self._reader.finish()


def _decoded(path: Path) -> Image.Image | FaultError:
    """An image; or what is wrong with it, as a value that crosses threads."""
    name = readable(path.name)
    if name != path.name:
        return FaultError(
            FaultKind.IMAGE_UNREADABLE, f"{name} has a name that is no UTF-8; give it another"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        kind = FaultKind.IMAGE_UNREADABLE if path.exists() else FaultKind.IMAGE_MISSING
        return FaultError(kind, f"{name} cannot be read ({error.strerror}: {path})")
    try:
        return decode_image(content)
    except DataError as error:
        return FaultError(FaultKind.IMAGE_UNREADABLE, f"{name} cannot be decoded ({error})")


def readable(name: str) -> str:
    """A file name that can be printed, also where it is no UTF-8."""
    return os.fsencode(name).decode("utf-8", "replace")


Edges = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """A labelled box, as a file describes it.

    Attributes:
        label: Name of its class.
        edges: (x0, y0, x1, y1) in pixels; or what gives them for an image's width and height.
        where: What it is, for messages.
    """

    label: str
    edges: Edges | Callable[[float, float], Edges]
    where: str


def shares(x0: float, y0: float, x1: float, y1: float) -> Callable[[float, float], Edges]:
    """Edges in shares of an image's sides, as `Shape.edges`."""
    return lambda width, height: (x0 * width, y0 * height, x1 * width, y1 * height)


def checked_box(edges: Edges, label: str, size: tuple[int, int], where: str) -> Box:
    """A box inside its image; one that reaches over the edge by rounding is clipped.

    Args:
        edges: (x0, y0, x1, y1) in pixels.
        label: Name of its class.
        size: Width and height of the image.
        where: What the box belongs to, for messages.

    Raises:
        FaultError: If the box has no area or lies outside the image by more than `TOLERANCE`.
    """
    x0, y0, x1, y1 = edges
    width, height = size
    if not all(map(math.isfinite, edges)):
        raise FaultError(FaultKind.BOX_NOT_FINITE, f"{where}: box {_shown(edges)} has no area")
    if not (x1 > x0 and y1 > y0):
        kind = FaultKind.BOX_INVERTED if x1 < x0 or y1 < y0 else FaultKind.BOX_EMPTY
        raise FaultError(kind, f"{where}: box {_shown(edges)} has no area")
    inside = min(x0, y0) >= -TOLERANCE and x1 <= width + TOLERANCE and y1 <= height + TOLERANCE
    clipped = (max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1))
    if not inside or clipped[2] <= clipped[0] or clipped[3] <= clipped[1]:
        raise FaultError(
            FaultKind.BOX_OUTSIDE,
            f"{where}: box {_shown(edges)} lies outside its {width} × {height} image",
        )
    return Box(*clipped, label)


def _shown(edges: Edges) -> str:
    return "(" + ", ".join(f"{edge:g}" for edge in edges) + ")"


class Frame:
    """The pixels that an annotation file's boxes refer to.

    Some tools annotate the image as it is shown, some as it is stored, before EXIF's orientation
    is applied. The width and height in the file tell which.

    Args:
        image: The image as it is shown.
        declared: Width and height in the annotation file; None or zeros if it has none.
        where: What is annotated, for messages.

    Raises:
        FaultError: The image has neither as it is shown nor as it is stored the declared size.
    """

    def __init__(self, image: Image.Image, declared: Any, where: str) -> None:
        self.size = image.size
        self._file = None
        wanted = _size(declared)
        if wanted is None or wanted == image.size:
            return
        file = encoded_file(image)
        if file is not None and file.orientation in TRANSPOSED and file.size == wanted:
            self._file = file
            return
        raise FaultError(
            FaultKind.SIZE_DIFFERS,
            f"{where}: the image has {image.width} × {image.height} pixels, its annotation says "
            f"{wanted[0]} × {wanted[1]}",
        )

    def box(self, shape: Shape) -> Box:
        """The box of a shape on the image as it is shown (see `checked_box`)."""
        edges = shape.edges
        if callable(edges):
            edges = edges(*(self._file.size if self._file else self.size))
        if self._file is not None and all(map(math.isfinite, edges)):
            edges = self._file.shown(edges)
        return checked_box(edges, shape.label, self.size, shape.where)


def _size(declared: Any) -> tuple[int, int] | None:
    try:
        width, height = (int(float(side)) for side in declared)
    except (TypeError, ValueError, OverflowError):
        return None
    return (width, height) if width > 0 and height > 0 else None


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


def stray_label(where: str, label: str, labels: Sequence[str]) -> FaultError:
    """What is wrong with a label that is none of a domain's."""
    return FaultError(
        FaultKind.LABEL_STRAY, f"{where}: label {label!r} is not one of {', '.join(labels)}"
    )
