"""Adapters from PEFT folders: the same deltas as under PEFT, or an error that names the reason."""

import copy
import json
import shutil

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from tests.support.serve_helpers import (
    EVERYTHING,
    LANGUAGE,
    PROJECTOR,
    VISION,
    load_base,
    make_adapter,
    targets_of,
)
from valora_data.contract.architectures.base import ModelPart
from valora_serve.catalogue.adapters import CONFIG, WEIGHTS, read_adapter
from valora_serve.errors import AdapterError

CASES = {
    "plain": {"rank": 8, "alpha": 24},
    "rslora": {"rank": 8, "alpha": 24, "use_rslora": True},
    "everything": {"rank": 4, "alpha": 4, "targets": EVERYTHING},
    "list": {"rank": 4, "targets": ["q_proj", "fc1", "linear_2"]},
    "all-linear": {"rank": 4, "targets": "all-linear"},
    "excluded": {"targets": ["q_proj", "v_proj"], "exclude_modules": r".*vision_tower.*"},
    "one layer": {
        "targets": ["q_proj", "down_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "layers",
    },
    "patterns": {
        "rank": 8,
        "alpha": 16,
        "targets": EVERYTHING,
        "rank_pattern": {"v_proj": 4, r"layers\.1\.self_attn\.q_proj": 2, "linear_1": 12},
        "alpha_pattern": {"k_proj": 6, r".*language_model\.layers\.0\.mlp\.up_proj": 40},
    },
    "rslora patterns": {
        "rank": 8,
        "alpha": 16,
        "use_rslora": True,
        "rank_pattern": {"v_proj": 3},
        "alpha_pattern": {"o_proj": 5, "v_proj": 7},
    },
    "fan in": {"rank": 4, "fan_in_fan_out": True},
}


@pytest.fixture(scope="session")
def targets(random_llava):
    return targets_of(load_base(str(random_llava)))


def deltas_of_peft(base, folder):
    model = PeftModel.from_pretrained(copy.deepcopy(load_base(base)), folder)
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default")
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def check(adapter, expected):
    assert set(adapter.modules) == set(expected)
    for path, delta in expected.items():
        pair = adapter.modules[path]
        torch.testing.assert_close(pair.scaling * (pair.b @ pair.a), delta, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("case", CASES)
def test_deltas_are_peft_s(case, random_llava, targets, tmp_path):
    make_adapter(tmp_path, str(random_llava), seed=3, **CASES[case])
    adapter = read_adapter(tmp_path, targets)
    check(adapter, deltas_of_peft(str(random_llava), tmp_path))
    assert adapter.rank == max(pair.a.shape[0] for pair in adapter.modules.values())
    assert list(adapter.modules) == [path for path in targets.linears if path in adapter.modules]


def test_scaling_is_that_of_most_modules(random_llava, targets, tmp_path):
    make_adapter(tmp_path, str(random_llava), seed=3, rank=8, alpha=24, alpha_pattern={"k_proj": 5})
    assert read_adapter(tmp_path, targets).scaling == 3.0


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        (LANGUAGE, {ModelPart.LANGUAGE}),
        (VISION, {ModelPart.VISION}),
        (f"{PROJECTOR}|{LANGUAGE}", {ModelPart.PROJECTOR, ModelPart.LANGUAGE}),
    ],
)
def test_parts_that_it_changes(wanted, parts, random_llava, targets, tmp_path):
    make_adapter(tmp_path, str(random_llava), seed=1, targets=wanted)
    adapter = read_adapter(tmp_path, targets)
    assert adapter.parts == parts
    assert bool(adapter.vision_content) == (parts != {ModelPart.LANGUAGE})


def rewrite(folder, rename=lambda name: name, change=lambda name, tensor: tensor):
    """Change the tensors of an adapter."""
    file = folder / WEIGHTS
    tensors = {rename(k): change(k, v).contiguous() for k, v in load_file(file).items()}
    save_file(tensors, file)


def configure(folder, **options):
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


