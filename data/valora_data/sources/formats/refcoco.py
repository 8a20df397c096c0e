"""Referring expressions in JSON: RefCOCO, RefCOCO+ and RefCOCOg.

A file with `images`, `annotations` (pixel x, y, width, height) and `refs`; or one with `refs`
alone, whose entries carry `file_name` and `bbox` themselves. Each of a reference's `sentences` is
a sample. (The original `refs(unc).p` is a pickle, which runs code when it is read: convert it.)
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.schema import Answer, Sample, Split, Task
from valora_data.sources.base import (
    Location,
    Source,
    SourceFormat,
    Splits,
    take_missing_from_train,
)
from valora_data.sources.formats.coco import pixel_box
from valora_data.sources.formats.folders import SPLIT_NAMES
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.tables import check_keys, check_unique, load_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class RefCocoFormat(SourceFormat):
    """One file of references."""

    files = "RefCOCO JSON"

    def supports(self, task: Task) -> bool:
        """Referring expressions."""
        return task.spec.answer == "boxes" and task.spec.prompted

    def recognises(self, location: Location) -> bool:
        """A JSON object with `refs`, or a list of references, which have `sentences`."""
        return bool(location.keys & {"refs", "sentences"})

    def guess_task(self, path: str) -> Task:
        """Referring expressions."""
        return Task.GROUNDING

    def open(self, source: Source) -> Splits:
        """The splits that the references name, or all references as one piece."""
        file = Path(source.location)
        named = {split: split for split in refcoco_splits(file)}
        places: Mapping[Split | None, Split | None]
        places = take_missing_from_train(named) if named else {None: None}
        return {
            key: partial(read_refcoco, file, source.image_folder, split, source.reader)
            for key, split in places.items()
        }


def read_refcoco(
    json_path: Path,
    image_folder: Path,
    split: Split | None = None,
    reader: ImageReader | None = None,
) -> Iterator[Sample]:
    """Read referring expressions with the boxes of what they refer to.

    Args:
        json_path: The file.
        image_folder: What `file_name` is relative to.
        split: Only references whose `split` stands for it (testA and testB are both `test`); None
            for all.
        reader: Opens the images; by default a reader that tolerates few broken files.

    Yields:
        One sample per sentence, in the file's order, with the sentence as prompt and as the box's
        label; the id is ``<image>#<reference>-<sentence>``.

    Raises:
        DataError: If the file is missing, corrupt or empty, ids do not match or occur twice, a
            sentence is empty, a box lies outside its image, or too many images cannot be decoded.
    """
    source = json_path.name
    refs, files, boxes = _tables(json_path)
    if split is not None:
        refs = [ref for ref in refs if _split_of(ref) is split]
    if not refs:
        raise DataError(f"{source} has no references for {split}: the data set is empty")
    reader = reader or ImageReader(source)
    reader.total += len(refs)
    for ref in refs:
        where = f"{source}, reference {ref['ref_id']}"
        name = _look_up(ref, "file_name", "image_id", files, where)
        bbox = _look_up(ref, "bbox", "ann_id", boxes, where)
        picture = reader.open(image_folder / name)
        if picture is None:
            continue
        for number, sentence in enumerate(ref["sentences"]):
            text = sentence
            if isinstance(sentence, dict):
                text = sentence.get("sent") or sentence.get("raw")
            if not text or not str(text).strip():
                raise DataError(f"{where}: sentence {number} is empty: write it or remove it")
            phrase = str(text).strip()
            answer = Answer((pixel_box(bbox, phrase, picture.size, where),))
            key = f"{ref.get('image_id', name)}#{ref['ref_id']}-{number}"
            yield Sample(key, picture, answer, phrase)
    reader.finish()


def refcoco_splits(json_path: Path) -> frozenset[Split]:
    """The splits that the references name.

    Raises:
        DataError: If the file is missing or corrupt.
    """
    found = {_split_of(ref) for ref in _tables(json_path)[0]}
    return frozenset(split for split in found if split is not None)


Tables = tuple[list[dict[str, Any]], dict[Any, str], dict[Any, Any]]


def _tables(json_path: Path) -> Tables:
    """References, file names by image id, and boxes by annotation id."""
    source = json_path.name
    content = load_json(json_path)
    if isinstance(content, list):
        content = {"refs": content}
    refs = content.get("refs") if isinstance(content, dict) else None
    if not isinstance(refs, list):
        raise DataError(f"{source} has no list 'refs': expected referring expressions")
    check_keys(source, "refs", refs, ("ref_id", "sentences"))
    check_unique(source, "reference", [ref["ref_id"] for ref in refs])
    images, annotations = content.get("images", []), content.get("annotations", [])
    check_keys(source, "images", images, ("id", "file_name"))
    check_keys(source, "annotations", annotations, ("id", "bbox"))
    return (
        refs,
        {image["id"]: image["file_name"] for image in images},
        {annotation["id"]: annotation["bbox"] for annotation in annotations},
    )


def _look_up(ref: dict[str, Any], own: str, key: str, table: dict[Any, Any], where: str) -> Any:
    """A reference's own value, or that of the entry it names."""
    if ref.get(key) in table:
        return table[ref[key]]
    if own in ref:
        return ref[own]
    raise DataError(
        f"{where} has {key} {ref.get(key)}, which is not listed, and no {own}: make the ids match"
    )


def _split_of(ref: dict[str, Any]) -> Split | None:
    return SPLIT_NAMES.get(str(ref.get("split", "")))
