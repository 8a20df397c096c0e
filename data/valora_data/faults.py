"""Faults of a data set: what was skipped or is worth knowing, collected instead of raised."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from valora_data.errors import DataError
from valora_data.wording import agreeing, plural

log = logging.getLogger(__name__)

MAX_FAULTY = 0.05  # share of images that may have faults before a data set is refused


class FaultKind(Enum):
    """A kind of fault: what is counted (see `wording.plural`), and what to do.

    The image or a part of its answer is left out (`skips`), or it is only a note.
    """

    def __init__(self, what: str, remedy: str, skips: bool = True) -> None:
        self.what, self.remedy, self.skips = what, remedy, skips

    # fmt: off
    IMAGE_MISSING = "image|images is|are listed but missing", "add the files or remove the entries"
    IMAGE_UNREADABLE = "image|images cannot be decoded", "repair or remove them"
    VIDEO_UNREADABLE = "video|videos cannot be decoded", "repair or remove them"
    IMAGE_TWICE = "image|images is|are listed twice", "keep one entry for each"
    IMAGE_UNCLASSED = "image|images lies|lie beside the folders of the classes", "move them there"
    IMAGE_OUTSIDE = "file|files lies|lie outside the data set's folder", "move them inside"
    SIZE_DIFFERS = "image|images differs|differ in size from the annotation", "export it again"
    BOX_EMPTY = "box|boxes has|have no area", "give them a width and a height, or remove them"
    BOX_INVERTED = (
        "box|boxes has|have no area, as its|their edges are the wrong way round",
        "exchange the edges")
    BOX_NOT_FINITE = (
        "box|boxes has|have no area, as its|their edges are not finite numbers",
        "correct or remove them")
    BOX_OUTSIDE = "box|boxes lies|lie outside its|their image", "check the unit and image size"
    BOX_MALFORMED = "box|boxes is|are malformed", "fix or remove them"
    CLASS_UNKNOWN = "box|boxes has|have an unknown class", "make the ids and names match"
    LABEL_STRAY = "label|labels is|are none of the domain's", "correct them, or add them there"
    LABEL_MALFORMED = "label|labels is|are malformed", "correct them"
    ROW_MALFORMED = "row|rows is|are malformed", "fix or remove them"
    ROW_INCOMPLETE = "row|rows lacks|lack a value", "add it or remove the row"
    FILE_MALFORMED = "annotation file|files cannot be read", "export them again"
    ANNOTATION_STRAY = "annotation|annotations belongs|belong to no listed image", "list the images"
    ID_TWICE = "id|ids occurs|occur more than once", "number them anew"
    ROW_REPEATED = "row|rows is|are repeated, of which one is used", "keep one of each", False
    IMAGE_UNLABELLED = (
        "image|images has|have no label file or entry, which counts as no objects",
        "add labels, or leave it if they show none", False)
    LABELS_EMPTY = (
        "image|images has|have empty labels, which counts as no objects",
        "add labels, or leave it if they show none", False)
    LABELS_ORPHANED = "label file|files belongs|belong to no image", "add the images", False
    IMAGE_UNLISTED = "image file|files is|are not listed and not used", "list or remove them", False
    NOT_LABELLED = "entry|entries is|are not labelled yet and not used", "label them", False
    SPLIT_REPEATED = (
        "split|splits has|have the images of train, of which a part is taken for it|them",
        "name other images for it, if there are any", False)
    CLASS_UNUSED = "class|classes has|have no samples", "add samples or remove the class", False
    # fmt: on


class FaultError(DataError):
    """A fault of one image, box or row, with a text that names it; readers of sets collect it."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(f"{text}: {kind.remedy}")
        self.kind, self.text = kind, text


class Fault(NamedTuple):
    """A fault that was found, and the image or row that counts against the limit."""

    kind: FaultKind
    item: str
    text: str


@dataclass(slots=True)
class Faults:
    """The faults of one data set, up to a limit."""

    source: str  # the data set, for messages
    # share of the images that may have faults of the kinds that skip something; infinite to
    # collect all
    tolerance: float = MAX_FAULTY
    total: int = 0  # number of images that the data set lists
    # all faults, in the order in which they were found
    found: list[Fault] = field(default_factory=list)
    # images and rows that were skipped, or of which a part was
    faulty: set[str] = field(default_factory=set)
    _known: set[Fault] = field(default_factory=set)

    def add(self, kind: FaultKind, item: str, text: str) -> None:
        """Collect a fault; a `DataError` if more than `tolerance` of the images have some."""
        fault = Fault(kind, item, text)
        if fault in self._known:
            return  # a file that holds several splits is read several times
        self._known.add(fault)
        self.found.append(fault)
        if not kind.skips:
            return
        self.faulty.add(item)
        if len(self.faulty) > self.tolerance * self.total:
            first = next(fault for fault in self.found if fault.kind.skips)
            raise DataError(
                f"{self.source}: at least {len(self.faulty)} of {plural(self.total, 'image')} "
                f"{agreeing(len(self.faulty), 'has|have')} faults, more than "
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

    def texts(self, *, skips: bool) -> dict[FaultKind, list[str]]:
        """Texts of the faults that skip something, or of the notes; the commonest kind first."""
        counts = Counter(fault.kind for fault in self.found if fault.kind.skips is skips)
        return {
            kind: [fault.text for fault in self.found if fault.kind is kind]
            for kind, _ in counts.most_common()
        }

    def warn(self) -> None:
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