OLD_NAMES = {
    "transformers 4": lambda name: name.replace(
        ".model.model.language_model.", ".model.language_model.model."
    ).replace(".model.model.vision_tower.encoder", ".model.vision_tower.vision_model.encoder")
    .replace(".model.model.multi_modal", ".model.multi_modal"),
    "adapter name": lambda name: name.replace(".weight", ".default.weight"),
    "no prefix": lambda name: name.removeprefix("base_model.model."),
    "inner model": lambda name: name.replace("base_model.model.model.", "base_model.model."),
}  # fmt: skip


@pytest.mark.parametrize("style", OLD_NAMES)
def test_names_of_other_versions(style, random_llava, targets, tmp_path):
    make_adapter(
        tmp_path, str(random_llava), seed=3, targets=EVERYTHING, alpha_pattern={"v_proj": 3}
    )
    expected = deltas_of_peft(str(random_llava), tmp_path)
    before = set(load_file(tmp_path / WEIGHTS))
    content = read_adapter(tmp_path, targets).content
    rewrite(tmp_path, OLD_NAMES[style])
    assert not before & set(load_file(tmp_path / WEIGHTS))
    adapter = read_adapter(tmp_path, targets)
    check(adapter, expected)
    assert adapter.content == content


def test_old_names_of_qwen():
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32,
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
            "out_hidden_size": 16,
        },
    )  # fmt: skip
    with torch.device("meta"):
        targets = targets_of(Qwen2_5_VLForConditionalGeneration(config))
    q = "model.language_model.layers.0.self_attn.q_proj"
    assert targets.find(q) == targets.find("model.layers.0.self_attn.q_proj") == q
    qkv = "model.visual.blocks.0.attn.qkv"
    assert targets.find(qkv) == targets.find("visual.blocks.0.attn.qkv") == qkv
    assert targets.linears[qkv] == (48, 16)
    assert targets.parts[q] is ModelPart.LANGUAGE
    assert targets.parts[qkv] is ModelPart.VISION
    assert targets.parts["model.visual.merger.mlp.0"] is ModelPart.PROJECTOR
    assert "lm_head" not in targets.linears


def test_content_is_what_changes_the_result(random_llava, targets, tmp_path):
    first = make_adapter(tmp_path / "a", str(random_llava), seed=3, targets=f"{LANGUAGE}|{VISION}")
    base = read_adapter(first, targets)

    def changed(**options):
        folder = tmp_path / "b"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(first, folder)
        configure(folder, **options)
        return folder

    same = read_adapter(changed(base_model_name_or_path="elsewhere", lora_dropout=0.3), targets)
    assert (same.content, same.vision_content) == (base.content, base.vision_content)
    other = read_adapter(changed(lora_alpha=15), targets)
    assert other.content != base.content and other.vision_content != base.vision_content
    folder = changed()
    language = "layers.1.self_attn.o_proj.lora_B"
    rewrite(folder, change=lambda name, t: t + 1e-3 * (language in name))
    other = read_adapter(folder, targets)
    assert other.content != base.content and other.vision_content == base.vision_content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "LOHA"}, "type LOHA"),
        ({"use_dora": True}, "use_dora = True cannot be served"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"bias": "lora_only"}, "bias = 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"some_new_option": "yes"}, "some_new_option"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base weights"),
        ({"init_lora_weights": "olora"}, "changed the base weights"),
        ({"r": 4}, r"q_proj.lora_.*expected shape .*4"),
        ({"r": "8"}, "is damaged"),
        ({"lora_alpha": float("nan")}, "is damaged"),
        ({"rank_pattern": {"(": 4}}, "is damaged"),
        ({"target_modules": ["v_proj"]}, "q_proj.* target_modules does not name"),
        ({"layers_to_transform": [1], "target_modules": ["q_proj"]}, "target_modules does not"),
    ],
)
def test_options_that_cannot_be_served_are_named(options, message, random_llava, targets, tmp_path):
    make_adapter(tmp_path, str(random_llava), seed=1, targets=r".*language_model.*q_proj")
    configure(tmp_path, **options)
    with pytest.raises(AdapterError, match=message) as caught:
        read_adapter(tmp_path, targets)
    assert str(tmp_path) in str(caught.value)


