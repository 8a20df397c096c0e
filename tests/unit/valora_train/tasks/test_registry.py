"""Task types by name: the built-in ones, one of another package, and names that nobody has."""

import numpy as np
import pytest

from valora_data.errors import DataError
from valora_data.schema import Answer, Task
from valora_data.tasks import task_names, task_spec
from valora_train.errors import SettingsError
from valora_train.tasks.registry import TASK_TYPES

NUMBER = """
import numpy as np

from valora_data.tasks import TaskSpec
from valora_train.metrics.measures import Scores
from valora_train.tasks.classification import ClassificationTask

class NumberTask(ClassificationTask):
    spec = TaskSpec("within_one", answer="label", labels="required")

    @classmethod
    def measure(cls, predicted, truth):
        errors = [int(p.label) - int(t.label) for p, t in zip(predicted, truth, strict=True)]
        return Scores(np.less_equal(np.abs(errors), 1).astype(np.float64))
"""
"""The example of docs/contributing.md."""


def test_builtin_task_types_declare_what_the_data_side_knows_of_them():
    assert tuple(TASK_TYPES) == task_names()
    for name in task_names():
        assert TASK_TYPES[name].spec is task_spec(name)


def test_a_task_of_another_package(installed):
    installed("valora.tasks", "close_number", NUMBER + "\nextension = NumberTask\n")
    assert Task("close_number").spec.metric == "within_one"
    said, truth = (
        [Answer(label=str(n)) for n in numbers] for numbers in ((1, 4, 9, 2), (2, 4, 5, 2))
    )
    assert TASK_TYPES["close_number"].measure(said, truth).mean == np.mean([1, 1, 0, 1])
    with pytest.raises(DataError, match="unknown task type 'poetry': choose one of caption, class"):
        TASK_TYPES["poetry"]
    with pytest.raises(SettingsError, match="task type video has no options, got speed"):
        TASK_TYPES["video"].read_options("video", {"speed": 2})
