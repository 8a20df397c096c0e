"""LoRA adapters: saved for plain PEFT, on the right modules, in the base's precision."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.support.training_lmm import PROMPTS, disturb, load, questions, reference, visual
from valora_train.model.lmm import Lmm
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
