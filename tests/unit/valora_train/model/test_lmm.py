"""Reading the LMM: equal to transformers' own forward pass, and to plain PEFT with an adapter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
)

from tests.support.helpers import coloured_squares
from tests.support.lmm_checkpoints import CHECKPOINTS
from valora_data.errors import DataError
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings

PROMPTS = ["detect cat", "detect anything at all", "x"]


def load(folder, **lora):
    return Lmm(ModelSettings(id=str(folder)), LoraSettings(rank=4, alpha=12, **lora))


def visual(lmm, prompts, images):
    """Last hidden states of the visual tokens."""
    examples = [Example(prompt, (image,)) for prompt, image in zip(prompts, images, strict=True)]
    with torch.no_grad():
        return lmm.states(lmm.encode(examples, whole=False)).head_inputs().visual


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
    for parameter in lmm.adapters.parameters(name).values():
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


def test_targets_are_the_language_models_alone_by_default(random_llava):
    lmm = load(random_llava)
    lmm.adapters.add("one", seed=1)
    names = lmm.adapters.parameters("one")
    assert len(names) == 2 * 2 * 4  # two layers, A and B, q k v o
    assert all("language_model" in name for name in names)
    vision = load(random_llava, vision_tower=True, projector=True)
    vision.adapters.add("one", seed=1)
    kinds = {name.split(".layers.")[0].split(".")[-1] for name in vision.adapters.parameters("one")}
    assert any("vision" in n or "encoder" in n for n in kinds)
    assert any("multi_modal_projector" in n for n in vision.adapters.parameters("one"))


def test_without_adapter_it_is_the_base_again(random_llava, images):
    lmm = load(random_llava)
    before = visual(lmm, PROMPTS, images)
    lmm.adapters.add("one", seed=1)
    disturb(lmm, "one")
    assert not torch.equal(visual(lmm, PROMPTS, images), before)
    lmm.adapters.activate(None)
    assert torch.equal(visual(lmm, PROMPTS, images), before)


def test_images_of_any_size(random_llava):
    lmm = load(random_llava)
    shown = [Image.new("RGB", (640, 31)), Image.new("RGB", (5, 5))]
    assert visual(lmm, ["a", "b"], shown).shape == (2, 16, 48)


FAMILIES = list(CHECKPOINTS)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory):
    return CHECKPOINTS[family](tmp_path_factory.mktemp(family), seed=5)


def picture(width, height, seed):
    pixels = torch.randint(
        0, 255, (height, width, 3), generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def questions(family):
    """One image, several of different sizes, a video."""
    frames = tuple(picture(40, 32, 20 + n) for n in range(4))
    return [
        Example("Say it.", (picture(40, 30, 1),)),
        Example("Which one is the larger of both?", (picture(20, 48, 2), picture(64, 24, 3))),
        Example("What happens?", frames, video=family != "llava"),
    ]


def whole(folder, example):
    """Model, and inputs of an example by transformers' processor, as a user makes them."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    kind = "video" if example.video else "image"
    shown = [{"type": kind}] * (1 if example.video else len(example.images))
    turn = [{"role": "user", "content": [{"type": "text", "text": example.question}, *shown]}]
    text = processor.apply_chat_template(turn, add_generation_prompt=True)
    media = {"images": list(example.images)}
    if example.video:
        frames = np.stack([np.asarray(frame) for frame in example.images])
        media = {"videos": [frames], "videos_kwargs": {"do_sample_frames": False}}
    return model, processor(text=[text], return_tensors="pt", add_special_tokens=False, **media)


