"""Referring expressions in JSON: RefCOCO, RefCOCO+ and RefCOCOg.

A file with `images`, `annotations` (pixel x, y, width, height) and `refs`; or one with `refs`
alone, whose entries carry `file_name` and `bbox` themselves. Each of a reference's `sentences` is
a sample. (The original `refs(unc).p` is a pickle, which runs code when it is read: convert it.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Split, Task
from valora_data.sources.base import take_missing_from_train
from valora_data.sources.formats.annotated import AnnotatedFormat, Record
from valora_data.sources.formats.coco import coco_edges
from valora_data.sources.formats.files import SPLIT_NAMES, Finder
from valora_data.sources.formats.labelled import Shape
from valora_data.sources.formats.tables import load_json, sound_entries, unique_entries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from valora_data.sources.base import Location, Source
    from valora_data.sources.formats.labelled import ImageReader


class RefCocoFormat(AnnotatedFormat):
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

    def parts(self, source: Source) -> Mapping[Split | None, Split | None]:
        """The splits that the references name, or all references as one piece."""
        found = {_split_of(ref) for ref in _content(source.file)["refs"]}
        named = {split: split for split in found if split is not None}
        return take_missing_from_train(named) if named else {None: None}

    def name(self, source: Source, part: Split | None) -> str:
        """Name of the file."""
        return source.file.name

    def records(self, source: Source, part: Split | None, reading: ImageReader) -> Iterator[Record]:
        """A record for each sentence, which is its prompt and the label of its box.

        testA and testB are both `test`. Ids are ``<image>#<reference>-<sentence>``.
        """
        name, content = source.file.name, _content(source.file)
        refs = [ref for ref in content["refs"] if part is None or _split_of(ref) is part]
        if not refs:
            raise DataError(f"{name} has no references for {part}: the data set is empty")
        reading.total += len(refs)
        refs = sound_entries(reading, name, "refs", refs, ("ref_id", "sentences"))
        refs = unique_entries(reading, name, "reference", "ref_id", refs)
        images = sound_entries(reading, name, "images", content["images"], ("id", "file_name"))
        table = sound_entries(reading, name, "annotations", content["annotations"], ("id", "bbox"))
        files = {image["id"]: image["file_name"] for image in images}
        boxes = {annotation["id"]: annotation["bbox"] for annotation in table}
        finder = Finder(source.image_folder)
        for ref in refs:
            where, item = f"{name}, reference {ref['ref_id']}", f"reference {ref['ref_id']}"
            with reading.tolerate(item):
                file = str(_look_up(ref, "file_name", "image_id", files, where))
                edges = coco_edges(_look_up(ref, "bbox", "ann_id", boxes, where), where)
                sentences = ref["sentences"] if isinstance(ref["sentences"], list) else []
                if not sentences:
                    raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no sentences")
                for number, sentence in enumerate(sentences):
                    with reading.tolerate(item):
                        phrase = _phrase(sentence, number, where)
                        key = f"{ref.get('image_id', file)}#{ref['ref_id']}-{number}"
                        shape = Shape(phrase, edges, where)
                        yield Record(finder.find(file), key, [shape], prompt=phrase)


def _phrase(sentence: Any, number: int, where: str) -> str:
    text = sentence
    if isinstance(sentence, dict):
        text = sentence.get("sent") or sentence.get("raw")
    if not text or not str(text).strip():
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where}: sentence {number} is empty")
    return str(text).strip()


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
