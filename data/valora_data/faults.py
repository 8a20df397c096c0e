"""Faults of a data set: what was skipped or is worth knowing, collected instead of raised."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.wording import agreeing, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

log = logging.getLogger(__name__)

MAX_FAULTY = 0.05
"""Share of images that may have faults before a data set is refused."""


class FaultKind(Enum):
    """A kind of fault.

    Attributes:
        what: What is counted, in the words of `wording.plural`.
        remedy: What to do.
        skips: Whether the image or a part of its answer is left out. Other kinds are notes: the
            data can be used as it is.
    """

    def __init__(self, what: str, remedy: str, skips: bool = True) -> None:
        self.what, self.remedy, self.skips = what, remedy, skips

    # fmt: off
    IMAGE_MISSING = "image|images is|are listed but missing", "add the files or remove the entries"
    IMAGE_UNREADABLE = "image|images cannot be decoded", "repair or remove them"
    VIDEO_UNREADABLE = "video|videos cannot be decoded", "repair or remove them"
    IMAGE_TWICE = "image|images is|are listed twice", "keep one entry for each"
    IMAGE_UNCLASSED = (
        "image|images lies|lie beside the folders of the classes", "move them into one of them")
    IMAGE_OUTSIDE = "file|files lies|lie outside the data set's folder", "move them inside"
    SIZE_DIFFERS = (
        "image|images differs|differ in size from what its|their annotation says",
        "export the annotations for these images again")
    BOX_EMPTY = "box|boxes has|have no area", "give them a width and a height, or remove them"
    BOX_INVERTED = (
        "box|boxes has|have no area, as its|their edges are the wrong way round",
        "exchange the edges")
    BOX_NOT_FINITE = (
        "box|boxes has|have no area, as its|their edges are not finite numbers",
        "correct or remove them")
    BOX_OUTSIDE = (
        "box|boxes lies|lie outside its|their image",
        "check the unit of the coordinates and the size of the image")
    BOX_MALFORMED = "box|boxes is|are malformed", "fix or remove them"
    CLASS_UNKNOWN = "box|boxes has|have an unknown class", "make the ids and names match"
    LABEL_STRAY = (
        "label|labels is|are none of the domain's",
        "correct them, or add them to the domain's labels")
    LABEL_MALFORMED = "label|labels is|are malformed", "correct them"
    ROW_MALFORMED = "row|rows is|are malformed", "fix or remove them"
    ROW_INCOMPLETE = "row|rows lacks|lack a value", "add it or remove the row"
    FILE_MALFORMED = "annotation file|files cannot be read", "export them again"
    ANNOTATION_STRAY = (
        "annotation|annotations belongs|belong to no listed image",
        "add the images or remove the annotations")
    ID_TWICE = "id|ids occurs|occur more than once", "number them anew"

    ROW_REPEATED = "row|rows is|are repeated, of which one is used", "keep one of each", False
    IMAGE_UNLABELLED = (
        "image|images has|have no label file or entry, which counts as no objects",
        "add labels, or leave it if they show none", False)
    LABELS_EMPTY = (
        "image|images has|have empty labels, which counts as no objects",
        "add labels, or leave it if they show none", False)
    LABELS_ORPHANED = (
        "label file|files belongs|belong to no image", "add the images or remove the files", False)
    IMAGE_UNLISTED = (
        "image file|files is|are not listed and not used", "list them or remove them", False)
    NOT_LABELLED = (
        "entry|entries is|are not labelled yet and not used", "label or remove them", False)
    SPLIT_REPEATED = (
        "split|splits has|have the images of train, of which a part is taken for it|them",
        "name other images for it, if there are any", False)
    CLASS_UNUSED = "class|classes has|have no samples", "add samples or remove the class", False
    # fmt: on


class FaultError(DataError):
    """A fault of one image, box or row; readers of whole data sets collect it.

    Args:
        kind: Kind of fault.
        text: Names the thing and what is wrong with it.
    """

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(f"{text}: {kind.remedy}")
        self.kind, self.text = kind, text


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was found.

    Attributes:
        kind: Kind of fault.
        item: The image or row that it belongs to, which is what is counted against the limit.
        text: Names the thing and what is wrong with it.
    """

    kind: FaultKind
    item: str
    text: str


@dataclass(slots=True)
class Faults:
    """The faults of one data set, up to a limit.

    Attributes:
        source: The data set, for messages.
        tolerance: Share of the images that may have faults of the kinds that skip something;
            infinite to collect all.
        total: Number of images that the data set lists.
        found: All faults, in the order in which they were found.
    """

    source: str
    tolerance: float = MAX_FAULTY
    total: int = 0
    found: list[Fault] = field(default_factory=list)
    _items: set[str] = field(default_factory=set)
    _known: set[Fault] = field(default_factory=set)

    def add(self, kind: FaultKind, item: str, text: str) -> None:
        """Collect a fault.

        Raises:
            DataError: More than `tolerance` of the images have faults.
        """
        fault = Fault(kind, item, text)
        if fault in self._known:
            return  # a file that holds several splits is read several times
        self._known.add(fault)
        self.found.append(fault)
        if not kind.skips:
            return
        self._items.add(item)
        if len(self._items) > self.tolerance * self.total:
            first = next(fault for fault in self.found if fault.kind.skips)
            raise DataError(
                f"{self.source}: at least {len(self._items)} of {plural(self.total, 'image')} "
                f"{agreeing(len(self._items), 'has|have')} faults, more than "
                f"{self.tolerance:.0%}: {first.text}: {first.kind.remedy}; "
                "`valora-data check` lists all faults"
            )

    @contextmanager
    def tolerate(self, item: str) -> Iterator[None]:
        """Collect a `FaultError` of the block that reads an image or row, instead of raising it."""
        try:
            yield
        except FaultError as error:
            self.add(error.kind, item, error.text)

    @property
    def faulty(self) -> int:
        """Number of images that were skipped, or of which a part was."""
        return len(self._items)

    def by_kind(self) -> Mapping[FaultKind, list[Fault]]:
        """Faults by kind, the most frequent of those that skip something first."""
        counts = Counter(fault.kind for fault in self.found)
        kinds = sorted(counts, key=lambda kind: (not kind.skips, -counts[kind]))
        return {kind: [fault for fault in self.found if fault.kind is kind] for kind in kinds}

    def summary(self) -> str | None:
        """What was skipped, in one sentence; None if nothing was."""
        if not self._items:
            return None
        kinds = [
            f"{plural(len(faults), kind.what)} (such as {faults[0].text})"
            for kind, faults in self.by_kind().items()
            if kind.skips
        ]
        return (
            f"{self.source}: {len(self._items)} of {plural(self.total, 'image')} skipped in whole "
            f"or in part: {'; '.join(kinds)}; `valora-data check` lists all faults"
        )

    def warn(self) -> None:
        """Log one warning about what was skipped, if anything was."""
        if (text := self.summary()) is not None:
            log.warning("%s", text)
