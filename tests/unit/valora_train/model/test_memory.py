"""Memories in training: what they replace, computed by transformers from the whole prompt."""

import pytest
import torch
from PIL import Image

from tests.support.lmm_checkpoints import CHECKPOINTS, TEXT_CHECKPOINTS
from valora_data.errors import BundleError, DataError
from valora_data.schema import Document
from valora_train.model import memory
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings

DOCUMENT = Document("417 color red\n820 thing star\n417 table 52")
ALBUM = Document("", tuple(Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")))
QUESTIONS = ["417 color?", "which thing has 820?", "what table has 417?"]


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "qwen3_vl", "llama"])
def lmm(request, tmp_path_factory):
    base = (CHECKPOINTS | TEXT_CHECKPOINTS)[request.param](tmp_path_factory.mktemp("base"), seed=3)
    return Lmm(ModelSettings(id=str(base)), LoraSettings())


def prompt(lmm, document, question):
    """The processor's output for a document and a question, as the template writes them."""
    parts = [{"type": "text", "text": document.text}, *[{"type": "image"}] * len(document.images)]
    asked = {"role": "user", "content": [{"type": "text", "text": question}]}
    text = lmm.render([{"role": "system", "content": parts}, asked])
    return lmm.process(text, document.images)


def examples(answer=None):
    learnt = None if answer is None else (lambda _: answer)
    return [Example(question, (), context=True, answer=learnt) for question in QUESTIONS]


@pytest.mark.parametrize("document", [DOCUMENT, ALBUM], ids=["text", "album"])
def test_the_memory_of_a_whole_document_is_the_whole_prompt(lmm, document):
    if document.images and not lmm.takes_images:
        with pytest.raises(BundleError, match="reads text alone: leave images"):
            memory.read_document(lmm, document)
        return
    close = {"atol": 1e-4, "rtol": 1e-3} if document.images else {"atol": 2e-5, "rtol": 1e-4}
    with pytest.raises(DataError, match="beside a question: split the document"):
        memory.read_document(lmm, Document("red star " * 60_000, document.images))
    read = memory.read_document(lmm, document)
    batch = lmm.encode(examples())
    found = memory.states(lmm, batch, [read] * len(batch))
    for row, question in enumerate(QUESTIONS):
        with torch.no_grad():
            whole = lmm.model.model(**prompt(lmm, document, question)).last_hidden_state[0]
        count = batch[row].length
        torch.testing.assert_close(found.hidden[row, :count], whole[-count:], **close)


def test_answers_are_those_of_the_whole_prompt(lmm):
    read = memory.read_document(lmm, DOCUMENT)
    written = memory.write(lmm, lmm.encode(examples()), [read] * len(QUESTIONS), 6)
    for question, text in zip(QUESTIONS, written, strict=True):
        inputs = prompt(lmm, DOCUMENT, question)
        ids = lmm.model.generate(**inputs, max_new_tokens=6, do_sample=False)
        assert text == lmm.text_of(ids[0, inputs["input_ids"].shape[1] :].tolist())


def test_embeddings_of_the_document_as_memory_tokens_are_the_whole_prompt(lmm):
    ids = lmm.tokenizer(DOCUMENT.text, add_special_tokens=False)["input_ids"]
    tokens = memory.new_memory_tokens(lmm, DOCUMENT, len(ids))
    batch = lmm.encode(examples("red"))
    whole = memory.states(lmm, batch, [memory.read_document(lmm, DOCUMENT)] * 3)
    found = memory.states(lmm, batch, [tokens] * 3)
    for row, item in enumerate(batch):
        count = item.length
        torch.testing.assert_close(
            found.hidden[row, :count], whole.hidden[row, :count], atol=2e-5, rtol=1e-4
        )
    assert found.answer_pairs()[1].tolist() == whole.answer_pairs()[1].tolist()


