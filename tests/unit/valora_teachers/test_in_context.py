"""The base model as a teacher that reads: its answers are those of the whole prompt."""

import pytest
import torch

from tests.support.lmm_checkpoints import CHECKPOINTS
from valora_data.schema import Answer, Document, Sample, Task, no_image
from valora_teachers.base import TeacherError
from valora_teachers.registry import load_teacher, teacher_facts

TEXTS = ["417 color red\n820 thing star", "131 color blue\n417 color green\n900 table 21"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(CHECKPOINTS["llava"](tmp_path_factory.mktemp("base"), seed=3))


def test_it_answers_as_transformers_does_with_the_document_in_the_prompt(base):
    teacher = load_teacher("in_context", base, (), {"max_tokens": 5}, Task.CONTEXT, "{}")
    samples = [
        Sample(f"{n}", no_image(), Answer(), question, document=Document(text))
        for n, (text, question) in enumerate(
            (text, question)
            for question in ("417 color?", "which table has 900?")
            for text in TEXTS
        )
    ]
    seen = []
    answers = teacher.answer(samples, lambda done, count: seen.append((done, count)))
    model = teacher.model
    for sample, answer in zip(samples, answers, strict=True):
        turns = [
            {"role": role, "content": [{"type": "text", "text": text}]}
            for role, text in (("system", sample.document.text), ("user", sample.prompt))
        ]
        inputs = model.process(model.render(turns))
        with torch.no_grad():
            ids = model.model.generate(**inputs, max_new_tokens=5, do_sample=False)
        assert answer.answers == (model.text_of(ids[0, inputs["input_ids"].shape[1] :].tolist()),)
    assert seen[-1] == (4, 4)


def test_it_is_another_teacher_if_the_model_is_another(base, tmp_path):
    settings, inputs = teacher_facts("in_context", base, {"max_tokens": 5, "batch": 2})
    assert settings["options"] == {"max_tokens": 5}  # answers do not depend on batches
    other = str(CHECKPOINTS["llava"](tmp_path / "other", seed=4))
    assert teacher_facts("in_context", other, {"max_tokens": 5})[1] != inputs


def test_what_it_cannot_answer_is_refused(base):
    teacher = load_teacher("in_context", base, (), {}, Task.CONTEXT, "{}")
    with pytest.raises(TeacherError, match="asks about no document"):
        teacher.answer([Sample("a", no_image(), Answer(), "why?")])
    long = Sample("ledger/val/0", no_image(), Answer(), "why?", document=Document("a b " * 9000))
    with pytest.raises(TeacherError, match=r"domain ledger: the document has \d+ tokens"):
        teacher.answer([long])
    image = Sample("ledger/val/0", no_image(), Answer(), "an <image>?", document=Document("a b"))
    assert len(teacher.answer([image])) == 1  # which is text
    with pytest.raises(TeacherError, match="leave labels"):
        load_teacher("in_context", base, ("yes", "no"), {}, Task.CONTEXT, "{}")
