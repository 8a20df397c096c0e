"""Reading the LMM: equal to transformers' own forward pass, and to plain PEFT with an adapter."""

import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.helpers import coloured_squares
from valora_data.errors import BundleError
from valora_train.lmm import Lmm
from valora_train.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings

PROMPTS = ["detect cat", "detect anything at all", "x"]


def load(folder, **lora):
    return Lmm(ModelSettings(id=str(folder)), LoraSettings(rank=4, alpha=12, **lora))


def visual(lmm, prompts, images):
    """Last hidden states of the visual tokens."""
    examples = [Example(prompt, (image,)) for prompt, image in zip(prompts, images, strict=True)]
    with torch.no_grad():
        return lmm.states(lmm.encode(examples, whole=False)).read().visual


def reference(model, processor, prompt, image):
    """Last hidden states of the visual tokens by transformers' whole forward pass."""
    turn = [{"type": "text", "text": prompt}, {"type": "image"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": turn}], add_generation_prompt=True
    )
    inputs = processor(text=text, images=image, return_tensors="pt")
    with torch.no_grad():
        out = model(**inputs, output_hidden_states=True)
    return out.hidden_states[-1][0, inputs["input_ids"][0] == model.config.image_token_id]


@pytest.fixture(scope="module")
def images():
    return [sample.image for sample in coloured_squares(3, seed=7, label="a")]


def disturb(lmm, name):
    generator = torch.Generator().manual_seed(len(name))
    for parameter in lmm.lora_parameters(name).values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_hidden_states_equal_transformers(random_llava, images):
    lmm = load(random_llava)
    hidden = visual(lmm, PROMPTS, images)
    model = AutoModelForImageTextToText.from_pretrained(random_llava)
    processor = AutoProcessor.from_pretrained(random_llava)
    assert lmm.grid_of(images[0]) == (4, 4)
    for row, prompt, image in zip(hidden, PROMPTS, images, strict=True):
        torch.testing.assert_close(
            row, reference(model, processor, prompt, image), atol=2e-5, rtol=1e-4
        )


def test_the_prompt_changes_what_visual_tokens_know(random_llava, images):
    lmm = load(random_llava)
    one, other = visual(lmm, ["detect cat", "detect dog"], [images[0], images[0]])
    assert (one - other).abs().max() > 1e-4


@pytest.mark.parametrize("vision", [False, True])
def test_saved_adapters_load_in_plain_peft(random_llava, images, tmp_path, vision):
    lmm = load(random_llava, vision_tower=vision, projector=vision, rslora=vision)
    for name in ("one", "two"):
        lmm.adapt(name, seed=1)
        disturb(lmm, name)
        lmm.save_adapter(name, tmp_path / name, "some-base")
    processor = AutoProcessor.from_pretrained(random_llava)
    for name in ("one", "two"):
        lmm.activate(name)
        hidden = visual(lmm, PROMPTS, images)
        base = AutoModelForImageTextToText.from_pretrained(random_llava)
        model = PeftModel.from_pretrained(base, tmp_path / name)
        for row, prompt, image in zip(hidden, PROMPTS, images, strict=True):
            torch.testing.assert_close(
                row, reference(model, processor, prompt, image), atol=2e-5, rtol=1e-4
            )


def test_targets_are_the_language_models_alone_by_default(random_llava):
    lmm = load(random_llava)
    lmm.adapt("one", seed=1)
    names = lmm.lora_parameters("one")
    assert len(names) == 2 * 2 * 4  # two layers, A and B, q k v o
    assert all("language_model" in name for name in names)
    vision = load(random_llava, vision_tower=True, projector=True)
    vision.adapt("one", seed=1)
    kinds = {name.split(".layers.")[0].split(".")[-1] for name in vision.lora_parameters("one")}
    assert any("vision" in n or "encoder" in n for n in kinds)
    assert any("multi_modal_projector" in n for n in vision.lora_parameters("one"))


def test_without_adapter_it_is_the_base_again(random_llava, images):
    lmm = load(random_llava)
    before = visual(lmm, PROMPTS, images)
    lmm.adapt("one", seed=1)
    disturb(lmm, "one")
    assert not torch.equal(visual(lmm, PROMPTS, images), before)
    lmm.activate(None)
    assert torch.equal(visual(lmm, PROMPTS, images), before)


def test_images_of_any_size(random_llava):
    lmm = load(random_llava)
    shown = [Image.new("RGB", (640, 31)), Image.new("RGB", (5, 5))]
    assert visual(lmm, ["a", "b"], shown).shape == (2, 16, 48)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nothing"])
def test_a_missing_base_model_is_one_sentence(name):
    with pytest.raises(BundleError, match="does not exist: check the path"):
        load(name)
