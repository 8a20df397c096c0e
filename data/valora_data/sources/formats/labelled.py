"""Opens images of users' data sets on all cores, and collects what is wrong with them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from valora_data.cpu import usable_cores
from valora_data.errors import DataError
from valora_data.faults import MAX_FAULTY, FaultError, FaultKind, Faults
from valora_data.images import decode_image, to_rgb
from valora_data.sources.formats.files import readable

T = TypeVar("T")
Found = TypeVar("Found")
Media = Path | bytes | Image.Image
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

    def open(self, path: Path) -> Image.Image | None:
        """The RGB image as a viewer shows it, or None if it cannot be decoded."""
        return next(self.open_all([path]))

    def open_all(self, paths: Iterable[Path]) -> Iterator[Image.Image | None]:
        """What `open` returns for each path; all cores decode, some images ahead.

        Raises:
            DataError: If more than `tolerance` of the images have faults.
        """
        for path, future in ahead(paths, load_image, lambda path: path):
            image = None
            with self.tolerate(readable(path.name)):
                image = future.result()
            yield image

    @contextmanager
    def tolerate(
        self, item: str, where: str = "", kind: FaultKind = FaultKind.ROW_MALFORMED
    ) -> Iterator[None]:
        """Collect a fault of a block that reads an image or row (see `Faults.tolerate`).

        Args:
            item: What the fault is counted by.
            where: The place that the block reads. Messages begin with it then, and values that are
                missing or of a wrong type are faults, too.
            kind: Kind of those.
        """
        self.faults.total = self.total
        with self.faults.tolerate(item):
            try:
                yield
            except (AttributeError, LookupError, TypeError, ValueError, FaultError) as error:
                if not where:
                    raise
                text = getattr(error, "text", str(error))
                if isinstance(error, KeyError):
                    kind, text = FaultKind.ROW_INCOMPLETE, f"has no {error.args[0]}"
                joint = " " if text.startswith(("has ", "is ")) else ": "
                raise FaultError(getattr(error, "kind", kind), f"{where}{joint}{text}") from error

    def add(self, kind: FaultKind, item: str, text: str) -> None:
        """Collect a fault (see `Faults.add`)."""
        self.faults.total = self.total
        self.faults.add(kind, item, text)

    def finish(self) -> None:
        """Say in one warning what was skipped, if anything was."""
        self.faults.total = self.total
        self.faults.warn()


def ahead(
    items: Iterable[T],
    work: Callable[[T], Found],
    key: Callable[[T], Any],
    weight: Callable[[T], int] = lambda _: 1,
) -> Iterator[tuple[T, Future[Found]]]:
    """Each item with the result of its work, which all cores do some images ahead.

    Items in a row with the same key share one result; the weight is the number of images.
    """
    coming, threads, held = iter(items), usable_cores(), 0
    waiting: deque[tuple[T, Future[Found]]] = deque()
    last: tuple[Any, Future[Found]] | None = None
    pool = ThreadPoolExecutor(threads, "decode")
    try:
        while True:
            while held < AHEAD * threads and (item := next(coming, None)) is not None:
                if last is None or last[0] != key(item):
                    last = (key(item), pool.submit(work, item))
                waiting.append((item, last[1]))
                held += weight(item)
            if not waiting:
                return
            held -= weight(waiting[0][0])
            yield waiting.popleft()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def load_image(media: Media, name: str = "image") -> Image.Image:
    """The RGB image of a file, or of what was read of one, which has this name in messages."""
    if isinstance(media, Image.Image):
        return to_rgb(media, media.format)
    if isinstance(media, Path):
        name = readable(media.name)
        if name != media.name:
            text = f"{name} has a name that is no UTF-8; give it another"
            raise FaultError(FaultKind.IMAGE_UNREADABLE, text)
        try:
            media = media.read_bytes()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            kind = FaultKind.IMAGE_MISSING if missing else FaultKind.IMAGE_UNREADABLE
            text = f"{name} cannot be read ({error.strerror}: {error.filename})"
            raise FaultError(kind, text) from error
    try:
        return decode_image(media)
    except DataError as error:
        text = f"{name} cannot be decoded ({error})"
        raise FaultError(FaultKind.IMAGE_UNREADABLE, text) from error
