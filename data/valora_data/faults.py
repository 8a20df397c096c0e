"""Faults of a data set: what a reader skips, or what is worth knowing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from valora_data.errors import DataError
from valora_data.wording import examples, plural


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
