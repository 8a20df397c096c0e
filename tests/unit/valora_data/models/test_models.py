"""Parts of our base models; and an architecture of another package, trained and served."""

import sys

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration

from tests.support.engine_reference import make_engine, noise, run
from tests.support.lmm_checkpoints import CHECKPOINTS
from valora_data.errors import BundleError
from valora_data.models import smol
from valora_data.models.lite_tower import BLOCKS, LiteTowerConfig, tower_of
from valora_serve.model.split import check_split
from valora_serve.types import Request, SamplingParams
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings


def package_weights():
    """Random weights under names like the package's: each convolution is followed by its norm."""
    generator, weights, count = torch.Generator().manual_seed(0), {}, 0

    def layer(outputs, inputs, kernel):
        nonlocal count
        count += 1
        size, scale = (outputs, inputs, kernel, kernel), (inputs * kernel**2) ** -0.5
        weights[f"conv{count}.weight"] = torch.randn(size, generator=generator) * scale
        norm = torch.rand((4, outputs), generator=generator) + 0.5
        for part, row in zip(("weight", "bias", "running_mean", "running_var"), norm, strict=True):
            weights[f"norm{count}.{part}"] = row

    layer(32, 3, 3)
    channels = 32
    for repeats, kernel, _, expansion, outputs in BLOCKS:
        for _ in range(repeats):
            wide = channels * expansion
            if expansion > 1:
                layer(wide, channels, 1)
            layer(wide, 1, kernel)
            layer(outputs, wide, 1)
            channels = outputs
    return weights


def features(weights, x):
    """Features of strides 16 and 32 with the padding of TensorFlow ("same")."""
    count = 0

    def layer(x, stride=1, act=True):
        nonlocal count
        count += 1
        w = weights[f"conv{count}.weight"]
        kernel = w.shape[-1]
        edge = max((-(-x.shape[-1] // stride) - 1) * stride + kernel - x.shape[-1], 0)
        x = F.pad(x, (edge // 2, edge - edge // 2) * 2)
        x = F.conv2d(x, w, stride=stride, groups=1 if w.shape[1] > 1 or kernel == 1 else len(w))
        parts = ("running_mean", "running_var", "weight", "bias")
        x = F.batch_norm(x, *(weights[f"norm{count}.{part}"] for part in parts), eps=1e-3)
        return x.clamp(0, 6) if act else x

    x, fine = layer(x, 2), None
    for repeats, _, first, expansion, outputs in BLOCKS:
        for repeat in range(repeats):
            y = layer(x) if expansion > 1 else x
            y = layer(layer(y, first if repeat == 0 else 1), act=False)
            x = x + y if y.shape == x.shape and repeat else y
        fine = x if outputs == 112 else fine
    return fine, x


def test_the_features_are_those_of_the_network():
    weights, side = package_weights(), 96
    pixels = torch.rand((2, 3, side, side), generator=torch.Generator().manual_seed(1)) * 2 - 1
    found = tower_of(weights, LiteTowerConfig())(pixels).last_hidden_state
    fine, coarse = features(weights, pixels)
    wanted = torch.cat([coarse, F.pixel_unshuffle(fine, 2)], 1).flatten(2).transpose(1, 2)
    wanted = F.layer_norm(wanted, wanted.shape[-1:])
    assert found.shape == (2, (side // 32) ** 2, LiteTowerConfig().hidden_size)
    torch.testing.assert_close(found[..., :768], wanted, atol=2e-2, rtol=1e-2)  # bfloat16's
    torch.testing.assert_close(found, found.bfloat16().float(), atol=0, rtol=0)
    places = found[..., 768:]
    assert len(places[0].unique(dim=0)) == places.shape[1]  # every cell has another place
    torch.testing.assert_close(places[0], places[1], atol=0, rtol=0)


def test_a_frozen_tower_follows_its_weights_and_reads_images_of_a_batch_alike():
    tower = tower_of(package_weights(), LiteTowerConfig())
    pixels = torch.rand((2, 3, 64, 64)) * 2 - 1
    for _ in range(2):
        wanted = tower.requires_grad_(True)(pixels).last_hidden_state
        found = tower.requires_grad_(False)(pixels).last_hidden_state
        torch.testing.assert_close(found, wanted.detach(), atol=0.1, rtol=0.05)  # bfloat16's
        alone = [tower(row[None]).last_hidden_state[0] for row in pixels]
        torch.testing.assert_close(torch.stack(alone), found, atol=0, rtol=0)
        with torch.no_grad():
            tower.stem.weight.mul_(-1)


def install(folder, module, name, content, monkeypatch):
    """A package on the path that holds one file."""
    file = folder / module / name
    file.parent.mkdir(parents=True)
    (folder / module / "__init__.py").touch()
    file.write_bytes(content)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("there", [False, True])
def test_packages_that_lack_or_are_of_another_version(there, tmp_path, monkeypatch):
    for module, *_ in smol.HALVES.values():
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, module)
    (package, (module, name, _)), *_ = smol.HALVES.items()
    monkeypatch.setattr(smol, "find_spec", lambda _: None)
    said = f"needs the package {package}: `make base-smol`"
    if there:
        install(tmp_path, module, name, b"other weights", monkeypatch)
        monkeypatch.undo()
        monkeypatch.syspath_prepend(tmp_path)
        said = f"is not the file of {package}.*--force-reinstall"
    with pytest.raises(BundleError, match=said):
        smol.halves()


def test_a_connector_is_merged_as_by_peft():
    torch.manual_seed(0)
    plain = nn.ModuleDict({"layer": nn.Linear(6, 5), "projector": nn.Linear(4, 6)})
    tuned = nn.ModuleDict({"layer": nn.Linear(6, 5), "projector": nn.Linear(4, 6)})
    tuned.load_state_dict(plain.state_dict())
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["layer"], init_lora_weights=False)
    inject_adapter_in_model(config, tuned)
    nn.init.normal_(tuned["projector"].weight)
    weights = {
        name.replace(".default.weight", ""): value
        for name, value in tuned.state_dict().items()
        if "lora" in name or name.startswith("projector")
    }
    smol.merge(plain, weights)
    x = torch.randn(3, 4)
    expected = tuned["layer"](tuned["projector"](x))
    torch.testing.assert_close(plain["layer"](plain["projector"](x)), expected)


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
