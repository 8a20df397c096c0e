"""Tasks of domains: what is learnt and said of which sample, and what cannot be."""

import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image

from valora_data.errors import BundleError, DataError
from valora_data.schema import Answer, Box, Domain, Sample, Task
from valora_data.tasks import task_names, task_spec
from valora_train.model.lmm import Lmm
from valora_train.settings import (
    DomainSettings,
    HeadSettings,
    LoraSettings,
    ModelSettings,
    TaskSettings,
)
from valora_train.tasks.base import Prediction, answer_together
from valora_train.tasks.classification import POOLINGS, ChoiceTask
from valora_train.tasks.registry import TASK_TYPES, make_task

SQUARE = Image.new("RGB", (100, 50))


def domain(task, labels=(), prompt="what?"):
    return Domain("some", task, tuple(labels), prompt, 0.5)


@pytest.fixture(scope="module")
def lmm(random_llava):
    return Lmm(ModelSettings(id=str(random_llava)), LoraSettings(rank=4, alpha=8))


def test_task_types_declare_what_the_data_side_knows_of_them():
    assert tuple(TASK_TYPES) == task_names()
    assert all(TASK_TYPES[name].spec is task_spec(name) for name in task_names())


def test_closed_sets_get_a_head_of_their_kind(lmm):
    for task, labels, kind in (
        (Task.VIDEO, ("up", "down"), "action"), (Task.COUNTING, ("0", "1"), "counting"),
        (Task.VQA, ("no", "yes"), "yes_no"), (Task.VQA, ("red", "blue"), "classification"),
    ):  # fmt: skip
        made = make_task(domain(task, labels), HeadSettings(), lmm, video=task is Task.VIDEO)
        assert isinstance(made, ChoiceTask) and made.kind == kind


@pytest.mark.parametrize(
    ("task", "answer", "text"),
    [
        (Task.VQA, Answer(answers=("red", "blue", "red", "red", "red")), "red"),
        (Task.CAPTION, Answer(captions=("a cat", "there is a cat")), "a cat"),
        (
            Task.GROUNDING,
            Answer((Box(10, 10, 60, 30, "left cat"),)),
            "<ref>left cat</ref><box>(100,200),(600,600)</box>",
        ),
    ],
)
def test_what_is_learnt_is_the_answer_and_nothing_else(lmm, task, answer, text):
    made = make_task(domain(task, prompt="tell {}"), HeadSettings(), lmm)
    sample = Sample("a", SQUARE, answer, "left cat")
    example = made.training_example(sample)
    assert example.question == "tell left cat"
    assert example.answer((48, 48)) == text
    assert made.prompt(sample).answer is None
    # And it is read back to full marks.
    said = made.predictions(None, [(text, (48, 48))], [replace(sample, answer=Answer())])
    if task is Task.CAPTION:  # CIDEr of a single image is 0: every word is everywhere
        assert said[0].answer.captions == ("a cat",)
    else:
        assert made.evaluate(None, said, [sample]).accuracy == 1.0
    with pytest.raises(DataError, match="has no answer to learn"):
        made.training_example(replace(sample, answer=Answer()))
    with pytest.raises(DataError, match=r"set domains\.some\.mirror=false"):
        made.mirrored(sample)


def test_soft_labels_reach_the_targets(lmm):
    made = make_task(domain(Task.CLASSIFICATION, ("a", "b", "c")), HeadSettings(), lmm)
    first = Sample("1", SQUARE, Answer(label="b", soft=(0.2, 0.7, 0.1)))
    targets = made.targets([first, Sample("2", SQUARE, Answer(label="c"))], [])
    assert targets.label.tolist() == [1, 2]
    assert torch.allclose(targets.soft, torch.tensor([[0.2, 0.7, 0.1], [0, 0, 0]]))
    for other, message in (("z", "'z', which is none of its labels"), ("b", "nothing to tell")):
        with pytest.raises(DataError, match=message):
            made.targets([first, Sample("2", SQUARE, Answer(label=other))], [])
    # A video is mirrored in every frame.
    left = Image.new("RGB", (4, 2))
    left.putpixel((0, 0), (255, 0, 0))
    sample = Sample("a", left, Answer(label="a"), None, (left.copy(), left.copy()))
    made = make_task(domain(Task.VIDEO, ("a", "b")), HeadSettings(), lmm, video=True)
    assert [image.getpixel((3, 0)) for image in made.mirrored(sample).images] == [(255, 0, 0)] * 3


def test_a_processor_that_crops_is_refused_for_boxes(random_llava, tmp_path):
    folder = shutil.copytree(random_llava, tmp_path / "crops")
    file = next(f for f in folder.glob("*processor*.json") if "do_center_crop" in f.read_text())
    file.write_text(file.read_text().replace('"do_center_crop": false', '"do_center_crop": true'))
    cropping = Lmm(ModelSettings(id=str(folder)), LoraSettings())
    for task, labels in ((Task.DETECTION, ("a",)), (Task.GROUNDING, ())):
        with pytest.raises(DataError, match="do_center_crop=false"):
            make_task(domain(task, labels), HeadSettings(), cropping)
    make_task(domain(Task.CLASSIFICATION, ("a", "b")), HeadSettings(), cropping)


def test_golden_rows_tell_answers_apart(lmm):
    choice = make_task(domain(Task.COUNTING, ("0", "1")), HeadSettings(), lmm)
    row = choice.golden(Prediction(Answer(count=1, soft=(0.2, 0.8))), None)
    assert row == {"label": "1", "confidence": 0.8}
    for other, same in ((("1", 0.795), True), (("1", 0.7), False), (("0", 0.8), False)):
        expected = dict(zip(row, other, strict=True))
        assert choice.matches(row, expected, None) == same
    words = make_task(domain(Task.VQA), HeadSettings(), lmm)
    assert words.matches({"text": "red"}, words.golden(Prediction(Answer(), "red"), None), None)
    assert not words.matches({"text": "red"}, {"text": "blue"}, None)


def test_heads_of_another_kind_are_refused(lmm, tmp_path):
    choice = make_task(domain(Task.COUNTING, ("0", "1")), HeadSettings(), lmm)
    file = tmp_path / "h.safetensors"
    encoded = lmm.encode([choice.prompt(Sample("a", SQUARE, Answer()))])[0]
    choice.write_head(choice.new_head(lmm, encoded, 0), file)
    assert choice.read_head(file, lmm.width).pooling in POOLINGS
    for task, labels, message in (
        (Task.DETECTION, ("a", "b"), "cannot use a counting head"), (Task.CAPTION, (), "no head")
    ):  # fmt: skip
        made = make_task(domain(task, labels), HeadSettings(), lmm)
        with pytest.raises(BundleError, match=message):
            made.read_head(file, lmm.width)


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
    other = DomainSettings(
        name="pet", task=Task("classification"), labels=["a", "b"], prompt="which"
    )
    assert other.resolved(TaskSettings(prompt="detect thing")).prompt == "which"
