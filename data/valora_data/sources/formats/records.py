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

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind
from valora_data.schema import Answer, Box, Task
from valora_data.sources.formats.coco import pixel_box
from valora_data.sources.formats.labelled import stray_label
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from valora_data.sources.formats.labelled import ImageReader

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


def task_of_columns(columns: Collection[str], labelled: Task) -> Task:
    """The most likely task of a table.

    Args:
        columns: Names of the columns.
        labelled: Task of a table whose answers are labels, or that has no columns.

    Raises:
        DataError: The columns do not tell the task.
    """
    for column, task in TASKS.items():
        if column in columns:
            return task
    if not columns or "label" in columns or "labels" in columns:
        return labelled
    raise DataError(
        f"columns {', '.join(sorted(columns))} do not tell the task: give one with --task"
    )


@dataclass(slots=True)
class RowReader:
    """Reads the rows of one data set for a domain.

    Attributes:
        source: The data set, for messages.
        task: Task of the domain.
        labels: The domain's labels; None where all are wanted.
        columns: A column's name for a field, where it is not one of `NAMES`.
        names: Declared names of class indices, if the data set has such.
        reader: Collects the faults of single boxes; None to raise them.
    """

    source: str
    task: Task
    labels: Sequence[str] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    names: Sequence[str] | None = None
    reader: ImageReader | None = None
    _kinds: dict[type, Any] = field(default_factory=dict)

    def read(
        self, row: Mapping[str, Any], size: tuple[int, int], where: str
    ) -> list[tuple[str | None, Answer]]:
        """The answers of a row, each with its question or phrase if it has one.

        Args:
            row: Values by column.
            size: Width and height of the image in pixels.
            where: Names the row in messages.

        Returns:
            One pair, or one for each of several phrases; none if the row is of a declared class
            that the domain does not ask for.

        Raises:
            FaultError: If a column is missing or its value cannot be read.
        """
        answer, prompted = self.task.spec.answer, self.task.spec.prompted
        if answer == "label":
            return self._classified(row, where)
        if answer == "boxes" and not prompted:
            return [(None, Answer(self._objects(row, size, where)))]
        if answer == "count":
            return [(None, Answer(count=self._count(row, where)))]
        if answer == "captions":
            captions = _texts(self._get(row, "captions", where), ("raw", "caption", "text"))
            return [(None, Answer(captions=_filled(captions, "caption", where)))]
        if answer == "boxes":
            phrases = _texts(self._get(row, "phrase", where), ("sent", "raw", "phrase"))
            bbox = self._get(row, "bbox", where)
            return [
                (text, Answer((pixel_box(bbox, text, size, where),)))
                for text in _filled(phrases, "phrase", where)
            ]
        return self._asked(row, where)

    def _asked(self, row: Mapping[str, Any], where: str) -> list[tuple[str | None, Answer]]:
        question = self._find(row, "question")
        answers = _filled(_texts(self._get(row, "answers", where), ("answer",)), "answer", where)
        answer = Answer(answers=answers)
        if self.labels and answer.choice not in self.labels:
            raise stray_label(where, str(answer.choice), self.labels)
        return [(None if question is None else str(question), answer)]

    def _classified(self, row: Mapping[str, Any], where: str) -> list[tuple[str | None, Answer]]:
        value = self._get(row, "label", where)
        label = self._name(value, where)
        try:
            soft = tuple(float(share) for share in self._find(row, "soft") or ())
        except (TypeError, ValueError) as error:
            raise FaultError(
                FaultKind.LABEL_MALFORMED, f"{where}: the soft labels are no list of numbers"
            ) from error
        if self.labels is not None and label not in self.labels:
            if self.names is not None:
                return []
            raise stray_label(where, label, self.labels)
        return [(None, Answer(label=label, soft=soft))]

    def _name(self, value: Any, where: str) -> str:
        """A label's name; labels must be all numbers or all names."""
        if isinstance(value, list):
            if len(value) != 1:
                raise FaultError(
                    FaultKind.LABEL_MALFORMED, f"{where}: expected one label, got {value}"
                )
            value = value[0]
        if isinstance(value, float) and value.is_integer():  # as pandas writes whole numbers
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise FaultError(
                FaultKind.LABEL_MALFORMED, f"{where}: label {value!r} is no name and no number"
            )
        kind = int if isinstance(value, int) else str
        other = next((known for known in self._kinds if known is not kind), None)
        if other is not None:
            raise FaultError(
                FaultKind.LABEL_MALFORMED,
                f"{where}: label {value!r} and, before, {self._kinds[other]!r}: "
                f"{self.source} mixes numbers and names",
            )
        self._kinds.setdefault(kind, value)
        if isinstance(value, int) and self.names is not None:
            if not 0 <= value < len(self.names):
                raise FaultError(
                    FaultKind.LABEL_MALFORMED,
                    f"{where}: class index {value} lies outside the {len(self.names)} declared "
                    "names",
                )
            return self.names[value]
        return str(value)

    def _objects(
        self, row: Mapping[str, Any], size: tuple[int, int], where: str
    ) -> tuple[Box, ...]:
        objects = self._get(row, "objects", where)
        if isinstance(objects, list):  # a list of objects instead of an object of lists
            if not all(isinstance(entry, dict) for entry in objects):
                raise FaultError(FaultKind.ROW_MALFORMED, f"{where}: objects are no objects")
            keys = objects[0] if objects else ()
            objects = {key: [entry.get(key) for entry in objects] for key in keys}
        if not isinstance(objects, dict):
            raise FaultError(FaultKind.ROW_MALFORMED, f"{where}: objects are no object of lists")
        categories: Any = objects.get(
            "category", objects.get("categories", objects.get("label", []))
        )
        edges: Any = objects.get("bbox", [])
        if len(edges) != len(categories):
            raise FaultError(
                FaultKind.ROW_MALFORMED,
                f"{where}: {plural(len(edges), 'box|boxes')} with "
                f"{plural(len(categories), 'category|categories')}",
            )
        boxes: list[Box] = []
        for bbox, category in zip(edges, categories, strict=True):
            with self.reader.tolerate(where) if self.reader else nullcontext():
                label = self._name(category, where)
                if self.labels is None or label in self.labels:
                    boxes.append(pixel_box(bbox, label, size, where))
                elif self.names is None:
                    raise stray_label(where, label, self.labels)
        return tuple(boxes)

    def _count(self, row: Mapping[str, Any], where: str) -> int:
        value = self._get(row, "count", where)
        return read_count(value, self.labels, where)

    def _find(self, row: Mapping[str, Any], name: str) -> Any:
        names = (self.columns[name],) if name in self.columns else NAMES[name]
        return next((row[key] for key in names if row.get(key) is not None), None)

    def _get(self, row: Mapping[str, Any], name: str, where: str) -> Any:
        value = self._find(row, name)
        if value is None:
            wanted = self.columns.get(name) or " or ".join(NAMES[name])
            raise FaultError(
                FaultKind.ROW_INCOMPLETE,
                f"{where} has no {wanted}, only {', '.join(map(str, row))} (source.columns names "
                "columns of other names)",
            )
        return value


def read_count(value: Any, labels: Sequence[str] | None, where: str) -> int:
    """A count, checked against the counts that a domain lists.

    Raises:
        FaultError: If it is no whole number, or none of `labels`.
    """
    text = str(value).strip()
    if not text.isdecimal():
        raise FaultError(FaultKind.LABEL_MALFORMED, f"{where}: count {value!r} is no whole number")
    if labels and str(int(text)) not in labels:
        raise stray_label(where, str(int(text)), labels)
    return int(text)


def _texts(value: Any, keys: tuple[str, ...]) -> list[str]:
    """Texts from a text, texts, or objects that hold one."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    texts = []
    for entry in entries:
        if isinstance(entry, dict):
            entry = next((entry[key] for key in keys if key in entry), "")  # noqa: PLW2901
        texts.append(str(entry).strip())
    return texts


def _filled(texts: list[str], what: str, where: str) -> tuple[str, ...]:
    kept = tuple(text for text in texts if text)
    if not kept:
        raise FaultError(FaultKind.ROW_INCOMPLETE, f"{where}: the {what} is empty")
    return kept
