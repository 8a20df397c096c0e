"""Faults of a data set, which a reader skips or notes, and the reader that collects them."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from valora_data.errors import DataError
from valora_data.images import decode_image, to_rgb
from valora_data.sources.formats.files import readable
from valora_data.wording import agreeing, examples, plural

log = logging.getLogger(__name__)
Media = Path | bytes | Image.Image


class FaultKind(Enum):
    """What is counted (`wording.plural`), the remedy, and whether it skips or is only a note."""

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
    IMAGE_UNLABELLED = "image|images has|have no label file or entry", "label what they show", False
    LABELS_EMPTY = "image|images has|have empty labels", "label what they show", False
    LABELS_ORPHANED = "label file|files belongs|belong to no image", "add the images", False
    IMAGE_UNLISTED = "image file|files is|are not listed and not used", "list or remove them", False
    CLASS_UNUSED = "class|classes has|have no samples", "add samples or remove the class", False
    NOT_LABELLED = "entry|entries is|are not labelled yet and not used", "label them", False
    SPLIT_REPEATED = (
        "split|splits has|have the images of train, of which a part is taken for it|them",
        "name other images for it, if there are any", False)
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


def described(faults: Sequence[Fault], named: int, before: str = "") -> list[str]:
    """A sentence for each kind of faults, the commonest first, with so many after some words."""
    texts = {
        kind: [fault.text for fault in faults if fault.kind is kind]
        for kind, _ in Counter(fault.kind for fault in faults).most_common()
    }
    return [
        f"{plural(len(found), kind.what)} ({before}{examples(found, named)}): {kind.remedy}"
        for kind, found in texts.items()
    ]


@dataclass(slots=True)
class ImageReader:
    """Collects the faults of one data set."""

    source: str = ""  # of messages
    total: int = 0  # images, or rows
    tolerance: float = 0.05  # share of them that may be faulty
    found: dict[Fault, None] = field(default_factory=dict)  # in order
    faulty: set[str] = field(default_factory=set)  # skipped at least in part

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
            some = f"{len(self.faulty)} of {plural(self.total, 'image')}"
            texts = "; ".join(described(skipped, 1, "such as "))
            text = "%s: %s skipped in whole or in part: %s; `valora-data check` lists all faults"
            log.warning(text, self.source, some, texts)
        self.warn_of_lost()

    def warn_of_lost(self) -> None:
        """Warn of notes that may mean that labels are lost, also if the data are refused."""
        kinds = {fault.kind for fault in self.found}
        shown = {FaultKind.SPLIT_REPEATED, FaultKind.IMAGE_UNLISTED}
        if kinds >= (lost := {FaultKind.LABELS_ORPHANED, FaultKind.IMAGE_UNLABELLED}):
            shown |= lost
            log.warning("%s: label files must have the names of their images", self.source)
        if notes := [fault for fault in self.found if fault.kind in shown]:
            log.warning("%s: %s", self.source, "; ".join(described(notes, 1, "such as ")))


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
