"""Architectures by model type: one of another package, generic ones, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlavaForConditionalGeneration,
)

from tests.support.engine_reference import make_engine, noise, run
from tests.support.lmm_checkpoints import CHECKPOINTS
from valora_data.errors import BundleError
from valora_data.models.base import LinearNames, ModelPart
from valora_data.models.registry import (
    ARCHITECTURES,
    GenericGrid,
    GenericSquare,
    architecture_of,
)
from valora_serve.model.split_model import check_split
from valora_serve.parallel.partition import Slice, partition
from valora_serve.types import Request, SamplingParams
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings

EXAMPLE = '''
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaModel

from valora_data.models.base import LinearNames
from valora_data.models.llava import Llava


class KestrelConfig(LlavaConfig):
    model_type = "kestrel"


class KestrelModel(LlavaModel):
    """LLaVA whose projector is called `bridge`."""

    def __init__(self, config):
        super().__init__(config)
        self.bridge = self.multi_modal_projector
        del self.multi_modal_projector

    @property
    def multi_modal_projector(self):
        return self.bridge


class KestrelForConditionalGeneration(LlavaForConditionalGeneration):
    config_class = KestrelConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = KestrelModel(config)
        self.post_init()


AutoConfig.register("kestrel", KestrelConfig)
AutoModelForImageTextToText.register(KestrelConfig, KestrelForConditionalGeneration)


class Kestrel(Llava):
    vision_modules = ("vision_tower", "bridge")
    projector = "bridge"
    projector_targets = (r".*bridge\\.linear_[12]",)
    linears = LinearNames(column=(("q_proj", "k_proj"), ("v_proj",), ("gate_proj", "up_proj")))

    def render(self, processor, messages, generate):
        return "Fly. " + super().render(processor, messages, generate)


extension = Kestrel
'''


def save_kestrel(folder: Path) -> Path:
    """A LLaVA checkpoint of another model type, with the projector's weights renamed."""
    CHECKPOINTS["llava"](folder, seed=3)
    weights = LlavaForConditionalGeneration.from_pretrained(folder).state_dict()
    renamed = {n.replace("multi_modal_projector", "bridge"): w.clone() for n, w in weights.items()}
    config = (folder / "config.json").read_text()
    config = config.replace('"model_type": "llava"', '"model_type": "kestrel"')
    (folder / "config.json").write_text(config.replace("LlavaFor", "KestrelFor"))
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_one_of_another_package_is_trained_and_served(installed, tmp_path):
    installed("valora.architectures", "kestrel", EXAMPLE)
    base = str(save_kestrel(tmp_path / "kestrel"))
    lora = LoraSettings(rank=4, alpha=12, vision_tower=True, projector=True)
    lmm = Lmm(ModelSettings(id=base), lora)
    lmm.adapters.add("one", seed=1)
    weights = lmm.adapters.parameters("one")
    assert any(".bridge.linear_2." in name for name in weights)
    generator = torch.Generator().manual_seed(4)
    for weight in weights.values():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    lmm.adapters.save("one", tmp_path / "one", base)
    image = noise(40, 30, 1)
    encoded = lmm.encode([Example("Say it.", (image,))])
    assert lmm.tokenizer.decode(encoded[0].ids).startswith("Fly.")
    assert lmm.states(encoded).head_inputs().visual.shape == (1, 16, lmm.width)
    written = lmm.write(encoded, 8)
    lmm.adapters.activate(None)
    assert lmm.write(encoded, 8) != written

    engine = make_engine(base, {"one": tmp_path / "one"}, fresh=True)
    assert engine.lmm.targets.parts["model.bridge.linear_1"] is ModelPart.PROJECTOR
    attention = "model.language_model.layers.0.self_attn"
    groups = {name: one.spec.modules for name, one in engine.lmm.linears.groups.items()}
    assert groups[f"{attention}.q_proj"] == (f"{attention}.q_proj", f"{attention}.k_proj")
    assert groups[f"{attention}.v_proj"] == (f"{attention}.v_proj",)
    check_split(base, 2)
    parts = [{"type": "text", "text": "Say it."}, {"type": "image"}]
    asked = [{"role": "user", "content": parts}]
    sampling = SamplingParams(max_tokens=8)
    request = Request("x", "one", messages=asked, images=[image], sampling=sampling)
    assert run(engine, [request])["x"].text.strip() == written[0]


def test_linears_of_other_names_are_split():
    names = LinearNames((("wq", "wk"), ("w1",)), row=("w2",), kv=("wk",))
    layers = {"0.wq": (64, 32), "0.wk": (8, 32), "0.w1": (48, 32), "0.w2": (32, 48)}
    sizes = {"heads": 8, "kv_heads": 1, "head_dim": 8, "rank": 1, "size": 2}
    assert partition(layers, **sizes, base="b", names=names) == {
        "0.wq": Slice(False, 32, 64), "0.wk": Slice(False, 0, 8), "0.w1": Slice(False, 24, 48),
        "0.w2": Slice(True, 24, 48),
    }  # fmt: skip


TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
LLAMA = {"model_type": "llama", **TEXT}
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
}  # fmt: skip
GLM = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16,
       "intermediate_size": 16}  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
GEMMA = {"model_type": "gemma", **TEXT}


def build(kind, parts):
    config = AutoConfig.for_model(kind, **parts)
    model = AutoModelForCausalLM if kind == "gemma2" else AutoModelForImageTextToText
    with torch.device("meta"):
        return model.from_config(config)


def test_the_shape_of_llava_or_qwen_vl_is_enough():
    more = {"image_token_index": 3, "vision_feature_layers": [-1, -2]}
    model = build("vipllava", {"text_config": LLAMA, "vision_config": CLIP, **more})
    found = architecture_of(model)
    assert isinstance(found, GenericSquare)
    assert found.fixed_grid(model.config) == (4, 4)
    assert set(found.adaptable(model)) == {
        "model.language_model.layers", "model.vision_tower", "model.multi_modal_projector"
    }  # fmt: skip
    found = architecture_of(build("glm4v", {"text_config": TEXT, "vision_config": GLM}))
    assert isinstance(found, GenericGrid)
    assert found.three_positions


@pytest.mark.parametrize(
    ("kind", "parts", "reason"),
    [
        ("gemma2", TEXT, "it has no image token"),
        ("paligemma", {"text_config": GEMMA, "vision_config": SIGLIP}, "attend to those behind"),
        ("llava_onevision", {"text_config": LLAMA, "vision_config": CLIP}, "needs image_sizes"),
    ],
)
def test_others_are_refused_with_the_list_of_known_ones(kind, parts, reason):
    with pytest.raises(BundleError, match=reason) as caught:
        architecture_of(build(kind, parts), "some/model")
    message = str(caught.value)
    assert f"base model some/model has the architecture {kind!r}" in message
    assert "llava_next, mistral, qwen2, qwen2_5_vl, qwen2_vl, qwen3, qwen3_vl, smolvlm" in message
    with pytest.raises(BundleError, match="unknown architecture 'kite': choose one of idefics3, "):
        ARCHITECTURES["kite"]
