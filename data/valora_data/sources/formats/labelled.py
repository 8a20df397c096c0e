"""Opens images of users' data sets on all cores, and collects what is wrong with them."""

from __future__ import annotations

import logging
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
from valora_data.faults import Fault, FaultError, FaultKind, described
from valora_data.images import decode_image, to_rgb
from valora_data.sources.formats.files import readable
from valora_data.wording import agreeing, plural

log = logging.getLogger(__name__)
T = TypeVar("T")
Found = TypeVar("Found")
Media = Path | bytes | Image.Image
AHEAD = 3  # images per core that are decoded before they are needed


@dataclass(slots=True)
class ImageReader:
    """Collects the faults of one data set, the `source` of messages.

    A share of `tolerance` of the `total` images may be `faulty`, skipped at least in part; `found`
    are all faults in order. If `thorough`, files that belong to nothing are looked for.
    """

    source: str = ""
    total: int = 0
    tolerance: float = 0.05
    thorough: bool = False
    found: dict[Fault, None] = field(default_factory=dict)
    faulty: set[str] = field(default_factory=set)

    @classmethod
    def for_check(cls, source: str) -> ImageReader:
        """A reader that tolerates and looks for all faults."""
        return cls(source, tolerance=math.inf, thorough=True)

    def open(self, path: Path) -> Image.Image | None:
        """The RGB image as a viewer shows it, or None if it cannot be decoded."""
        with self.tolerate(readable(path.name)):
            return load_image(path)
        return None  # type: ignore[unreachable]  # the fault was collected

    @contextmanager
    def tolerate(
        self, item: str, where: str = "", kind: FaultKind = FaultKind.ROW_MALFORMED
    ) -> Iterator[None]:
        """Collect a `FaultError` of the block, which reads an image or row, counted by `item`.

        With `where`, messages begin with it, and missing or wrong values are faults of this kind.
        """
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError, FaultError) as error:
            text = str(error)
            if isinstance(error, FaultError):
                kind, text = error.kind, error.text
            elif not where:
                raise
            elif isinstance(error, KeyError):
                kind, text = FaultKind.ROW_INCOMPLETE, f"has no {error.args[0]}"
            joint = " " if text.startswith(("has ", "is ")) else ": "
            self.add(kind, item, f"{where}{joint}{text}" if where else text)

    def add(self, kind: FaultKind, item: str, text: str) -> None:
        """Collect a fault; a `DataError` if more than `tolerance` of the images have some."""
        self.found[Fault(kind, item, text)] = None
        if kind.skips:
            self.faulty.add(item)
            if len(self.faulty) > self.tolerance * self.total:
                first = next(fault for fault in self.found if fault.kind.skips)
                count, images = len(self.faulty), plural(self.total, "image")
                raise DataError(
                    f"{self.source}: at least {count} of {images} {agreeing(count, 'has|have')} "
                    f"faults, more than {self.tolerance:.0%}: {first.text}: {first.kind.remedy}; "
                    "`valora-data check` lists all faults"
                )

    def finish(self) -> None:
        """Warn of what was skipped, and of what may have lost labels."""
        if skipped := [fault for fault in self.found if fault.kind.skips]:
            images = plural(self.total, "image")
            texts = "; ".join(described(skipped, 1, "such as "))
            text = "%s: %d of %s skipped in whole or in part: %s; `valora-data check` lists all"
            log.warning(text + " faults", self.source, len(self.faulty), images, texts)
        self.warn_of_lost()

    def warn_of_lost(self) -> None:
        """Warn of notes that may mean that labels are lost, also if the data are refused."""
        kinds, shown = {fault.kind for fault in self.found}, {FaultKind.SPLIT_REPEATED}
        if kinds >= (lost := {FaultKind.LABELS_ORPHANED, FaultKind.IMAGE_UNLABELLED}):
            shown |= lost
            log.warning("%s: label files must have the names of their images", self.source)
        if notes := [fault for fault in self.found if fault.kind in shown]:
            log.warning("%s: %s", self.source, "; ".join(described(notes, 1, "such as ")))


def ahead(
    items: Iterable[T],
    work: Callable[[T], Found],
    key: Callable[[T], Any] = id,
    weight: Callable[[T], int] = lambda _: 1,
) -> Iterator[tuple[T, Future[Found]]]:
    """Each item with the result of its work, done ahead on all cores; equal keys share one."""
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
    """The RGB image of a file or of its content, called so in messages; or a `FaultError`."""
    if isinstance(media, Image.Image):
        return to_rgb(media, media.format)
    kind = FaultKind.IMAGE_UNREADABLE
    name = readable(media.name) if isinstance(media, Path) else name
    try:
        return decode_image(media.read_bytes() if isinstance(media, Path) else media)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        if isinstance(error, FileNotFoundError | NotADirectoryError | ValueError):
            kind = FaultKind.IMAGE_MISSING
        why = getattr(error, "strerror", None) or error
        raise FaultError(kind, f"{name} cannot be read ({why}: {readable(str(media))})") from error
    except DataError as error:
        raise FaultError(kind, f"{name} cannot be decoded ({error})") from error
