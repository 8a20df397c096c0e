"""Ways to answer about documents: what stands before a question in each of them."""

import pytest
import torch

from tests.bench.valora_train.context_ways import METHODS, Reader, chunks_of
from tests.support.lmm_checkpoints import CHECKPOINTS
from valora_data.schema import Answer, Document, Domain, Sample, Split, Task, no_image
from valora_train.fusion.samples import DomainData
from valora_train.model import memory
from valora_train.model.lmm import Lmm
from valora_train.settings import (
    ContextSettings,
    HeadSettings,
    LoraSettings,
    ModelSettings,
    Settings,
    TrainSettings,
    as_dict,
)
from valora_train.tasks.registry import make_task

TEXTS = {
    "first": "417 color red\n820 thing star\n417 table 52",
    "second": "131 color blue\n417 color green\n500 table 17",
}
ASKED = {
    "first": [("which color has 417?", "red"), ("820 thing?", "star")],
    "second": [("which color has 131?", "blue"), ("500 table?", "17")],
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    base = CHECKPOINTS["llava"](tmp_path_factory.mktemp("base"), seed=3)
    lmm = Lmm(ModelSettings(id=str(base)), LoraSettings(rank=4, alpha=8))
    options = {"context": as_dict(ContextSettings(tokens=8, logits=0.0, hidden=0.0, answers=1.0))}
    settings = Settings(
        heads=HeadSettings(max_tokens=4, options=options),
        train=TrainSettings(steps=4, steps_per_new=2, probe_steps=4, batch_size=2, threads=1),
    )
    data = {}
    for name, text in TEXTS.items():
        document = Document(text)
        samples = [
            Sample(f"{n}", no_image(), Answer(answers=(answer,)), question, document=document)
            for n, (question, answer) in enumerate(ASKED[name])
        ]
        task = make_task(Domain(name, Task.CONTEXT, (), "{}", 0.9), settings.heads, lmm)
        data[name] = DomainData(
            task, samples, {Split.VAL: samples, Split.TEST: samples}, lmm, mirror=False
        )
    return Reader(settings, lmm, data, lambda *_: None)


@pytest.fixture
def read(reader, monkeypatch):
    """What stands before each question: the memories that answers are written from."""
    seen = []
    write = memory.write

    def written(lmm, batch, memories, most):
        seen.extend(memories)
        return write(lmm, batch, memories, most)

    monkeypatch.setattr(memory, "write", written)
    return seen


def same(one, document, lmm):
    torch.testing.assert_close(one.keys, memory.read_document(lmm, Document(document)).keys)


def test_nothing_stands_before_a_question_alone(reader, read):
    found = METHODS["question_alone"].run(reader, 0)
    assert read == [None] * 4
    assert (found.tokens, found.bytes) == (0, 0)
    assert {name: len(said) for name, said in found.said.items()} == {"first": 2, "second": 2}


def test_the_whole_document_stands_before_it(reader, read):
    found = METHODS["in_prompt"].run(reader, 0)
    same(read[0], TEXTS["first"], reader.lmm)
    same(read[3], TEXTS["second"], reader.lmm)
    assert found.tokens == sum(one.tokens for one in read) / 4
    METHODS["truncated"].run(reader, 9)
    assert {one.tokens for one in read[4:]} == {9}


def test_bm25_retrieves_the_lines_that_the_question_names(reader, read):
    found = METHODS["bm25"].run(reader, 8)
    same(read[0], "417 color red", reader.lmm)
    same(read[1], "820 thing star", reader.lmm)
    same(read[2], "131 color blue", reader.lmm)
    assert found.tokens <= 8
    assert chunks_of("a b c d e f\ng", 16) == ["a b c d", "e f", "g"]


ANSWERED = [n for n in METHODS if METHODS[n].sized or n in ("next_token", "adapter", "paper")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERED)
def test_every_way_answers_every_question_and_leaves_nothing_behind(reader, name):
    before = METHODS["in_prompt"].run(reader, 0).said
    found = METHODS[name].run(reader, 8)
    assert {key: len(said) for key, said in found.said.items()} == {"first": 2, "second": 2}
    assert found.bytes > 0
    assert METHODS["in_prompt"].run(reader, 0).said == before
    assert not reader.lmm.adapters.parameters("context")
