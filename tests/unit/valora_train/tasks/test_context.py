"""Task `context`: targets, loss and metric in closed form; memories as heads."""

from dataclasses import replace

import pytest
import torch

from tests.support.lmm_checkpoints import CHECKPOINTS
from valora_data.errors import DataError
from valora_data.schema import Answer, Document, Domain, Sample, Task, no_image
from valora_train.errors import SettingsError
from valora_train.model import memory
from valora_train.model.lmm import Lmm
from valora_train.settings import HeadSettings, LoraSettings, ModelSettings
from valora_train.tasks.registry import make_task

DOCUMENT = Document("417 color red\n820 thing star\n417 table 52\n131 color blue")
DOMAIN = Domain("ledger", Task.CONTEXT, (), "{}", 0.9)


@pytest.fixture(scope="module")
def lmm(tmp_path_factory):
    base = CHECKPOINTS["llava"](tmp_path_factory.mktemp("base"), seed=3)
    return Lmm(ModelSettings(id=str(base)), LoraSettings())


def samples(document=DOCUMENT):
    asked = [("417 color?", "red"), ("which thing has 820?", "star"), ("417 table?", "52")]
    return [
        Sample(f"s{n}", no_image(), Answer(answers=(answer,)), question, document=document)
        for n, (question, answer) in enumerate(asked)
    ]


def task(lmm, **options):
    values = {"tokens": 12} | options
    settings = replace(HeadSettings(), max_tokens=6, options={"context": values})
    made = make_task(DOMAIN, settings, lmm)
    made.prepare(samples())
    return made


def new_head(made, lmm):
    return made.new_head(lmm, lmm.encode([made.training_example(samples()[0])])[0], 0)


def loss(made, lmm, head):
    encoded = lmm.encode([made.training_example(sample) for sample in samples()])
    targets = made.targets(samples(), encoded)
    lmm.adapters.activate(None)
    states = memory.states(lmm, encoded, [head] * len(encoded))
    return made.loss(head, states, targets[torch.arange(len(encoded))], lmm), states, encoded


def test_the_loss_is_the_divergence_from_the_model_that_reads(lmm):
    for weights in ({}, {"hidden": 0.0}, {"logits": 0.0}):  # a document's distance from itself is 0
        made = task(lmm, **weights)
        assert abs(float(loss(made, lmm, memory.read_document(lmm, DOCUMENT))[0])) < 1e-5
        other = memory.read_document(lmm, Document("131 color blue"))
        assert float(loss(made, lmm, other)[0]) > 1e-3
    made = task(lmm, logits=1.0, hidden=0.0, answers=0.5)
    head = memory.new_memory_tokens(lmm, DOCUMENT, 10)
    found, states, encoded = loss(made, lmm, head)
    read = memory.states(lmm, encoded, [memory.read_document(lmm, DOCUMENT)] * 3)
    hidden, tokens = states.answer_pairs()
    mine = torch.log_softmax(lmm.logits(hidden), -1)
    truth = torch.log_softmax(lmm.logits(read.answer_pairs()[0]), -1)
    gap = (truth.exp() * (truth - mine)).sum(-1).mean()
    entropy = -mine[torch.arange(len(tokens)), tokens].mean()
    torch.testing.assert_close(found, gap + 0.5 * entropy, atol=1e-4, rtol=1e-4)


def test_a_memory_learns_and_another_documents_does_not_help(lmm):
    made = task(lmm, logits=1.0, hidden=0.0)
    head = new_head(made, lmm)
    start = float(loss(made, lmm, head)[0])
    optimizer = torch.optim.Adam(head.parameters(), 0.05)
    for _ in range(40):
        optimizer.zero_grad()
        loss(made, lmm, head)[0].backward()
        optimizer.step()
    assert float(loss(made, lmm, head)[0]) < start / 4
    other = memory.read_document(lmm, Document("999 color pink\n" * 4))
    assert float(loss(made, lmm, other)[0]) > start / 2


def test_answers_count_but_for_case_and_punctuation(lmm):
    made = task(lmm)
    said = [Answer(answers=(text,)) for text in ("Red.", "the star", "53", "", "Red.")]
    truth = [Answer(answers=(text,)) for text in ("red", "star", "52", "red")]
    truth.append(Answer(answers=("crimson", "red")))
    assert made.measure(said, truth).each.tolist() == [1, 1, 0, 0, 1]
    with pytest.raises(DataError, match="no answer to compare with"):
        made.measure(said[:1], [Answer()])


def test_a_memory_is_written_and_read_as_a_head(lmm, tmp_path):
    made = task(lmm, tokens=12)
    head = new_head(made, lmm)
    made.write_head(head, tmp_path / "m.safetensors")
    again = made.read_head(tmp_path / "m.safetensors", lmm.width)
    assert torch.equal(again.keys, head.keys)
    facts = made.metadata(head)["context"]
    assert (facts["form"], facts["tokens"], facts["file"]) == (
        "prefix", 12, "contexts/ledger.safetensors",
    )  # fmt: skip
    assert facts["bytes"] == (head.keys.nelement() + head.values.nelement()) * 4
    assert facts["source_tokens"] == memory.document_tokens(lmm, DOCUMENT)
    assert new_head(task(lmm, form="adapter"), lmm) is None
    # A prefix begins as what the learnt questions attend to.
    made = task(lmm, tokens=7)
    encoded = lmm.encode([made.training_example(sample) for sample in samples()])
    made.targets(samples(), encoded)
    read = memory.read_document(lmm, DOCUMENT)
    head = made.new_head(lmm, encoded[0], 0)
    assert torch.equal(head.keys, memory.most_attended(lmm, read, encoded, 7).keys)
    tokens = new_head(task(lmm, form="memory_tokens", tokens=7), lmm)
    assert torch.equal(tokens.embeddings, memory.new_memory_tokens(lmm, DOCUMENT, 7).embeddings)


def test_bad_documents_and_settings_are_refused_in_one_sentence(lmm):
    with pytest.raises(DataError, match=r"fewer than the 500 of its memory: lower context\.tokens"):
        task(lmm, tokens=500)
    with pytest.raises(DataError, match="ask about no document"):
        made = task(lmm, tokens=12)
        made.prepare(samples(None))
    with pytest.raises(DataError, match="has no answer to learn"):
        made.training_example(replace(samples()[0], answer=Answer()))
    with pytest.raises(SettingsError, match=r"heads\.options\.context\.form"):
        task(lmm, form="poem")
