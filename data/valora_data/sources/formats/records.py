"""Rows of a table about images: `metadata.jsonl` of a folder, or a data set on the hub.

A task reads these columns, which have the names that are customary on the hub; the first one that
exists is used. `Source.columns` maps a field to another name.

- classification, video: `label` (a name, or a class index where the names are declared), `soft`
- detection: `objects` with `bbox` (x, y, width, height in pixels) and `category`
- vqa: `question`; `answers` or `answer` (a text, texts, or objects with `answer`)
- caption: `captions`, `caption` or `text`
- grounding: `phrase`, `expression`, `sentence` or `text`; `bbox`
- counting: `count` or `label`
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Task
from valora_data.sources.base import Source
from valora_data.sources.formats.annotated import (
    Shape,
    collected,
    corner_edges,
    stray_label,
)
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.formats.tables import whole
from valora_data.wording import plural

NAMES: Mapping[str, tuple[str, ...]] = {
    "label": ("label", "labels", "class"),
    "soft": ("soft", "probabilities"),
    "objects": ("objects",),
    "question": ("question", "prompt"),
    "answers": ("answers", "answer"),
    "captions": ("captions", "caption", "text"),
    "phrase": ("phrase", "expression", "sentence", "sentences", "text"),
    "bbox": ("bbox", "box"),
    "count": ("count", "label"),
}
TASKS: Mapping[str, Task] = {
    "question": Task.VQA, "objects": Task.DETECTION, "phrase": Task.GROUNDING,
    "expression": Task.GROUNDING, "sentence": Task.GROUNDING, "caption": Task.CAPTION,
    "captions": Task.CAPTION, "text": Task.CAPTION, "count": Task.COUNTING,
}  # fmt: skip
"""Columns that tell the task, the most specific first."""
TEXTS = {"answers": ("answer",), "captions": ("raw", "caption", "text"),
         "phrase": ("sent", "raw", "phrase")}  # fmt: skip
"""Keys of texts in objects, where a field has objects instead of texts."""


def task_of_columns(columns: Collection[str], labelled: Task) -> Task:
    """The most likely task of a table; `labelled` if answers are labels or there are no columns."""
    for column, task in TASKS.items():
        if column in columns:
            return task
    if not columns or "label" in columns or "labels" in columns:
        return labelled
    raise DataError(
        f"columns {', '.join(sorted(columns))} do not tell the task: give one with --task"
    )


class RowReader:
    """Reads the rows of one data set, called `name` in messages, for a domain.

    Data sets may declare `names` of class indices: rows of other classes than the domain's are left
    out then, and are faults otherwise.
    """

    def __init__(
        self, source: Source, name: str, reading: ImageReader, names: Sequence[str] | None = None
    ) -> None:
        self._source, self._name, self._reading, self._names = source, name, reading, names
        self._kinds: dict[type, Any] = {}

    def read(self, row: Mapping[str, Any], item: str, where: str) -> list[dict[str, Any]]:
        """The fields of a `Record` that a row fills in: one for each of several phrases.

        None of them if the row is of a declared class that the domain does not ask for.
        """
        spec, labels = self._source.task.spec, self._source.labels
        if spec.detects:
            return [{"shapes": self._objects(row, item, where)}]
        if spec.answer == "boxes":
            edges = corner_edges(self._get(row, "bbox", where), where)
            phrases = self._texts(row, "phrase", where)
            return [{"shapes": [Shape(text, edges, where)], "prompt": text} for text in phrases]
        if spec.answer == "label":
            answer = self._classified(row, where)
            declared = self._names is not None and labels
            return [] if declared and answer.label not in labels else [{"answer": answer}]
        if spec.answer == "count":
            return [{"answer": Answer(count=read_count(self._get(row, "count", where), where))}]
        if spec.answer == "captions":
            return [{"answer": Answer(captions=self._texts(row, "captions", where))}]
        question = self._find(row, "question")
        answer = Answer(answers=self._texts(row, "answers", where))
        return [{"answer": answer, "prompt": None if question is None else str(question)}]

    def _classified(self, row: Mapping[str, Any], where: str) -> Answer:
        label = self._label(self._get(row, "label", where), where)
        try:
            return Answer(label=label, soft=tuple(map(float, self._find(row, "soft") or ())))
        except (TypeError, ValueError) as error:
            text = f"{where}: the soft labels are no list of numbers"
            raise FaultError(FaultKind.LABEL_MALFORMED, text) from error

    def _label(self, value: Any, where: str) -> str:
        """A label's name; labels must be all numbers or all names."""
        if isinstance(value, list):
            if len(value) != 1:
                text = f"{where}: expected one label, got {value}"
                raise FaultError(FaultKind.LABEL_MALFORMED, text)
            value = value[0]
        if isinstance(value, float) and value.is_integer():  # as pandas writes whole numbers
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | str):
            text = f"{where}: label {value!r} is no name and no number"
            raise FaultError(FaultKind.LABEL_MALFORMED, text)
        for kind, other in self._kinds.items():
            if kind is not type(value):
                text = f"{where}: label {value!r} and, before, {other!r}: {self._name} mixes"
                raise FaultError(FaultKind.LABEL_MALFORMED, f"{text} numbers and names")
        self._kinds.setdefault(type(value), value)
        if isinstance(value, str) or self._names is None:
            return str(value)
        if not 0 <= value < len(self._names):
            count = len(self._names)
            text = f"{where}: class index {value} lies outside the {count} declared names"
            raise FaultError(FaultKind.LABEL_MALFORMED, text)
        return self._names[value]

    def _objects(self, row: Mapping[str, Any], item: str, where: str) -> list[Shape]:
        objects = self._get(row, "objects", where)
        if isinstance(objects, list) and all(isinstance(entry, dict) for entry in objects):
            # A list of objects instead of an object of lists.
            keys = objects[0] if objects else ()
            objects = {key: [entry.get(key) for entry in objects] for key in keys}
        if not isinstance(objects, dict):
            text = f"{where}: objects are no object of lists, and no list of objects"
            raise FaultError(FaultKind.ROW_MALFORMED, text)
        keys = [key for key in ("category", "categories", "label") if key in objects]
        labels: Any = objects[keys[0]] if keys else []
        boxes: Any = objects.get("bbox", [])
        if len(boxes) != len(labels):
            text = (
                f"{where}: {plural(len(boxes), 'box|boxes')} with "
                f"{plural(len(labels), 'category|categories')}"
            )
            raise FaultError(FaultKind.ROW_MALFORMED, text)

        def shape(entry: tuple[Any, Any], _: int) -> Shape:
            label, wanted = self._label(entry[1], where), self._source.labels
            if wanted and label not in wanted and self._names is None:
                raise stray_label(where, label, wanted)
            return Shape(label, corner_edges(entry[0], where), where)

        return collected(zip(boxes, labels, strict=True), shape, item, self._reading)

    def _find(self, row: Mapping[str, Any], name: str) -> Any:
        names = (self._source.columns[name],) if name in self._source.columns else NAMES[name]
        return next((row[key] for key in names if row.get(key) is not None), None)

    def _get(self, row: Mapping[str, Any], name: str, where: str) -> Any:
        value = self._find(row, name)
        if value is None:
            wanted = self._source.columns.get(name) or " or ".join(NAMES[name])
            text = (
                f"{where} has no {wanted}, only {', '.join(map(str, row))} (source.columns names "
                "columns of other names)"
            )
            raise FaultError(FaultKind.ROW_INCOMPLETE, text)
        return value

    def _texts(self, row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
        """Texts from a text, texts, or objects that hold one."""
        value = self._get(row, name, where)
        texts = []
        for entry in value if isinstance(value, list | tuple) else [value]:
            keys = [key for key in TEXTS[name] if isinstance(entry, dict) and key in entry]
            text = entry[keys[0]] if keys else "" if isinstance(entry, dict) else entry
            texts.append(str(text).strip())
        if not any(texts):
            text = f"{where}: the {name.removesuffix('s')} is empty"
            raise FaultError(FaultKind.ROW_INCOMPLETE, text)
        return tuple(filter(None, texts))


def read_count(value: Any, where: str) -> int:
    """A count; a `FaultError` if it is no whole number."""
    text = str(whole(value)).strip()
    if not text.isdecimal():
        text = f"{where}: count {value!r} is no whole number"
        raise FaultError(FaultKind.LABEL_MALFORMED, text)
    return int(text)