def put(value):
    def change(name, tensor):
        if "layers.1.self_attn.q_proj.lora_A" in name:
            tensor = tensor.clone()
            tensor[1, 2] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("rename", "change", "message"),
    [
        (lambda n: n.replace("layers.1", "layers.7"), None, r"layers\.7.*matches no linear"),
        (lambda n: n.replace("lora_A", "lora_embedding_A"), None, "matches no linear"),
        (lambda n: n.replace("q_proj", "q_norm"), None, "q_norm.*matches no linear"),
        (lambda n: n.replace("layers.1.self_attn.q_proj.lora_B", "x"), None, "x.*matches no"),
        (None, put(float("nan")), r"layers\.1.*q_proj\.lora_A.*NaN or Inf"),
        (None, put(float("inf")), r"layers\.1.*q_proj\.lora_A.*NaN or Inf"),
        (None, lambda n, t: t[:, 1:] if "1.self_attn.q_proj.lora_A" in n else t, "expected shape"),
        (None, lambda n, t: t.to(torch.int32), r"dtype torch\.int32; save"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    rename, change, message, random_llava, targets, tmp_path
):
    make_adapter(tmp_path, str(random_llava), seed=1, targets=r".*language_model.*q_proj")
    rewrite(tmp_path, rename or (lambda name: name), change or (lambda name, tensor: tensor))
    with pytest.raises(AdapterError, match=message):
        read_adapter(tmp_path, targets)


def test_half_a_pair_and_twice_the_same(random_llava, targets, tmp_path):
    make_adapter(tmp_path, str(random_llava), seed=1, targets=r".*language_model.*q_proj")
    tensors = load_file(tmp_path / WEIGHTS)
    name = next(key for key in tensors if "layers.0" in key and "lora_B" in key)
    save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match=r"layers\.0.*no partner"):
        read_adapter(tmp_path, targets)
    twice = name.removeprefix("base_model.model.")
    save_file(tensors | {twice: tensors[name].clone()}, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match="stored twice"):
        read_adapter(tmp_path, targets)
    save_file({}, tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match="no tensors"):
        read_adapter(tmp_path, targets)


def test_damaged_files(random_llava, targets, tmp_path):
    make_adapter(tmp_path, str(random_llava), seed=1)
    weights = tmp_path / WEIGHTS
    whole = weights.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 5, 0):
        weights.write_bytes(whole[:size])
        with pytest.raises(AdapterError, match="truncated or damaged"):
            read_adapter(tmp_path, targets)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"pickle.*save it as safetensors"):
        read_adapter(tmp_path, targets)
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match=f"holds no {WEIGHTS}"):
        read_adapter(tmp_path, targets)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(AdapterError, match="no readable adapter_config"):
        read_adapter(tmp_path, targets)
    (tmp_path / CONFIG).write_text("[]")
    with pytest.raises(AdapterError, match="only LORA"):
        read_adapter(tmp_path, targets)
    with pytest.raises(AdapterError, match="is no adapter"):
        read_adapter(tmp_path / "nowhere", targets)


def test_an_adapter_for_another_base_model(random_llava, tmp_path):
    make_adapter(tmp_path, str(random_llava), seed=1)
    config = LlavaConfig.from_pretrained(random_llava)
    config.text_config = LlamaConfig(**{**config.text_config.to_dict(), "hidden_size": 64})
    with torch.device("meta"):
        targets = targets_of(LlavaForConditionalGeneration(config))
    with pytest.raises(AdapterError, match=r"expected shape .*64.*got .*48.*use the base model"):
        read_adapter(tmp_path, targets)


def test_rank_above_the_limit(random_llava, targets, tmp_path):
    make_adapter(tmp_path, str(random_llava), seed=1, rank=257, targets=r".*0.self_attn.k_proj")
    with pytest.raises(AdapterError, match="at most 256, got 257"):
        read_adapter(tmp_path, targets)
