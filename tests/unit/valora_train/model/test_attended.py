"""What questions attend to in a document, compared with transformers' own attention weights."""

import pytest
import torch
from PIL import Image

from tests.support.lmm_checkpoints import CHECKPOINTS
from valora_data.schema import Document
from valora_train.model import attended, memory
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings

TEXT = Document("417 color red\n820 thing star\n417 table 52")
ALBUM = Document("", tuple(Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")))
QUESTIONS = ["417 color?", "which thing has 820?"]


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "qwen3_vl"])
def lmm(request, tmp_path_factory):
    base = CHECKPOINTS[request.param](tmp_path_factory.mktemp("base"), seed=3)
    return Lmm(ModelSettings(id=str(base)), LoraSettings())


def encoded(lmm):
    return lmm.encode([Example(question, (), answer=lambda _: "red") for question in QUESTIONS])


def reference(lmm, document, read):
    """Attention of whole prompts with their answers, summed up, (layers, kv_heads, tokens)."""
    parts = [{"type": "text", "text": document.text}, *[{"type": "image"}] * len(document.images)]
    total = 0
    implementation = lmm.model.config._attn_implementation
    lmm.model.set_attn_implementation("eager")
    for question, item in zip(QUESTIONS, encoded(lmm), strict=True):
        asked = {"role": "user", "content": [{"type": "text", "text": question}]}
        text = lmm.render([{"role": "system", "content": parts}, asked])
        inputs = lmm.process(text, document.images)
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


@pytest.mark.parametrize("document", [TEXT, ALBUM], ids=["text", "album"])
def test_the_mass_is_the_attention_of_whole_prompts(lmm, document, monkeypatch):
    read = memory.read_document(lmm, document)
    together = attended.attention_mass(lmm, read, encoded(lmm))
    torch.testing.assert_close(together, reference(lmm, document, read), atol=1e-4, rtol=1e-3)
    monkeypatch.setattr(memory, "READ_AT_ONCE", 1)
    apart = attended.attention_mass(lmm, read, encoded(lmm))
    torch.testing.assert_close(apart, together, atol=1e-5, rtol=1e-4)
    monkeypatch.setattr(attended, "QUESTIONS", 1)
    first = attended.attention_mass(lmm, read, encoded(lmm)[:1])
    torch.testing.assert_close(attended.attention_mass(lmm, read, encoded(lmm)), first)


def test_every_head_keeps_what_is_attended_to_most(lmm):
    read = memory.read_document(lmm, TEXT)
    mass = reference(lmm, TEXT, read)
    some = attended.most_attended(lmm, read, encoded(lmm), 5)
    assert (some.tokens, some.position) == (5, read.position)
    for layer, heads in enumerate(mass):
        for head, of_head in enumerate(heads):
            kept = sorted(of_head.topk(5).indices.tolist())
            assert torch.equal(some.keys[layer, head], read.keys[layer, head, kept])
            assert torch.equal(some.values[layer, head], read.values[layer, head, kept])
    whole = attended.most_attended(lmm, read, encoded(lmm), read.tokens)
    assert torch.equal(whole.keys, read.keys)


def test_the_model_computes_as_before(lmm):
    read = memory.read_document(lmm, TEXT)
    before = memory.states(lmm, encoded(lmm), [read] * 2).hidden
    attended.attention_mass(lmm, read, encoded(lmm))
    assert torch.equal(memory.states(lmm, encoded(lmm), [read] * 2).hidden, before)
    assert lmm.language_model.config._attn_implementation == "sdpa"
