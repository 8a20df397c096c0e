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
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Sample, Split, Task
from valora_data.sources.base import (
    Location,
    Source,
    SourceFormat,
    Splits,
    take_missing_from_train,
)
from valora_data.sources.formats.coco import pixel_box
from valora_data.sources.formats.files import SPLIT_NAMES
from valora_data.sources.formats.labelled import ImageReader, Reading
from valora_data.sources.formats.tables import load_json, sound_entries, unique_entries

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
        file = source.file
        named = {split: split for split in refcoco_splits(file)}
        places: Mapping[Split | None, Split | None]
        places = take_missing_from_train(named) if named else {None: None}
        return {
            key: partial(read_refcoco, file, source.image_folder, split, source.reader)
            for key, split in places.items()
        }

    def reads(self, source: Source) -> Iterator[Path]:
        """The file and the images that it lists."""
        file = source.file
        yield file
        content = _content(file)
        for entry in (*content["images"], *content["refs"]):
            if isinstance(entry, dict) and "file_name" in entry:
                yield source.image_folder / str(entry["file_name"])


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
    content = _content(json_path)
    wanted = [ref for ref in content["refs"] if split is None or _split_of(ref) is split]
    if not content["refs"]:
        raise DataError(f"{source} has no references for {split}: the data set is empty")
    with Reading(reader, source, len(wanted)) as reading:
        refs = sound_entries(reading, source, "refs", content["refs"], ("ref_id", "sentences"))
        refs = unique_entries(reading, source, "reference", "ref_id", refs)
        refs = [ref for ref in refs if split is None or _split_of(ref) is split]
        if not refs:
            raise DataError(f"{source} has no references for {split}: the data set is empty")
        images = sound_entries(reading, source, "images", content["images"], ("id", "file_name"))
        table = sound_entries(
            reading, source, "annotations", content["annotations"], ("id", "bbox")
        )
        files = {image["id"]: image["file_name"] for image in images}
        boxes = {annotation["id"]: annotation["bbox"] for annotation in table}
        located = []
        for ref in refs:
            where = f"{source}, reference {ref['ref_id']}"
            with reading.tolerate(f"reference {ref['ref_id']}"):
                name = str(_look_up(ref, "file_name", "image_id", files, where))
                located.append((ref, name, _look_up(ref, "bbox", "ann_id", boxes, where), where))
        paths = [image_folder / name for _, name, _, _ in located]
        for (ref, name, bbox, where), picture in zip(located, reading.open_all(paths), strict=True):
            if picture is None:
                continue
            sentences = ref["sentences"] if isinstance(ref["sentences"], list) else []
            if not sentences:
                text = f"{where} has no sentences"
                reading.add(FaultKind.ROW_INCOMPLETE, f"reference {ref['ref_id']}", text)
            for number, sentence in enumerate(sentences):
                with reading.tolerate(f"reference {ref['ref_id']}"):
                    phrase = _phrase(sentence, number, where)
                    answer = Answer((pixel_box(bbox, phrase, picture.size, where),))
                    key = f"{ref.get('image_id', name)}#{ref['ref_id']}-{number}"
                    yield Sample(key, picture, answer, phrase)


def _phrase(sentence: Any, number: int, where: str) -> str:
    text = sentence
    if isinstance(sentence, dict):
        text = sentence.get("sent") or sentence.get("raw")
    if not text or not str(text).strip():
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where}: sentence {number} is empty")
    return str(text).strip()


def refcoco_splits(json_path: Path) -> frozenset[Split]:
    """The splits that the references name.

    Raises:
        DataError: If the file is missing or corrupt.
    """
    found = {_split_of(ref) for ref in _content(json_path)["refs"]}
    return frozenset(split for split in found if split is not None)


def _content(json_path: Path) -> dict[str, list[Any]]:
    """The tables `refs`, `images` and `annotations`, of which the last two may be empty."""
    content = load_json(json_path)
    if isinstance(content, list):
        content = {"refs": content}
    refs = content.get("refs") if isinstance(content, dict) else None
    if not isinstance(refs, list):
        raise DataError(f"{json_path.name} has no list 'refs': expected referring expressions")
    return {
        "refs": refs,
        "images": content.get("images") or [],
        "annotations": content.get("annotations") or [],
    }


def _look_up(ref: dict[str, Any], own: str, key: str, table: dict[Any, Any], where: str) -> Any:
    """A reference's own value, or that of the entry it names."""
    if ref.get(key) in table:
        return table[ref[key]]
    if own in ref:
        return ref[own]
    raise FaultError(
        FaultKind.ANNOTATION_STRAY,
        f"{where} has {key} {ref.get(key)}, which is not listed, and no {own}",
    )


def _split_of(ref: Any) -> Split | None:
    return SPLIT_NAMES.get(str(ref.get("split", ""))) if isinstance(ref, dict) else None
