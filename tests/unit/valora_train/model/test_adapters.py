"""LoRA adapters: saved for plain PEFT, on the right modules, in the base's precision."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.support.lmm_checkpoints import TEXT_CHECKPOINTS
from tests.support.training_lmm import (
    PROMPTS,
    disturb,
    load,
    reference,
    visual,
    whole,
)
from valora_train.errors import SettingsError
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings


@pytest.mark.parametrize("vision", [False, True])
def test_saved_adapters_load_in_plain_peft(random_llava, images, tmp_path, vision):
    lmm = load(random_llava, vision_tower=vision, projector=vision, rslora=vision)
    for name in ("one", "two"):
        lmm.adapters.add(name, seed=1)
        disturb(lmm, name)
        lmm.adapters.save(name, tmp_path / name, "some-base")
    processor = AutoProcessor.from_pretrained(random_llava)
    for name in ("one", "two"):
        lmm.adapters.activate(name)
        hidden = visual(lmm, PROMPTS, images)
        base = AutoModelForImageTextToText.from_pretrained(random_llava)
        model = PeftModel.from_pretrained(base, tmp_path / name)
        for row, prompt, image in zip(hidden, PROMPTS, images, strict=True):
            torch.testing.assert_close(
                row, reference(model, processor, prompt, image), atol=2e-5, rtol=1e-4
            )


def test_without_adapter_it_is_the_base_again(random_llava, images):
    lmm = load(random_llava)
    before = visual(lmm, PROMPTS, images)
    lmm.adapters.add("one", seed=1)
    names = lmm.adapters.parameters("one")
    assert len(names) == 2 * 2 * 4  # two layers, A and B, q k v o
    assert all("language_model" in name for name in names)
    disturb(lmm, "one")
    assert not torch.equal(visual(lmm, PROMPTS, images), before)
    lmm.adapters.activate(None)
    assert torch.equal(visual(lmm, PROMPTS, images), before)


def test_vision_and_projector_are_found_in_every_family(family, checkpoint):
    lmm = load(checkpoint, vision_tower=True, projector=True)
    if family in TEXT_CHECKPOINTS:
        with pytest.raises(SettingsError, match="has no linear layers for LoRA"):
            lmm.adapters.add("one", seed=1)
        return
    lmm.adapters.add("one", seed=1)
    names = set(lmm.adapters.parameters("one"))
    parts = ("language_model", "visual.blocks", "merger")
    if family in ("idefics3", "smolvlm"):
        parts = ("text_model", "vision_model", "connector")
    elif family in ("internvl", "llava", "llava_next"):
        parts = ("language_model", "vision_tower", "multi_modal_projector")
    assert all(any(part in name for name in names) for part in parts)


def two_passes(folder, adapter, example, answer):
    """Logits of an answer by PEFT: the prompt without the adapter, the rest with it."""
    model, inputs = whole(folder, example)
    model = PeftModel.from_pretrained(model, adapter)
    ids = inputs.pop("input_ids")
    inputs.pop("attention_mask")
    with torch.no_grad():
        with model.disable_adapter():
            read = model(input_ids=ids[:, :-1], **inputs, use_cache=True)
        rest = torch.cat([ids[:, -1:], torch.tensor([answer], dtype=torch.int64)], dim=1)
        return model(input_ids=rest, past_key_values=read.past_key_values).logits[0]


def test_at_decoding_only_it_acts_from_the_last_token_on(random_llava, images, tmp_path):
    words, gradients = ["a", "the one at the left", "yes"], []
    examples = [
        Example(prompt, (image,), answer=lambda _, text=text: text)
        for prompt, image, text in zip(PROMPTS, images, words, strict=True)
    ]
    asked = [replace(example, answer=None) for example in examples]
    for checkpointing in (True, False):  # which computes everything again
        settings = ModelSettings(id=str(random_llava), gradient_checkpointing=checkpointing)
        lmm = Lmm(settings, LoraSettings(rank=4, alpha=12, decode_only=True))
        lmm.adapters.add("late", seed=1)
        disturb(lmm, "late")
        states = lmm.states(lmm.encode(examples))
        hidden, tokens = states.answer_pairs()
        logits = lmm.logits(hidden)
        torch.nn.functional.cross_entropy(logits, tokens).backward()
        gradients.append([weight.grad for weight in lmm.adapters.parameters("late").values()])
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    lmm.adapters.save("late", tmp_path, "some-base")
    lengths = [end - first for end, first in zip(states.lengths, states.prompts, strict=True)]
    for example, found, answer in zip(
        asked, logits.split(lengths), tokens.split(lengths), strict=True
    ):
        expected = two_passes(random_llava, tmp_path, example, answer.tolist())
        torch.testing.assert_close(found, expected[:-1], atol=2e-5, rtol=1e-4)
    said = lmm.write(lmm.encode(asked), max_tokens=4)
    for text, example in zip(said, asked, strict=True):
        written = []
        for _ in range(4):
            step = two_passes(random_llava, tmp_path, example, written)[-1]
            written.append(int(step.argmax()))
        assert text == lmm.text_of(written)
    # What precedes the last token of a prompt is the base model's, to the bit; also of an adapter
    # that is loaded, or merged from such ones.
    lmm.adapters.load("loaded", tmp_path, decode_only=True)
    names = ["late", "loaded"]
    lmm.adapters.peft.base_model.add_weighted_adapter(names, [1.0, 1.0], "both", "linear")
    lmm.adapters.adopt("both", decode_only=True)
    lmm.adapters.activate(None)
    plain = lmm.states(lmm.encode(examples)).hidden
    for name in (*names, "both"):
        lmm.adapters.activate(name)
        found = lmm.states(lmm.encode(examples)).hidden
        for row, prompt in enumerate(states.prompts):
            torch.testing.assert_close(found[row, : prompt - 1], plain[row, : prompt - 1])
            assert not torch.allclose(found[row, prompt - 1], plain[row, prompt - 1])
    with pytest.raises(SettingsError, match="photo has no linear layers for LoRA"):
        load("photo", vision_tower=True).adapters.add("one", seed=0)
