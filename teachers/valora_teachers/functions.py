"""Teachers that are any Python callable, named ``package.module:function`` or given as it is.

It is called with a list of samples and returns one thing for each: an `Answer`, or what the task
makes into one: a label, a count, an answer or a caption as text or number; a mapping of labels to
probabilities; a sequence of boxes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample, Task
from valora_data.wording import plural
from valora_teachers.base import BATCH, BatchTeacher, TeacherError, choice_answer, with_choice

Function = Callable[[list[Sample]], Sequence[Any]]


class FunctionTeacher(BatchTeacher):
    """A function as a teacher.

    Args:
        function: The callable, or its name.
        task: The domain's task.
        labels: Labels of the domain; empty for language.
        names: Label for what the function says, where the two differ.
        batch: Samples per call.

    Raises:
        TeacherError: If the name leads to no callable.
    """

    def __init__(
        self,
        function: Function | str,
        task: Task,
        labels: Sequence[str] = (),
        names: Mapping[str, str] | None = None,
        batch: int = BATCH,
    ) -> None:
        super().__init__(task, labels, batch)
        self._function = look_up(function) if isinstance(function, str) else function
        self._name = function if isinstance(function, str) else getattr(
            function, "__qualname__", type(function).__name__
        )  # fmt: skip
        self._names = dict(names or {})

    def _answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        said = list(self._function(list(samples)))
        if len(said) != len(samples):
            raise TeacherError(
                f"{self._name} gave {plural(len(said), 'answer')} for "
                f"{plural(len(samples), 'sample')}: return one for "
                "each, in order"
            )
        return [self._read(sample, value) for sample, value in zip(samples, said, strict=True)]

    def _read(self, sample: Sample, value: Any) -> Answer:
        try:
            answer = value if isinstance(value, Answer) else self._made(value)
        except (DataError, TypeError, ValueError) as error:
            raise TeacherError(
                f"{self._name} says {value!r} of sample {sample.id}, which is no answer for task "
                f"{self.task} ({error}): return what the task asks for"
            ) from error
        return self._named(sample, answer)

    def _made(self, value: Any) -> Answer:
        if value is None:
            return Answer()
        if isinstance(value, Mapping):
            unknown = [key for key in map(self._label, value) if key not in self.labels]
            if unknown:
                raise TeacherError(self._stray(unknown[0]))
            soft = dict.fromkeys(self.labels, 0.0)
            for key, share in value.items():
                soft[self._label(key)] += float(share)
            return choice_answer(self.task, self.labels, list(soft.values()))
        field = self.task.spec.answer
        if field == "boxes":
            boxes: list[Box] = [value] if isinstance(value, Box) else list(value)
            if not all(isinstance(box, Box) for box in boxes):
                raise TypeError("expected boxes")
            return Answer(tuple(sorted(boxes, key=lambda box: -box.confidence)))
        texts = [value] if isinstance(value, str | int) else list(value)
        if field == "captions":
            return Answer(captions=tuple(map(str, texts)))
        if field == "answers":
            return Answer(answers=tuple(map(str, texts)))
        if len(texts) != 1:
            raise ValueError("expected one label")
        return with_choice(self.task, self._label(texts[0]))

    def _label(self, value: Any) -> str:
        return self._names.get(str(value), str(value))

    def _named(self, sample: Sample, answer: Answer) -> Answer:
        """The answer with the domain's labels.

        Raises:
            TeacherError: If it bears another label.
        """
        boxes = tuple(Box(*b.xyxy, self._label(b.label), b.confidence) for b in answer.boxes)
        label = None if answer.label is None else self._label(answer.label)
        answers = tuple(self._label(text) for text in answer.answers)
        named = Answer(boxes, label, answer.soft, answers, answer.captions, answer.count)
        used = [box.label for box in boxes] if self.task.spec.detects else []
        if self.task.spec.choice and named.choice is not None:
            used.append(named.choice)
        for word in used:
            if self.labels and word not in self.labels:
                raise TeacherError(f"{self._stray(word)} (sample {sample.id})")
        if named.soft and len(named.soft) != len(self.labels):
            raise TeacherError(
                f"{self._name} gave {plural(len(named.soft), 'soft label')} for sample "
                f"{sample.id}, expected "
                f"{len(self.labels)}: give one for each label"
            )
        return named

    def _stray(self, word: str) -> str:
        return (
            f"{self._name} says {word!r}, which is not one of {', '.join(self.labels)}: name the "
            "label that it stands for in teacher.options.names"
        )


def look_up(name: str) -> Function:
    """The callable that ``package.module:function`` names.

    Raises:
        TeacherError: If there is none.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise TeacherError(f"{name!r} names no function: write package.module:function")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise TeacherError(
            f"function {name} cannot be loaded ({error}): check the name and that it is installed"
        ) from error
    if not callable(found):
        raise TeacherError(f"{name} is no function but a {type(found).__name__}: name a callable")
    function: Function = found
    return function
