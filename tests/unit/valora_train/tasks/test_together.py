"""Several heads on the same hidden states answer as each does alone."""

import pytest
from PIL import Image

from valora_data.schema import Answer, Domain, Sample, Task
from valora_train.model.lmm import Lmm
from valora_train.settings import (
    DomainSettings,
    HeadSettings,
    LoraSettings,
    ModelSettings,
    TaskSettings,
)
from valora_train.tasks.base import answer_together
from valora_train.tasks.registry import make_task

PROMPTS = {"cat": "detect thing", "dog": "detect thing", "eel": "detect eel"}


def test_heads_of_one_prompt_share_passes_and_answer_as_alone(monkeypatch):
    lmm = Lmm(ModelSettings(), LoraSettings())
    samples = [
        Sample(str(n), Image.new("RGB", (60, 40), (40 * n, 9, 99)), Answer()) for n in range(3)
    ]
    heads = []
    for n, (name, prompt) in enumerate(PROMPTS.items()):
        domain = Domain(name, Task.DETECTION, (name,), prompt, 0.5)
        task = make_task(domain, HeadSettings(), lmm)
        first = lmm.encode([task.prompt(samples[0])], task.whole_prompt)[0]
        heads.append((task, task.new_head(lmm, first, n)))
    wanted = [task.answer(head, lmm, samples) for task, head in heads]
    passes, states = [], lmm.states
    monkeypatch.setattr(lmm, "states", lambda batch: passes.append(len(batch)) or states(batch))
    assert answer_together(heads, lmm, samples) == wanted
    assert any(one.answer.boxes for found in wanted for one in found)
    assert passes == [3, 3]


@pytest.mark.parametrize(
    ("task", "labels", "own", "found"),
    [
        ("detection", ["cat"], "detect cat", "detect thing"),
        ("vqa", ["no", "yes"], "{}", "{}"),
        ("caption", [], "describe it", "describe it"),
    ],
)
def test_one_prompt_of_a_task_is_that_of_domains_with_heads(task, labels, own, found):
    domain = DomainSettings(name="pet", labels=labels, prompt=own)
    for common, wanted in ((None, own), ("detect thing", found)):
        assert domain.resolved(TaskSettings(type=Task(task), prompt=common)).prompt == wanted
