from pathlib import Path

import pytest
import torch

from tests.bench.base_models.data import build_processor
from tests.bench.base_models.pretrain import Pretraining, load
from tests.bench.base_models.records import LENGTHS, Curriculum, RecordDrawer
from tests.support.cases import others_slow
from valora_data.sources.formats.documents import LINKED_WORDINGS, VALUES, WORDINGS

TINY = Path(__file__).parents[4] / "data/valora_data/tiny"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def processor():
    return build_processor()


@pytest.fixture(scope="module")
def tokenizer(processor):
    return processor.tokenizer.backend_tokenizer


def turns_of(text):
    """The document of a sample, and its questions with their answers."""
    head, *turns = text.replace("<pad>", "").split("<|user|>")
    asked = [turn.removesuffix("</s>").split("<|assistant|>") for turn in turns]
    return head.removeprefix("<s><|system|>"), [(question, answer) for question, answer in asked]


def told_facts(document):
    """Letter, attribute and value of each line."""
    return [tuple(line.split(" ")) for line in document.split("\n")]


@pytest.mark.parametrize("name", others_slow(["records_20", "records_512"], LENGTHS))
def test_ids_are_those_of_the_text(processor, tokenizer, name):
    length = LENGTHS[name]
    drawer = RecordDrawer(tokenizer, 1, CPU)
    batch = drawer.draw(3, length.records, length.turns, length.kinds)
    assert batch.ids.shape == (3, length.tokens)
    assert length.tokens <= 2048
    for ids, start in zip(batch.ids, batch.start, strict=True):
        document, asked = turns_of(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
        chat = [{"role": "system", "content": document}]
        for question, answer in asked:
            chat += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        text = processor.apply_chat_template(chat)
        told = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids[: len(told)].tolist() == told
        assert (ids[len(told) :] == tokenizer.token_to_id("<pad>")).all()
        answers = [tokenizer.decode([i]) for i in ids[start].tolist()]
        assert answers == [answer for _, answer in asked]
        assert (ids[start + 1] == tokenizer.token_to_id("</s>")).all()


@pytest.mark.parametrize(
    "name", others_slow(["records_20", "records_64"], [f"records_{n}" for n in (20, 36, 64, 512)])
)
def test_documents_hold_every_fact_once_and_answer_their_questions(tokenizer, name):
    length = LENGTHS[name]
    drawer = RecordDrawer(tokenizer, 2, CPU)
    batch = drawer.draw(20, length.records, length.turns, length.kinds)
    sizes, wordings, links = set(), set(), 0
    for row, ids in enumerate(batch.ids):
        document, asked = turns_of(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
        facts = {}
        for line in document.split("\n"):
            key, attribute, value = line.split(" ")
            assert value in VALUES[attribute]
            facts[int(key), attribute] = value
        keys = {key for key, _ in facts}
        assert len(facts) == len(document.split("\n")) == len(keys) * length.kinds
        assert len({attribute for _, attribute in facts}) == length.kinds
        told = [
            tuple(tokenizer.decode([i]).strip() for i in line) for line in ids[batch.lines[row]]
        ]
        assert told[: len(facts)] == [(str(key), *rest) for (key, *rest) in told_facts(document)]
        assert not batch.lines[row, len(facts) :].any()
        sizes.add(len(keys))
        parts = [
            [tokenizer.decode([i]).strip() for i in places]
            for places in [*ids[batch.asked[row]], ids[batch.link[row]]]
        ]
        *parts, given = parts
        for part, link, (question, answer) in zip(parts, given, asked, strict=True):
            name, attribute, value = part
            assert value == answer
            if name.isdigit() and int(name) in keys and link == "":
                assert facts[int(name), attribute] == answer
                texts = [wording.format(key=name) for wording in WORDINGS[attribute]]
            else:
                (key, told), *others = [at for at, value in facts.items() if value == name]
                assert not others and link == name and facts[key, attribute] == answer
                texts = [wording.format(value=name) for wording in LINKED_WORDINGS[told, attribute]]
                links += 1
            wordings.add(texts.index(question))
    assert bool(links) == (length.kinds > 1)
    assert min(sizes) >= length.records[0] and max(sizes) <= length.records[1] and len(sizes) > 1
    assert wordings == {0, 1, 2, 3}


@pytest.mark.slow
def test_the_next_length_opens_when_the_newest_is_read(tokenizer):
    lessons = Curriculum(RecordDrawer(tokenizer, 5, CPU), 600, 5)
    names = list(LENGTHS)

    def learn(right, batches):
        drawn = set()
        for _ in range(batches):
            name, batch = lessons.draw()
            assert batch.ids.numel() <= 2048
            lessons.note(name, torch.tensor(right))
            drawn.add(name)
        return drawn

    assert learn(0.5, 60) == {names[0]}
    assert learn(1.0, 40) <= set(names[:3]) and lessons.open >= 2
    opened = lessons.open
    learn(0.0, 60)  # what is open stays open
    assert lessons.open == opened
    learn(1.0, 900)
    assert lessons.open == len(names)
    assert learn(1.0, 100) == set(names)


def test_reading_is_trained(tokenizer):
    """The losses equal those of transformers' own forward pass and attention."""
    model, head, processor = load(TINY)
    task = Pretraining(model, head, processor, CPU)
    batch = RecordDrawer(tokenizer, 6, CPU).draw(2, (1, 3), 4)
    loss, right = task.reading_loss("records_64", batch)
    logits = model(input_ids=batch.ids).logits + task.silent
    wanted = []
    for row in range(2):
        for start in batch.start[row].tolist():
            for at in (start, start + 1):
                wanted.append(-logits[row, at - 1].log_softmax(-1)[batch.ids[row, at]])
    with torch.no_grad():
        shown = task.lookup.loss(batch)
    words = torch.stack(wanted).mean()
    torch.testing.assert_close(loss, words + 1.5 * shown, rtol=1e-4, atol=1e-4)
    said = logits.argmax(-1).gather(1, batch.start - 1)
    hits, linked = (said == batch.ids.gather(1, batch.start)).float(), batch.link > 0
    assert linked.any() and not linked.all()
    assert float(right) == pytest.approx(float(hits[~linked].mean()))
    report = task.report()
    assert report["records_64"] == pytest.approx(float(right))
    assert report["linked"] == pytest.approx(float(hits[linked].mean()))
    loss.backward()
    assert model.model.language_model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