def test_hidden_states_of_every_family_equal_transformers(family, checkpoint):
    lmm = load(checkpoint)
    batch = lmm.encode(questions(family))
    with torch.no_grad():
        states = lmm.states(batch)
    read = states.head_inputs()
    for row, example in enumerate(questions(family)):
        model, inputs = whole(checkpoint, example)
        with torch.no_grad():
            out = model(**inputs, output_hidden_states=True).hidden_states[-1][0]
        ids = inputs["input_ids"][0]
        assert batch[row].ids.tolist() == ids.tolist()
        tokens = (model.config.image_token_id, getattr(model.config, "video_token_id", None))
        seen = torch.tensor([int(token) in tokens for token in ids])
        assert int(read.real[row].sum()) == int(seen.sum())
        torch.testing.assert_close(read.last[row], out[-1], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(
            read.visual[row][read.real[row]], out[seen], atol=1e-4, rtol=1e-3
        )


def test_what_it_writes_is_what_generate_writes(family, checkpoint):
    lmm = load(checkpoint)
    said = lmm.write(lmm.encode(questions(family)), max_tokens=9)
    for text, example in zip(said, questions(family), strict=True):
        model, inputs = whole(checkpoint, example)
        ids = model.generate(**inputs, max_new_tokens=9, do_sample=False)
        new = ids[0, inputs["input_ids"].shape[1] :]
        assert text == lmm.tokenizer.decode(new, skip_special_tokens=True).strip()
    assert len(set(said)) == len(said)


def test_only_the_answer_is_learnt(family, checkpoint):
    lmm = load(checkpoint)
    answers = ["red", "the one at the left", "yes"]
    taught = [
        replace(example, answer=lambda _, text=text: text)
        for example, text in zip(questions(family), answers, strict=True)
    ]
    with torch.no_grad():
        hidden, tokens = lmm.states(lmm.encode(taught)).answer_pairs()
        loss = torch.nn.functional.cross_entropy(lmm.logits(hidden), tokens, reduction="sum")
    expected, end = 0.0, lmm.tokenizer.eos_token_id
    for example, text in zip(questions(family), answers, strict=True):
        model, inputs = whole(checkpoint, example)
        answer = [*lmm.tokenizer(text, add_special_tokens=False)["input_ids"], end]
        ids = torch.cat([inputs["input_ids"], torch.tensor([answer])], dim=1)
        inputs = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in inputs:
            more = torch.zeros(1, len(answer), dtype=inputs["mm_token_type_ids"].dtype)
            inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], more], dim=1)
        labels = ids.clone()
        labels[:, : -len(answer)] = -100
        with torch.no_grad():
            expected += float(model(**inputs, labels=labels).loss) * len(answer)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("keep", [True, False])
def test_features_may_be_kept_or_not(family, checkpoint, keep):
    lmm = Lmm(ModelSettings(id=str(checkpoint), keep_features=keep), LoraSettings(rank=4))
    batch = lmm.encode(questions(family))
    assert all((item.features is not None) == keep for item in batch)
    with torch.no_grad():
        alone = torch.cat([lmm.states([item]).head_inputs().last for item in batch])
        together = lmm.states(batch).head_inputs().last
    torch.testing.assert_close(alone, together, atol=1e-4, rtol=1e-3)
    assert lmm.write(batch, 6) == load(checkpoint).write(
        load(checkpoint).encode(questions(family)), 6
    )


def test_checkpointed_gradients_are_the_same(family, checkpoint):
    found = []
    for checkpointing in (False, True):
        settings = ModelSettings(id=str(checkpoint), gradient_checkpointing=checkpointing)
        lmm = Lmm(settings, LoraSettings(rank=4))
        lmm.adapters.add("one", seed=2)
        disturb(lmm, "one")
        lmm.states(lmm.encode(questions(family))).head_inputs().last.sum().backward()
        found.append({key: p.grad for key, p in lmm.adapters.parameters("one").items()})
    for key, grad in found[0].items():
        torch.testing.assert_close(found[1][key], grad, atol=1e-4, rtol=1e-3)
        assert grad.abs().max() > 0


def watched(layers):
    """The dtypes that layers give, as they give them."""
    found: list[torch.dtype] = []
    for layer in layers:
        layer.register_forward_hook(lambda *call: found.append(call[2].dtype))
    return found


def test_adapters_on_a_16_bit_base_compute_in_its_precision(family, checkpoint):
    found = {}
    for dtype in ("float32", "bfloat16"):
        lmm = Lmm(ModelSettings(id=str(checkpoint), dtype=dtype), LoraSettings(rank=4))
        lmm.adapters.add("one", seed=2)
        disturb(lmm, "one")
        layers = [m for n, m in lmm.model.named_modules() if n.endswith("lora_A.one")]
        inside = watched(layers)
        read = lmm.states(lmm.encode(questions(family))).head_inputs()
        read.last.float().square().sum().backward()
        weights = lmm.adapters.parameters("one")
        assert {p.dtype for p in weights.values()} == {torch.float32}
        assert set(inside) == {getattr(torch, dtype)}
        found[dtype] = read.last.detach().float(), {k: p.grad for k, p in weights.items()}
    (exact, exact_grads), (half, half_grads) = found["float32"], found["bfloat16"]
    assert (half - exact).norm() < 0.05 * exact.norm()
    together = [torch.cat([g.flatten() for g in grads.values()])
                for grads in (exact_grads, half_grads)]  # fmt: skip
    assert torch.nn.functional.cosine_similarity(*together, dim=0) > 0.98


def test_vision_and_projector_are_found_in_every_family(family, checkpoint):
    lmm = load(checkpoint, vision_tower=True, projector=True)
    lmm.adapters.add("one", seed=1)
    names = set(lmm.adapters.parameters("one"))
    inner = "vision_tower" if family == "llava" else "visual.blocks"
    outer = "multi_modal_projector" if family == "llava" else "merger"
    for part in ("language_model", inner, outer):
        assert any(part in name for name in names), part


def test_a_video_without_frames_is_refused(random_llava):
    with pytest.raises(DataError, match="a video no frames"):
        load(random_llava).encode([Example("what?", (), video=True)])
