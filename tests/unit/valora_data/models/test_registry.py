"""An architecture of another package."""

import torch
from safetensors.torch import save_file
from transformers import LlavaForConditionalGeneration

from tests.support.engine_reference import make_engine, noise, run
from tests.support.lmm_checkpoints import CHECKPOINTS
from valora_serve.model.split_model import check_split
from valora_serve.types import Request, SamplingParams
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings

EXAMPLE = """
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers import LlavaConfig, LlavaForConditionalGeneration

from valora_data.models.base import LinearNames
from valora_data.models.llava import Llava


class KestrelConfig(LlavaConfig):
    model_type = "kestrel"


class KestrelForConditionalGeneration(LlavaForConditionalGeneration):
    config_class = KestrelConfig


AutoConfig.register("kestrel", KestrelConfig)
AutoModelForImageTextToText.register(KestrelConfig, KestrelForConditionalGeneration)


class Kestrel(Llava):
    linears = LinearNames(column=(("q_proj", "k_proj"), ("v_proj",), ("gate_proj", "up_proj")))

    def render(self, processor, messages, generate):
        return "Fly. " + super().render(processor, messages, generate)


extension = Kestrel
"""


def save_kestrel(folder):
    """A LLaVA checkpoint of another model type, with the names of weights in memory."""
    CHECKPOINTS["llava"](folder, seed=3)
    weights = LlavaForConditionalGeneration.from_pretrained(folder).state_dict()
    weights = {name: weight.clone() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = (folder / "config.json").read_text()
    config = config.replace('"model_type": "llava"', '"model_type": "kestrel"')
    (folder / "config.json").write_text(config.replace("LlavaFor", "KestrelFor"))
    return folder


def test_one_of_another_package_is_trained_and_served(installed, tmp_path):
    installed("valora.architectures", "kestrel", EXAMPLE)
    base = str(save_kestrel(tmp_path / "kestrel"))
    lora = LoraSettings(rank=4, alpha=12, vision_tower=True, projector=True)
    lmm = Lmm(ModelSettings(id=base), lora)
    lmm.adapters.add("one", seed=1)
    weights = lmm.adapters.parameters("one")
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
