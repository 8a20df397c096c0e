"""Referring expressions in JSON: RefCOCO, RefCOCO+ and RefCOCOg.

A file with `images`, `annotations` (pixel x, y, width, height) and `refs`; or one with `refs`
alone, whose entries carry `file_name` and `bbox` themselves. Each of a reference's `sentences` is
a sample. (The original `refs(unc).p` is a pickle, which runs code when it is read: convert it.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Split, Task
from valora_data.sources.base import Location, Source
from valora_data.sources.formats.annotated import AnnotatedFormat, Record, Shape, corner_edges
from valora_data.sources.formats.files import SPLIT_NAMES, Finder, with_rest
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.tables import Entries, load_json, sound_entries


class RefCocoFormat(AnnotatedFormat):
    """One file of references."""

    files = "RefCOCO JSON"
    answers = frozenset({"phrase"})
    task = Task.GROUNDING

    def recognises(self, location: Location) -> bool:
        """A JSON object with `refs`, or a list of references, which have `sentences`."""
        return bool(location.keys & {"refs", "sentences"})

    def parts(self, source: Source) -> Mapping[Split | None, Split | None]:
        """The splits that the references name, or all references as one piece."""
        found = {_split_of(ref) for ref in _content(source)["refs"]}
        return with_rest({split: split for split in found if split is not None}, None)

    def records(self, source: Source, part: Split | None, reading: ImageReader) -> Iterator[Record]:
        """A record for each sentence, which is its prompt and the label of its box.

        testA and testB are both `test`. Ids are ``<image>#<reference>-<sentence>``.
        """
        name, content = source.file.name, _content(source)

        def entries(table: str, *keys: str, unique: str = "") -> Entries:
            return sound_entries(reading, name, table, content[table], *keys, unique=unique)

        content["refs"] = [ref for ref in content["refs"] if part is None or _split_of(ref) is part]
        if not content["refs"]:
            raise DataError(f"{name} has no references for {part}: the data set is empty")
        reading.total += len(content["refs"])
        files = {image["id"]: image["file_name"] for image in entries("images", "id", "file_name")}
        boxes = {one["id"]: one["bbox"] for one in entries("annotations", "id", "bbox")}
        finder = Finder(source.image_folder)
        for ref in entries("refs", "ref_id", "sentences", unique="ref_id"):
            where, item = f"{name}, reference {ref['ref_id']}", f"reference {ref['ref_id']}"
            with reading.tolerate(item):
                file = str(_look_up(ref, "file_name", "image_id", files, where))
                edges = corner_edges(_look_up(ref, "bbox", "ann_id", boxes, where), where)
                sentences = ref["sentences"] if isinstance(ref["sentences"], list) else []
                if not sentences:
                    raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where} has no sentences")
                for number, said in enumerate(sentences):
                    words = said if isinstance(said, dict) else {"sent": said}
                    phrase = str(words.get("sent") or words.get("raw") or "").strip()
                    key = f"{ref.get('image_id', file)}#{ref['ref_id']}-{number}"
                    shapes = [Shape(phrase, edges, where)]
                    with reading.tolerate(item):
                        if not phrase:
                            text = f"{where}: sentence {number} is empty"
                            raise FaultError(FaultKind.ROW_INCOMPLETE, text)
                        yield Record((finder.find(file),), key, shapes, prompt=phrase, item=item)


def _content(source: Source) -> dict[str, list[Any]]:
    """The tables `refs`, `images` and `annotations`, of which the last two may be empty."""
    content = load_json(source.file)
    content = {"refs": content} if isinstance(content, list) else content
    refs = content.get("refs") if isinstance(content, dict) else None
    if not isinstance(refs, list):
        raise DataError(f"{source.file.name} has no list 'refs': expected referring expressions")
    return {"images": content.get("images") or [], "annotations": content.get("annotations") or [],
            "refs": refs}  # fmt: skip


def _look_up(ref: dict[str, Any], own: str, key: str, table: dict[Any, Any], where: str) -> Any:
    """A reference's own value, or that of the entry it names."""
    if ref.get(key) in table:
        return table[ref[key]]
    if own in ref:
        return ref[own]
    text = f"{where} has {key} {ref.get(key)}, which is not listed, and no {own}"
    raise FaultError(FaultKind.ANNOTATION_STRAY, text)


def _split_of(ref: Any) -> Split | None:
    return SPLIT_NAMES.get(str(ref.get("split", ""))) if isinstance(ref, dict) else None
