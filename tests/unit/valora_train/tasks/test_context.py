"""Task `context`: targets, loss and metric in closed form; memories as heads; their encoder."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from tests.support.lmm_checkpoints import CHECKPOINTS
from valora_data.contract.contexts import around_memory, read_encoder
from valora_data.errors import DataError
from valora_data.schema import Answer, Document, Domain, Sample, Task, no_image
from valora_train.errors import SettingsError
from valora_train.model import memory
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import HeadSettings, LoraSettings, ModelSettings
from valora_train.stages import encoder_training
from valora_train.stages.encoder_training import ContextEncoder, one_cycle, train_encoder
from valora_train.tasks.registry import make_task

DOCUMENT = Document("417 color red\n820 thing star\n417 table 52\n131 color blue")
DOMAIN = Domain("ledger", Task.CONTEXT, (), "{}", 0.9)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(CHECKPOINTS["llava"](tmp_path_factory.mktemp("base"), seed=3))


@pytest.fixture(scope="module")
def lmm(base):
    return Lmm(ModelSettings(id=base), LoraSettings())


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


DOCUMENTS = {"a": Document("417 color red\n820 thing star"), "b": Document("131 color blue")}


@pytest.fixture
def fresh(base):
    return Lmm(ModelSettings(id=base), LoraSettings(rank=8, alpha=16))


def asked(fresh):
    def learnt(question, answer):
        return Example(question, (), context=True, answer=lambda _: answer)

    first = [learnt("417 color?", "red"), learnt("820 thing?", "star")]
    examples = {"a": first, "b": [learnt("131 color?", "blue")]}
    return {name: (DOCUMENTS[name], fresh.encode(examples[name])) for name in DOCUMENTS}


def test_it_learns_to_reconstruct_and_to_answer(fresh, monkeypatch):
    monkeypatch.setattr(encoder_training, "QUESTIONS", 6)
    module = ContextEncoder(fresh, 4, 0)
    losses = []
    train_encoder(
        module, asked(fresh), reconstruct=16, steps=16, lr=0.02, seed=0,
        on_step=lambda step, steps, loss: losses.append(loss),
    )  # fmt: skip
    assert len(losses) == 32
    assert sum(losses[12:16]) < 0.9 * sum(losses[:4])
    assert sum(losses[-4:]) < 0.9 * sum(losses[16:20])


def test_memory_tokens_are_computed_as_bundles_define_it(fresh, tmp_path):
    module = ContextEncoder(fresh, 4, 0)
    for weight in module.weights():  # B is zero at first, so that A would get no gradient
        torch.nn.init.normal_(weight.data, std=0.1)
    document, questions = asked(fresh)["a"]
    module.loss(document, questions).backward()
    for weight in [*module.weights(), module.queries, module.scale]:
        assert weight.grad is not None and weight.grad.abs().sum() > 0
    with pytest.raises(DataError, match="not albums"):
        module.encode(Document("", (Image.new("RGB", (8, 8)),)))
    with pytest.raises(DataError, match="and 4 memory tokens do not fit"):
        module.encode(Document("red star " * 9000))
    with torch.no_grad():
        made = module.encode(document)
    module.save(tmp_path / "encoder", "base")
    stored = read_encoder(tmp_path / "encoder", fresh.config.get_text_config())
    before, _ = around_memory(fresh)
    words = fresh.tokenizer(document.text, add_special_tokens=False)["input_ids"]
    table = fresh.model.get_input_embeddings()
    inputs = torch.cat([table(torch.tensor([*before, *words])), stored.queries])[None]
    fresh.adapters.load("again", tmp_path / "encoder")
    fresh.adapters.activate("again")
    with torch.no_grad():
        hidden = fresh.language_model(inputs_embeds=inputs).last_hidden_state[0]
    torch.testing.assert_close(made, stored.memory(hidden), atol=1e-5, rtol=1e-4)
    assert (tmp_path / "encoder" / "adapter_model.safetensors").is_file()


def test_rates_rise_and_fall_in_any_number_of_steps():
    for steps in (0, 1, 2, 100):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        schedule, rates = one_cycle(optimizer, 0.3, steps), []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert all(0 < rate <= 0.3 for rate in rates)
    assert max(rates) == pytest.approx(0.3) and rates[0] < 0.1 and rates[-1] < 0.1