def test_rows_with_different_memories_are_computed_as_if_alone(lmm):
    other = Document("131 color blue")
    memories = [
        memory.read_document(lmm, DOCUMENT), None, memory.new_memory_tokens(lmm, other, 3)
    ]  # fmt: skip
    batch = lmm.encode(examples("red"))
    together = memory.states(lmm, batch, memories)
    for row, item in enumerate(batch):
        alone = memory.states(lmm, [item], [memories[row]])
        torch.testing.assert_close(
            together.hidden[row, : item.length], alone.hidden[0], atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize("decode_only", [False, True])
def test_rows_that_share_memory_tokens_are_computed_as_one_sequence_each(lmm, decode_only):
    one, other = (memory.new_memory_tokens(lmm, DOCUMENT, count) for count in (4, 4))
    torch.nn.init.normal_(other.embeddings.data, std=0.1)
    memories = [one, other, one]
    batch = lmm.encode(examples("red"))
    lmm.adapters.add("shared", seed=1, decode_only=decode_only)
    try:
        for weight in lmm.adapters.parameters("shared").values():
            torch.nn.init.normal_(weight.data, std=0.1)
        found = memory.states(lmm, batch, memories).hidden
        # Squares of normalised states add up to nearly the same: their gradient is rounding.
        weights = torch.randn(found.shape[-1])
        sums = [(found[row, : item.length] @ weights).sum() for row, item in enumerate(batch)]
        gradient = torch.autograd.grad(sum(sums), one.embeddings)[0]
        table, whole = lmm.model.get_input_embeddings(), []
        for item, known in zip(batch, memories, strict=True):
            head = memory.head_embeddings(lmm, known)
            inputs = torch.cat([head, table(item.ids)])[None]
            lmm.adapters.act_from([len(head) + item.prompt - 1], inputs.shape[1])
            hidden = lmm.language_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
            whole.append(hidden[0, len(head) :])
    finally:
        lmm.adapters.remove("shared")
        lmm.adapters.activate(None)
    for row, expected in enumerate(whole):
        torch.testing.assert_close(found[row, : len(expected)], expected, atol=2e-5, rtol=1e-4)
    total = sum((part @ weights).sum() for part in whole)
    expected = torch.autograd.grad(total, one.embeddings)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-3)


def reference(lmm, document, read):
    """Attention of whole prompts with their answers, summed up, (layers, kv_heads, tokens)."""
    total = 0
    implementation = lmm.model.config._attn_implementation
    lmm.model.set_attn_implementation("eager")
    for question, item in zip(QUESTIONS, lmm.encode(examples("red")), strict=True):
        inputs = prompt(lmm, document, question)
        answer = item.ids[item.prompt : item.length]
        added = torch.cat([inputs["input_ids"], answer[None]], 1)
        if "mm_token_type_ids" in inputs:
            none = inputs["mm_token_type_ids"].new_zeros((1, len(answer)))
            inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], none], 1)
        inputs |= {"input_ids": added, "attention_mask": torch.ones_like(added)}
        with torch.no_grad():
            weights = lmm.model.model(**inputs, output_attentions=True).attentions
        found = torch.cat(list(weights))[:, :, -item.length :, : read.tokens].sum(2)
        total = total + found.unflatten(1, (read.keys.shape[1], -1)).sum(2)
    lmm.model.set_attn_implementation(implementation)
    return total


@pytest.mark.parametrize("document", [DOCUMENT, ALBUM], ids=["text", "album"])
def test_the_mass_is_the_attention_of_whole_prompts(lmm, document, monkeypatch):
    if document.images and not lmm.takes_images:
        pytest.skip("such a model has no albums")
    read = memory.read_document(lmm, document)
    together = memory.attention_mass(lmm, read, lmm.encode(examples("red")))
    torch.testing.assert_close(together, reference(lmm, document, read), atol=1e-4, rtol=1e-3)
    monkeypatch.setattr(memory, "READ_AT_ONCE", 1)
    apart = memory.attention_mass(lmm, read, lmm.encode(examples("red")))
    torch.testing.assert_close(apart, together, atol=1e-5, rtol=1e-4)
    monkeypatch.setattr(memory, "ATTENDING", 1)
    first = memory.attention_mass(lmm, read, lmm.encode(examples("red"))[:1])
    torch.testing.assert_close(memory.attention_mass(lmm, read, lmm.encode(examples("red"))), first)


def test_every_head_keeps_what_is_attended_to_most(lmm):
    read = memory.read_document(lmm, DOCUMENT)
    mass = reference(lmm, DOCUMENT, read)
    some = memory.most_attended(lmm, read, lmm.encode(examples("red")), 5)
    assert (some.tokens, some.position) == (5, read.position)
    for layer, heads in enumerate(mass):
        for head, of_head in enumerate(heads):
            kept = sorted(of_head.topk(5).indices.tolist())
            assert torch.equal(some.keys[layer, head], read.keys[layer, head, kept])
            assert torch.equal(some.values[layer, head], read.values[layer, head, kept])
    whole = memory.most_attended(lmm, read, lmm.encode(examples("red")), read.tokens)
    assert torch.equal(whole.keys, read.keys)
    assert lmm.language_model.config._attn_implementation == "sdpa"  # as before
