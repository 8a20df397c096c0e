"""Any Python callable as a teacher, named ``package.module:function``."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from valora_data.errors import DataError
from valora_data.hashing import code_hash
from valora_data.schema import Answer, Box, Sample
from valora_data.wording import plural
from valora_teachers import base
from valora_teachers.base import BATCH, Count, Teacher, TeacherError, TeacherOptions


class FunctionOptions(TeacherOptions):
    """Options of a function."""

    batch: Count = BATCH  # samples per call
    files: Any = ()  # files or folders that the function reads, where its code does not name them


class Function(Teacher):
    """A function of samples: for each an `Answer`, text, number, shares of labels, or boxes."""

    options_type = FunctionOptions
    reads_prompt: ClassVar[bool] = False

    @classmethod
    def inputs(
        cls, weights: str | None, options: Mapping[str, Any], cache: Path | None
    ) -> dict[str, str]:
        """The function's module, the local modules that it imports, and the files it names."""
        code = code_hash(str(weights).partition(":")[0])
        return super().inputs(None, options, cache) | {"function": code}

    def load(self, weights: Path | str) -> None:
        self.batch = self.options.batch
        self._name = str(weights)
        self._function = look_up(self._name)

    def answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        found = self._function(list(samples))
        said = list(found) if isinstance(found, Iterable) else []
        if len(said) != len(samples):
            counts = f"{plural(len(said), 'answer')} for {plural(len(samples), 'sample')}"
            raise TeacherError(f"{self._name} gave {counts}: return one for each, in order")
        return [self._read(sample, value) for sample, value in zip(samples, said, strict=True)]

    def _read(self, sample: Sample, value: Any) -> Answer:
        """The answer with the domain's labels, which it must not leave."""
        try:
            given = value if isinstance(value, Answer) else self._made(value)
            boxes = self._boxes(given.boxes, sample)
        except (DataError, LookupError, TypeError, ValueError) as error:
            raise TeacherError(
                f"{self._name} says {value!r} of sample {sample.id}, which is no answer for task "
                f"{self.task} ({error}): return what the task asks for"
            ) from error
        answer = replace(
            given,
            boxes=boxes,
            label=None if given.label is None else self._label(given.label),
            answers=tuple(map(self._label, given.answers)),
        )
        used = [box.label for box in answer.boxes] if self.task.spec.detects else []
        if self.task.spec.choice and answer.choice is not None:
            used.append(answer.choice)
        for word in used:
            self._check(word, f" (sample {sample.id})")
        if answer.soft and len(answer.soft) != len(self.labels):
            raise TeacherError(
                f"{self._name} gave {plural(len(answer.soft), 'soft label')} for sample "
                f"{sample.id}, expected {len(self.labels)}: give one for each label"
            )
        return answer

    def _made(self, value: Any) -> Answer:
        if value is None:
            return Answer()
        if isinstance(value, Mapping):
            soft = dict.fromkeys(self.labels, 0.0)
            for key, share in value.items():
                self._check(label := self._label(key))
                soft[label] += float(share)
            return self.choice_answer(list(soft.values()))
        field = self.task.spec.answer
        if field == "boxes":
            return Answer((value,) if isinstance(value, Box) else tuple(value))
        given = [value] if isinstance(value, str | int) else value
        texts = tuple(text for text in map(str, given) if text.strip())
        if field in ("captions", "answers"):
            return Answer(captions=texts) if field == "captions" else Answer(answers=texts)
        (label,) = texts
        return Answer.chosen(self.task, self._label(label))

    def _boxes(self, boxes: Sequence[Any], sample: Sample) -> tuple[Box, ...]:
        for box in boxes:
            if not isinstance(box, Box):
                raise TypeError("expected boxes")
            if not (box.x0 < box.x1 and box.y0 < box.y1 and 0 <= box.confidence <= 1):
                raise ValueError("a box has x0 < x1, y0 < y1, and a confidence from 0 to 1")
        labels, scores = (self._label(box.label) for box in boxes), [b.confidence for b in boxes]
        edges = [box.xyxy for box in boxes]
        return base.boxes_inside(edges, labels, scores, sample.image.size).boxes

    def _label(self, value: Any) -> str:
        return self.names.get(str(value), str(value))

    def _check(self, word: str, where: str = "") -> None:
        if self.labels and word not in self.labels:
            raise TeacherError(
                f"{self._name} says {word!r}, which is not one of {', '.join(self.labels)}: name "
                f"the label that it stands for in teacher.options.names{where}"
            )


def look_up(name: str) -> Callable[[list[Sample]], Sequence[Any]]:
    """The callable that ``package.module:function`` names; a `TeacherError` if there is none."""
    if ":" not in name:
        raise TeacherError(f"{name!r} names no function: write package.module:function")
    try:
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TeacherError(
            f"function {name} cannot be loaded ({error}): check the name and that it is installed"
        ) from error
    if not callable(found):
        raise TeacherError(f"{name} is no function but a {type(found).__name__}: name a callable")
    return found  # type: ignore[no-any-return]
