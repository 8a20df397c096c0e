"""Image classifiers of Ultralytics as teachers; their probabilities are kept as soft labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_data.schema import Task
from valora_teachers.base import BATCH, BatchTeacher, TeacherError, choice_answer, map_classes
from valora_teachers.ultralytics_plugin import open_weights, threads_kept

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from valora_data.schema import Answer, Sample


class YoloClassifier(BatchTeacher):
    """An Ultralytics classifier that answers with a domain's labels."""

    def __init__(
        self,
        model: Any,
        label_of: Mapping[int, str],
        task: Task,
        labels: Sequence[str],
        batch: int = BATCH,
    ) -> None:
        """Wrap a loaded model; use `load` for a file.

        Args:
            model: An `ultralytics.YOLO` for the task classify.
            label_of: Label for each class index; other classes are left out.
            task: The domain's task: classification or counting.
            labels: Labels in the order of the class indices.
            batch: Images per batch.
        """
        super().__init__(task, labels, batch)
        self._model = model
        self._label_of = dict(label_of)

    @classmethod
    def load(
        cls,
        path: Path,
        task: Task = Task.CLASSIFICATION,
        labels: Sequence[str] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> YoloClassifier:
        """Load a `.pt` file. It is a pickle: loading runs its code, so load only what you trust.

        Args:
            path: The file.
            task: The domain's task: classification or counting.
            labels: Labels of the domain; the model's class names if None.
            names: Label for a class name of the model, where the two differ; probabilities of
                several classes that mean one label add up.

        Raises:
            TeacherError: If Ultralytics or the file is missing, it is no classifier, or a label is
                none of its classes.
        """
        model, kind, classes = open_weights(path)
        if kind != "classify":
            raise TeacherError(
                f"{path.name} is a model for {kind!r}, which gives no class of an image: give one "
                "that was trained with task 'classify'"
            )
        label_of = map_classes(path.name, classes, labels, names)
        return cls(model, label_of, task, labels or tuple(dict.fromkeys(label_of.values())))

    def _answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        with threads_kept():
            results = self._model.predict(
                [sample.image.convert("RGB") for sample in samples],
                device="cpu",
                save=False,
                verbose=False,
            )
        answers = []
        for result in results:
            soft = dict.fromkeys(self.labels, 0.0)
            for index, share in enumerate(result.probs.data.tolist()):
                if index in self._label_of:
                    soft[self._label_of[index]] += share
            answers.append(choice_answer(self.task, self.labels, list(soft.values())))
        return answers
