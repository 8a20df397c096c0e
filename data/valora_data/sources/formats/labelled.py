"""Opens images of users' data sets on all cores, and collects what is wrong with them."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from valora_data.cpu import usable_cores
from valora_data.errors import DataError
from valora_data.faults import Fault, FaultError, FaultKind
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
    """Opens the images of one data set and collects its faults.

    Attributes:
        source: The data set, for messages.
        total: Number of images that the data set lists, which its reader adds up.
        tolerance: Share of them that may have faults, of the kinds that skip something.
        thorough: Whether to look for what a reader does not need: files that belong to nothing.
        found: All faults once, in the order in which they were found.
        faulty: Images and rows that were skipped, or of which a part was.
    """

    source: str
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
        """Collect a `FaultError` of the block, which reads an image or row.

        Args:
            item: What the fault is counted by.
            where: The place that the block reads. Messages begin with it then, and values that are
                missing or of a wrong type are faults, too.
            kind: Kind of those.
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
                raise DataError(
                    f"{self.source}: at least {len(self.faulty)} of {plural(self.total, 'image')} "
                    f"{agreeing(len(self.faulty), 'has|have')} faults, more than "
                    f"{self.tolerance:.0%}: {first.text}: {first.kind.remedy}; "
                    "`valora-data check` lists all faults"
                )

    def texts(self, *, skips: bool) -> dict[FaultKind, list[str]]:
        """Texts of the faults that skip something, or of the notes; the commonest kind first."""
        counts = Counter(fault.kind for fault in self.found if fault.kind.skips is skips)
        return {
            kind: [fault.text for fault in self.found if fault.kind is kind]
            for kind, _ in counts.most_common()
        }

    def finish(self) -> None:
        """Log one warning about what was skipped, if anything was."""
        kinds = [
            f"{plural(len(texts), kind.what)} (such as {texts[0]})"
            for kind, texts in self.texts(skips=True).items()
        ]
        if kinds:
            log.warning(
                "%s: %d of %s skipped in whole or in part: %s; `valora-data check` lists all "
                "faults", self.source, len(self.faulty), plural(self.total, "image"),
                "; ".join(kinds),
            )  # fmt: skip


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
    kind = FaultKind.IMAGE_UNREADABLE
    name = readable(media.name) if isinstance(media, Path) else name
    if isinstance(media, Path) and name != media.name:
        raise FaultError(kind, f"{name} has a name that is no UTF-8; give it another")
    try:
        return decode_image(media.read_bytes() if isinstance(media, Path) else media)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            kind = FaultKind.IMAGE_MISSING
        text = f"{name} cannot be read ({error.strerror}: {error.filename})"
        raise FaultError(kind, text) from error
    except DataError as error:
        raise FaultError(kind, f"{name} cannot be decoded ({error})") from error
